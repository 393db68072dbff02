from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowbit.codecs import BlockFloat8
from lowbit.gradients.stored import StoredGradient
from lowbit.train import ConfigError, StepMetrics, TrainConfig, train
from lowbit.train.config import GradientsConfig
from lowbit.train.gradients import Gradients, storage_codec
from lowbit.train.trainer import Trainer
from tests.processes import Ranks
from tests.train.runs import LIMIT, ONE, again, curve, losses, stopped, tiny

EXACT = {"storage": "Cast(dtype=torch.float32)"}  # stored, but nothing lost


@pytest.mark.parametrize(
    ("schedule", "per_rank", "tied"),
    [("1F1B", 1, True), ("InterleavedZeroBubble", 2, False), ("ZBVZeroBubble", 2, True)],
)
def test_storing_is_the_same_run_on_every_schedule(
    ranks: Ranks, tmp_path: Path, schedule: str, per_rank: int, tied: bool
):
    """Hooks, weight passes that bypass them, the mean over micro-batches, clipping, a tied embedding."""
    pipeline = {"schedule": schedule, "stages_per_rank": per_rank}
    config = tiny(tmp_path, model={"tied": tied}, pipeline=pipeline)
    plain = ranks.run(losses, config, timeout=LIMIT)
    stored = ranks.run(losses, again(config, gradients=EXACT), timeout=LIMIT)
    # The clipping factor and 1 / microbatches are multiplied first here, which rounds otherwise.
    assert stored[0] == pytest.approx(plain[0], rel=2e-6)
    assert stored[0] == stored[1]


def _bytes_held(config: TrainConfig) -> tuple[list[float], float]:
    """Losses, and bytes of gradients a parameter after a backward pass."""
    ratios: list[float] = []
    finish = Gradients.finish

    def counting(self: Gradients) -> None:
        assert self.storage is None or all(isinstance(p.grad, StoredGradient | None) for p in self.parameters)
        finish(self)
        plain = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        nbytes = self.storage.nbytes if self.storage is not None else plain
        ratios.append(nbytes / sum(p.numel() for p in self.parameters))

    Gradients.finish = counting
    try:
        return losses(config), ratios[-1]
    finally:
        Gradients.finish = finish


def test_fp8_costs_a_byte_a_parameter_and_hardly_any_loss(tmp_path: Path):
    config = tiny(tmp_path, model={"dim": 128, "ffn": 256}, pipeline=ONE, run={"steps": 6})
    plain, four = _bytes_held(config)
    stored, one = _bytes_held(again(config, gradients={"storage": "fp8"}))
    assert four == 4
    assert 1 < one < 1.04
    assert stored[0] == plain[0], "the first step has not used a gradient yet"
    assert stored[1:] != plain[1:]
    assert stored == pytest.approx(plain, abs=0.02)


def test_weight_passes_leave_no_gradients_behind(ranks: Ranks, tmp_path: Path):
    pipeline = {"schedule": "InterleavedZeroBubble", "stages_per_rank": 2}
    config = tiny(tmp_path, pipeline=pipeline, gradients={"storage": "fp8"})
    for _, held in ranks.run(_bytes_held, config, timeout=LIMIT):
        assert 1 < held < 1.1


def test_a_broken_run_goes_on_bit_for_bit(tmp_path: Path):
    storage = "BlockFloat8(rounding='stochastic')"
    config = tiny(tmp_path, pipeline=ONE, gradients={"storage": storage}, run={"steps": 4, "checkpoint_every": 2})
    whole = again(config, run={"output": str(tmp_path / "whole")})
    train(whole)
    resumed = stopped(config, 3)
    assert train(resumed).steps_here == 2
    assert curve(resumed) == curve(whole)
    with pytest.raises(ConfigError, match=r"gradients\.storage was .* and is fp32 now"):
        train(again(resumed, gradients={"storage": "fp32"}))


def test_nan_stops_the_run_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny(tmp_path, pipeline=ONE, gradients={"storage": "fp8"})
    step, weights = Trainer.step, []

    def poisoned(self: Trainer, number: int) -> StepMetrics:
        if number == 1:
            self.parameters[3].register_hook(lambda gradient: gradient * float("nan"))
            weights.append([p.detach().clone() for p in self.parameters])
        try:
            return step(self, number)
        finally:
            weights.append([p.detach().clone() for p in self.parameters])

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(RuntimeError, match="step 2: .*the norm of the gradients nan"):
        train(config)
    assert all(torch.equal(a, b) for a, b in zip(weights[-1], weights[-2], strict=True))


def test_formats_by_name():
    assert storage_codec(GradientsConfig()) is None
    assert storage_codec(GradientsConfig(storage="fp8")) == BlockFloat8()
