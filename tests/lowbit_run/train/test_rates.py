"""Rates that a run chooses for a goal, measures, raises and records."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit.codecs import parse
from lowbit_run.train import TrainConfig, rates, train
from lowbit_run.train.boundaries import make_codecs
from lowbit_run.train.config import PipelineConfig
from lowbit_run.train.layout import make_layout
from lowbit_run.train.metrics import EVALUATION
from lowbit_run.train.rates import Check, judged, wanted_nats
from tests.lowbit_run.train.runs import LIMIT, again, curve, tiny
from tests.processes import Ranks

AUTO = "TransformQuant(bits='auto')"
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
    goals = "TransformQuant(bits='auto', nats=0.1)", "TransformQuant(bits='auto', nats=0.01)"
    assert wanted_nats(make_codecs(PipelineConfig(forward=("bf16", *goals)), 3)) == 0.01
    assert wanted_nats(make_codecs(PipelineConfig(forward=("bf16", "transform", AUTO)), 3)) is None


@pytest.mark.parametrize(
    "recorded", [(), 7, [["forward", "1"]], [["forward", 1, GOAL, "3"]], [["backward", 1, GOAL, 3.0]]]
)
def test_what_is_recorded_is_checked_before_it_is_used(tmp_path: Path, recorded: Any) -> None:
    config, used = wide(tmp_path), []
    layout, codecs = make_layout(config.pipeline, ranks=2, layers=4), make_codecs(config.pipeline, 1)
    pipeline = SimpleNamespace(codecs=codecs, use_codecs=lambda codecs, keep_state: used.append(codecs))
    members: Any = SimpleNamespace(config=config, layout=layout)
    made = partial(rates.Rates, members, pipeline, None, None)  # pyright: ignore[reportArgumentType]
    assert "does not record the rate of TransformQuant(bits='auto', " in made().restore(4, recorded)
    assert made().restore(3, recorded) == "", "the warm-up is not over"
    assert not used
    both = [[way, 1, str(goal), 2.5] for (way, _), goal in codecs.goals.items()]
    assert made().restore(4, both) == ""
    assert bits({"": repr(used[0].forward[0])}) == {"": 2.5}


def outcome(config: TrainConfig, after: tuple[int, ...], cost: float | None = None, failing: int = 0) -> Any:
    """What a run chose, and its checks; `cost` in place of what is measured."""
    checks: list[Check] = []
    check = rates.Rates.check

    def noted(self: rates.Rates, done: int) -> Check:
        checks.append(check(self, done))
        return checks[-1]

    def stop(metrics: Any) -> None:
        if metrics.step == failing:
            raise KeyboardInterrupt

    patches: dict[str, Any] = {"check": noted}
    if cost is not None:
        patches["_differences"] = lambda _: [(cost * dist.get_rank(), 1.0)] * 2
    with mock.patch.object(rates, "AFTER", after), mock.patch.multiple(rates.Rates, **patches):
        summary = train(config, on_step=stop)
    assert summary.held_out_loss is not None
    assert summary.held_out_loss_codecs is not None
    return summary.chosen, checks, summary.held_out_loss_codecs - summary.held_out_loss


def bits(chosen: dict[str, str]) -> dict[str, float]:
    return {place: parse(codec).bits for place, codec in chosen.items()}  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
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
    sent = [line["bits_forward"] for line in map(json.loads, (tmp_path / "through/run/metrics.jsonl").open())]
    assert sent[5] + 0.4 < sent[6] < sent[6 + 3] - 0.4, "from the step after each check"

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
