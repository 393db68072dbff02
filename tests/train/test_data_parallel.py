"""Pipelines side by side: what one pipeline learns from the whole batch, several learn from their shares of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from lowbit.gradients import GradientStorage
from lowbit.train import ConfigError, TrainConfig
from lowbit.train.checkpoints.manifest import TENSORS, newest_step, step_name
from lowbit.train.metrics import read_metrics
from lowbit.train.prepare import prepare
from tests.processes import Ranks
from tests.train.runs import RESUME, again, curve, losses, stopped, tiny

TWO = {"ranks": 2, "data_parallel": 2, "microbatches": 2}


def weights(config: TrainConfig, rank: int) -> dict[str, torch.Tensor]:
    """Of a rank's newest checkpoint."""
    folder = Path(config.run.output) / "checkpoints"
    share = folder / step_name(newest_step(folder) or 0) / f"rank-{rank}"
    return {name: x for name, x in load_file(share / TENSORS).items() if name.startswith("model/")}


def run(ranks: Ranks, config: TrainConfig) -> list[float]:
    """Losses of a run, which all of its ranks must agree on."""
    outcomes = ranks.run(losses, config, ranks=config.ranks, timeout=120)
    assert all(outcome == pytest.approx(outcomes[0], nan_ok=False) for outcome in outcomes)
    return outcomes[0]


def assert_replicas_equal(config: TrainConfig) -> None:
    for place in range(config.pipeline.ranks):
        first = weights(config, place)
        assert first
        for index in range(1, config.pipeline.data_parallel):
            other = weights(config, place + index * config.pipeline.ranks)
            assert first.keys() == other.keys()
            assert all(torch.equal(first[name], other[name]) for name in first)


def test_shares_of_a_batch_teach_what_the_whole_does(ranks: Ranks, tmp_path: Path):
    alone = run(ranks, tiny(tmp_path / "one", run={"steps": 5}))
    side = {"pipeline": TWO, "gradients": {"all_reduce": "fp32"}}
    assert run(ranks, tiny(tmp_path / "two", run={"steps": 5}, **side)) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("fp8", {"gradients": {"all_reduce": "fp8"}}),
        ("stored", {"gradients": {"all_reduce": "int8", "storage": "fp8"}}),
        ("tied-stored", {"model": {"tied": True}, "gradients": {"storage": "fp8"}}),
    ],
)
def test_replicas_stay_equal(ranks: Ranks, tmp_path: Path, name: str, sections: dict[str, Any]):
    sections = {"pipeline": TWO, **sections}
    found = tiny(tmp_path, run={"steps": 6, "checkpoint_every": 6}, **sections)
    run(ranks, found)
    assert_replicas_equal(found)
    line = read_metrics(Path(found.run.output) / "metrics.jsonl")[-1]
    assert 8 < line["bits_gradients"] <= 32  # tensors of a few elements travel in full


def stored_losses(config: TrainConfig) -> list[float]:
    refused = mock.Mock(side_effect=AssertionError("decoded to be sent"))
    with mock.patch.object(GradientStorage, "all_reduce", refused):
        return losses(config)


@pytest.mark.parametrize("sections", [{}, {"run": {"method": "agoq"}}], ids=["fp8", "agoq"])
def test_stored_gradients_travel_as_they_are_and_a_killed_run_goes_on(
    ranks: Ranks, tmp_path: Path, sections: dict[str, Any]
):
    if sections:
        pytest.importorskip("torchao")
    run_as = {"checkpoint_every": 3, "steps": 6, **sections.get("run", {})}
    gradients = {} if sections else {"storage": "fp8", "all_reduce": "BlockFloat8(rounding='stochastic')"}
    pipeline = {"ranks": 1, "data_parallel": 2, "microbatches": 2}
    whole = tiny(tmp_path / "whole", pipeline=pipeline, gradients=gradients, run=run_as)
    stored = ranks.run(stored_losses, whole, timeout=120)
    assert stored[0] == stored[1]
    assert_replicas_equal(whole)
    first = tiny(tmp_path / "parts", pipeline=pipeline, gradients=gradients, run=run_as)
    ranks.outcomes(stops_after, first, 3, timeout=120)
    ranks.run(stored_losses, again(first, run=RESUME), timeout=120)
    assert curve(first) == curve(whole)
    if not sections:
        plain = again(whole, gradients={"storage": "fp32", "all_reduce": "fp32"})
        assert stored[0] == pytest.approx(ranks.run(losses, plain, timeout=120)[0], abs=0.02)


def stops_after(config: TrainConfig, steps: int) -> None:
    stopped(config, steps + 1)  # the checkpoint of the step before is there


def test_ranks_that_pipelines_do_not_divide_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="pipeline.data_parallel is 2; allowed with 3 ranks: a divisor"):
        prepare(tiny(tmp_path, pipeline=TWO), ranks=3)
