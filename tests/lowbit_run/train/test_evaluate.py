"""Held-out loss in the pipeline."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit.codecs import GroupInt, parse
from lowbit.wire.mailbox import Expected, Mailbox
from lowbit_run.train import TrainConfig, evaluate, train
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from tests.lowbit_run.train.runs import LIMIT, RESUME, again, tiny
from tests.processes import Ranks

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
    return -(-len(trainer.members.prepared.data.held_out) // config.data.batch), losses, done


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


def _held_out_losses(config: TrainConfig) -> tuple[float | None, float | None]:
    summary = train(config)
    return summary.held_out_loss, summary.held_out_loss_codecs


@pytest.mark.parametrize("resumed", [False, True])
def test_the_last_batch_may_be_too_small_for_a_set_rate(ranks: Ranks, tmp_path: Path, resumed: bool) -> None:
    """A run that resumes after its last step evaluates before it trains."""
    data = {"sequence": 64, "batch": 8, "held_out_share": 0.103}
    pipeline = {"forward": "TransformQuant(bits=1.7)", "backward": "TransformQuant()", "microbatches": 2}
    config = tiny(tmp_path, data=data, pipeline=pipeline, run={"eval_batches": 0, "checkpoint_every": 3})
    held_out = len(prepare(config, ranks=2).data.held_out)
    assert held_out % 8 == 1, "one window is left over"
    with pytest.raises(ValueError, match="allowed: at least"):
        parse("TransformQuant(bits=1.7)").nbytes((1, 64, 32))
    outcomes = ranks.run(_held_out_losses, config, timeout=LIMIT)
    if resumed:
        assert ranks.run(_held_out_losses, again(config, run=RESUME), timeout=LIMIT) == outcomes
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == pytest.approx(outcomes[0][0], abs=0.2)


def test_a_checkpoint_before_an_evaluation_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    config = tiny(tmp_path, data={"sequence": 64}, pipeline={"forward": "transform", "backward": []})
    saving = again(config, run={"checkpoint_every": 1})
    without, with_one = (ranks.run(_held_out_losses, each, timeout=LIMIT) for each in (config, saving))
    assert without == with_one
    assert without[0][0] != without[0][1]


def compiled(config: TrainConfig) -> set[int]:
    """Bits of the codecs that a rank has used before its first step."""
    used, encode = set(), GroupInt._encode

    def note(self: GroupInt, *args) -> None:
        used.add(self.bits)
        encode(self, *args)

    GroupInt._encode = note
    try:
        Trainer(prepare(config, ranks=dist.get_world_size()))
        dist.barrier()  # or a rank that leaves early disturbs one that is not ready yet
    finally:
        GroupInt._encode = encode
    return used


def test_kernels_of_a_ranks_own_boundaries_are_compiled_before_the_first_step(ranks: Ranks, tmp_path: Path):
    # A group that no other test has, since each codec is used once in a process.
    forward = ["GroupInt(bits=2, group=88)", "GroupInt(bits=3, group=88)"]
    config = tiny(tmp_path, pipeline={"forward": forward, "backward": "GroupInt(bits=7, group=88)", "ranks": 3})
    assert ranks.run(compiled, config, ranks=3) == [{2, 7}, {2, 3, 7}, {3, 7}]
