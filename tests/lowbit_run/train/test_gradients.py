from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lowbit.gradients import GradientStorage
from lowbit.gradients.stored import StoredGradient
from lowbit_run.train import ConfigError, StepMetrics, TrainConfig, train
from lowbit_run.train.checkpoints.manifest import TENSORS, newest_step, step_name
from lowbit_run.train.gradients import Gradients
from lowbit_run.train.metrics import read_metrics
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, again, curve, losses, stopped, tiny
from tests.processes import Ranks

EXACT = {"storage": "Cast(dtype=torch.float32)"}  # stored, but nothing lost


@pytest.mark.parametrize(
    ("schedule", "per_rank", "tied"),
    [
        ("1F1B", 1, True),
        pytest.param("InterleavedZeroBubble", 2, False, marks=pytest.mark.slow),
        ("ZBVZeroBubble", 2, True),
    ],
)
def test_storing_is_the_same_run_on_every_schedule(
    ranks: Ranks, tmp_path: Path, schedule: str, per_rank: int, tied: bool
):
    """Hooks, weight passes that bypass them, the mean over micro-batches, clipping, a tied embedding."""
    pipeline = {"schedule": schedule, "stages_per_rank": per_rank}
    config = tiny(tmp_path, model={"tied": tied}, pipeline=pipeline)
    plain = ranks.run(losses, config, timeout=LIMIT)
    (stored, _), (there, _) = ranks.run(_bytes_held, again(config, gradients=EXACT), timeout=LIMIT)
    # The clipping factor and 1 / microbatches are multiplied first here, which rounds otherwise.
    assert stored == pytest.approx(plain[0], rel=2e-6)
    assert stored == there


def _bytes_held(config: TrainConfig) -> tuple[list[float], float]:
    """Losses, and bytes of gradients a parameter after a backward pass."""
    ratios: list[float] = []
    finish = Gradients.finish

    def counting(self: Gradients, microbatches: int) -> None:
        assert self.storage is None or all(isinstance(p.grad, StoredGradient | None) for p in self.parameters)
        finish(self, microbatches)
        plain = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        nbytes = self.storage.nbytes if self.storage is not None else plain
        ratios.append(nbytes / sum(p.numel() for p in self.parameters))

    with mock.patch.object(Gradients, "finish", counting):
        return losses(config), ratios[-1]


def test_fp8_costs_a_byte_a_parameter_and_hardly_any_loss(tmp_path: Path):
    config = tiny(tmp_path, model={"dim": 128, "ffn": 256}, pipeline=ONE, run={"steps": 6})
    plain, four = _bytes_held(config)
    stored, one = _bytes_held(again(config, gradients={"storage": "fp8"}))
    assert four == 4
    assert 1 < one < 1.04
    assert stored[0] == plain[0], "the first step has not used a gradient yet"
    assert stored[1:] != plain[1:]
    assert stored == pytest.approx(plain, abs=0.02)


def test_nan_stops_the_run_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny(tmp_path, pipeline=ONE, gradients={"storage": "fp8"})
    step, weights = Trainer.step, []

    def poisoned(self: Trainer, number: int, *trace: Any) -> StepMetrics:
        parameters = self.model.gradients.parameters
        if number == 1:
            parameters[3].register_hook(lambda gradient: gradient * float("nan"))
        weights.append([parameters, [p.detach().clone() for p in parameters]])
        return step(self, number, *trace)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(RuntimeError, match="step 2: .*the norm of the gradients nan"):
        train(config)
    assert all(torch.equal(a, b) for a, b in zip(*weights[-1], strict=True))


def test_a_gradient_that_only_other_replicas_have_is_averaged():
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 2)]
    parameters[1].grad = torch.ones(2)
    Gradients(parameters, None, others=[]).average(lambda flat: mock.Mock(flat=flat.add_(1)))
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[1.0] * 3, [2.0] * 2]


TWO = {"ranks": 2, "data_parallel": 2, "microbatches": 2}


def weights(config: TrainConfig, rank: int) -> dict[str, torch.Tensor]:
    """Return what a rank's newest checkpoint holds."""
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


@pytest.mark.parametrize(
    "sections",
    [
        {"gradients": {"all_reduce": "fp8"}},
        {"gradients": {"all_reduce": "int8", "storage": "fp8"}},
        {"model": {"tied": True}, "gradients": {"storage": "fp8"}},
    ],
    ids=["fp8", "stored", "tied-stored"],
)
def test_replicas_stay_equal(ranks: Ranks, tmp_path: Path, sections: dict[str, Any]):
    found = tiny(tmp_path, pipeline=TWO, run={"steps": 6, "checkpoint_every": 6}, **sections)
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
    whole, first = (
        tiny(tmp_path / name, pipeline=pipeline, gradients=gradients, run=run_as) for name in ("whole", "parts")
    )
    stored = ranks.run(stored_losses, whole, timeout=120)
    assert stored[0] == stored[1]
    assert_replicas_equal(whole)
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
