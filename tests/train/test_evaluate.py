"""The evaluation keeps many batches on their way, and gives the loss of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit.train import TrainConfig, evaluate
from lowbit.train.prepare import prepare
from lowbit.train.trainer import Trainer
from lowbit.wire.mailbox import Expected, Mailbox
from tests.processes import Ranks
from tests.train.runs import again, tiny

ONE = {"ranks": 1, "stages_per_rank": 1, "schedule": "GPipe"}


def _evaluated(config: TrainConfig, bytes_of_rounds: list[int]) -> Any:
    """Batches, losses for each size of rounds, and for each what a rank did in turn: "send", or "wait" to receive."""
    ranks = dist.get_world_size()
    trainer = Trainer(prepare(config, ranks=ranks))
    events: list[str] = []
    send, wait = Mailbox.send, Expected.wait

    def sending(*args: Any, **kwargs: Any) -> Any:
        sent = send(*args, **kwargs)
        events.extend("send" for _ in sent)
        return sent

    def waiting(*args: Any, **kwargs: Any) -> Any:
        events.append("wait")
        return wait(*args, **kwargs)

    losses, done = [], []
    for nbytes in bytes_of_rounds:
        events.clear()
        with (
            mock.patch.object(evaluate, "_ROUND_BYTES", nbytes),
            mock.patch.object(Mailbox, "send", sending),
            mock.patch.object(Expected, "wait", waiting),
        ):
            losses.append(trainer.evaluate())
        done.append(list(events))
    return -(-len(trainer.prepared.data.held_out) // config.data.batch), losses, done


@pytest.mark.parametrize(("schedule", "per_rank", "legs"), [("Interleaved1F1B", 2, 2), ("ZBVZeroBubble", 2, 1)])
def test_a_far_neighbour_is_waited_for_once_a_round(
    ranks: Ranks, tmp_path: Path, schedule: str, per_rank: int, legs: int
):
    """Rank 0 sends all first activations of a round before it waits for anything, and the loss stays the same."""
    pipeline = {"schedule": schedule, "stages_per_rank": per_rank, "forward": "int4"}
    data, run = {"held_out_share": 0.2}, {"eval_batches": 0}
    config = tiny(tmp_path, data=data, pipeline=pipeline, run=run)
    outcomes = ranks.run(_evaluated, config, [1 << 20, 1], timeout=110)
    [(count, [alone], _)] = ranks.run(_evaluated, again(config, pipeline=ONE), [1], ranks=1)
    assert count >= 5, "so that there are three rounds of two"
    for batches, losses, _ in outcomes:
        assert batches == count
        assert losses[0] == losses[1]
        assert losses[0]["held_out_loss"] == alone["held_out_loss"]
        assert losses[0]["held_out_loss_codecs"] != alone["held_out_loss"]
    whole, in_pairs = outcomes[0][2]
    assert whole[: count + 1] == ["send"] * count + ["wait"]
    assert in_pairs[:3] == ["send"] * 2 + ["wait"]
    activations = 2 * legs * count  # of both evaluations; a V's first rank has the sums to tell, too
    assert whole.count("send") == activations + (2 * count if schedule == "ZBVZeroBubble" else 0)
