"""Held-out loss in the pipeline, and a goal in loss that a run measures and keeps."""

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit.codecs import Cast, GroupInt, TransformQuant, parse
from lowbit.wire.mailbox import Expected, Mailbox
from lowbit_run.train import TrainConfig, evaluate, train
from lowbit_run.train.evaluate import Check, judged, wanted_nats
from lowbit_run.train.metrics import EVALUATION
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from tests.lowbit_run.train.runs import RESUME, again, curve, tiny
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


LIMIT = 110
GOAL = "TransformQuant(bits='auto', nats=0.02)"


def wide(folder: Path, nats: str = "0.02", **sections: dict[str, Any]) -> TrainConfig:
    """A run with messages long enough that rates differ."""
    pipeline = {"forward": GOAL.replace("0.02", nats), "warmup_steps": 4, "microbatches": 2}
    data = {"sequence": 64, "batch": 4}
    return tiny(folder, **{"data": data, "pipeline": pipeline, "run": {"steps": 12}} | sections)


def test_a_check_compares_the_cost_beyond_its_error_with_the_goal() -> None:
    met = judged(16, 0.02, [(0.01, 100.0), (0.03, 100.0)])
    assert (met.cost, met.error, met.bits) == (pytest.approx(0.02), pytest.approx(0.01), 0.0)
    assert str(met) == "goal of 0.02 nats: the codecs cost 0.02 ± 0.01 after step 16, which meets it"
    assert judged(16, 0.02, [(0.01, 100.0), (0.05, 100.0)]).bits == 0.0, "within the error"
    assert judged(16, 0.02, [(0.02, 300.0), (0.06, 100.0)]).cost == pytest.approx(0.03), "by tokens"
    missed = judged(32, 0.02, [(0.08, 100.0), (0.08, 100.0)])
    assert missed.bits == pytest.approx(1.0), "four times the goal is a bit"
    assert str(missed).endswith("rates raised by 1.00 bits")
    assert judged(64, 0.02, [(0.08, 1.0)]).bits == pytest.approx(1.0), "one batch has no error to subtract"
    for bad in ([(math.nan, 1.0), (0.0, 1.0)], [(math.inf, 1.0)], []):
        check = judged(16, 0.02, bad)
        assert check.bits == 0.0
        assert str(check).endswith("which is inconclusive")


def test_the_strictest_goal_counts_and_set_rates_have_none() -> None:
    codecs = [TransformQuant(bits="auto", nats=nats) for nats in (0.1, 0.01)]
    assert wanted_nats([Cast(), TransformQuant(bits=3.0), *codecs]) == 0.01
    assert wanted_nats([Cast(), TransformQuant(), TransformQuant(bits="auto")]) is None


def outcome(config: TrainConfig, after: tuple[int, ...], cost: float | None = None, failing: int = 0) -> Any:
    """What a run chose, and its checks; `cost` in place of what is measured."""
    checks: list[Check] = []
    check = evaluate.Goal.check

    def noted(self: evaluate.Goal, done: int) -> Check:
        checks.append(check(self, done))
        return checks[-1]

    def stop(metrics: Any) -> None:
        if metrics.step == failing:
            raise KeyboardInterrupt

    patches: dict[str, Any] = {"check": noted}
    if cost is not None:
        patches["_differences"] = lambda _: [(cost * dist.get_rank(), 1.0)] * 2
    with mock.patch.object(evaluate, "AFTER", after), mock.patch.multiple(evaluate.Goal, **patches):
        summary = train(config, on_step=stop)
    assert summary.held_out_loss is not None
    assert summary.held_out_loss_codecs is not None
    return summary.chosen, checks, summary.held_out_loss_codecs - summary.held_out_loss


def bits(chosen: dict[str, str]) -> dict[str, float]:
    return {place: parse(codec).bits for place, codec in chosen.items()}  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_measures_the_cost_and_keeps_rates_that_meet_the_goal(ranks: Ranks, tmp_path: Path) -> None:
    (chosen, checks, cost), other = ranks.run(outcome, wide(tmp_path, "0.5"), (2, 5), timeout=LIMIT)
    assert other[:2] == (chosen, checks)
    assert [check.step for check in checks] == [6, 9]
    assert all(check.bits == 0 and check.reached and check.cost < 0.5 for check in checks)
    assert len(chosen) == 2
    assert abs(cost) < 0.5
    evaluated = [_sent_for_evaluations(tmp_path)]
    ranks.run(outcome, wide(tmp_path, "0.5"), (), timeout=LIMIT)
    evaluated.append(_sent_for_evaluations(tmp_path))
    assert evaluated[0] > 2 * evaluated[1], "what the checks sent is counted"


def _sent_for_evaluations(folder: Path) -> int:
    return json.loads((folder / "run" / "summary.json").read_text())["parts"][EVALUATION]


def test_all_ranks_raise_their_rates_together_and_a_resumed_run_continues_with_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Rank 0 measures no cost, rank 1 twice what is allowed."""
    through = wide(tmp_path / "through")
    (chosen, checks, _), other = ranks.run(outcome, through, (2, 5), 0.04, timeout=LIMIT)
    assert other[:2] == (chosen, checks)
    assert [check.bits for check in checks] == [pytest.approx(0.5)] * 2
    rates = [line["bits_forward"] for line in map(json.loads, (tmp_path / "through/run/metrics.jsonl").open())]
    assert rates[5] + 0.4 < rates[6] < rates[6 + 3] - 0.4, "from the step after each check"

    stopped = wide(tmp_path / "stopped", run={"steps": 12, "checkpoint_every": 7})
    ranks.outcomes(outcome, stopped, (2, 5), 0.04, 8, timeout=LIMIT)
    resumed = again(stopped, run={"resume": True, "overwrite": False})
    found = ranks.run(outcome, resumed, (2, 5), 0.04, timeout=LIMIT)
    assert [each[0] for each in found] == [chosen, chosen]
    assert [check.step for check in found[0][1]] == [9], "the check before the checkpoint is not made again"
    assert curve(resumed) == curve(through)


def test_a_goal_that_cannot_be_met_is_said_and_training_continues(ranks: Ranks, tmp_path: Path) -> None:
    (chosen, checks, _), _ = ranks.run(outcome, wide(tmp_path, "1e-12"), (2, 5), 0.1, timeout=LIMIT)
    assert set(bits(chosen).values()) == {16.0}
    assert not checks[-1].reached
    assert str(checks[-1]).endswith("at the most bits: it cannot be met; training continues with these")


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
