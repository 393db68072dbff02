"""`run.method = "agoq"`: saved activations, gradients and optimizer of AGoQ in one setting."""

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.activations import LayerAware, LayerChoice, LayerPlan
from lowbit.codecs import BlockFloat8
from lowbit_run.train import ConfigError, StepMetrics, TrainConfig, optim, train
from lowbit_run.train.activations import planned_settings
from lowbit_run.train.config import OptimizerConfig
from lowbit_run.train.footprint import BatchBytes, Line, batch_meter, model_bytes
from lowbit_run.train.layout import make_layout
from lowbit_run.train.prepare import prepare
from lowbit_run.train.saved import bits_by_stage, peaks_of
from lowbit_run.train.trainer import Trainer
from tests.lowbit_run.train.runs import ONE, again, curve, losses, stopped, tiny
from tests.processes import Ranks

LARGE = {"dim": 64, "ffn": 128}  # matrices of 4096 elements and more
installed = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not installed, reason="torchao is not installed")


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """PyTorch's AdamW in the place of torchao's; the list gets one entry for each that is made."""
    made: list[Any] = []

    def stand_in(parameters: Any, config: OptimizerConfig) -> torch.optim.Optimizer:
        made.append(config)
        return optim.make_optimizer(parameters, OptimizerConfig(lr=config.lr))

    monkeypatch.setattr(optim, "eight_bit_adamw", stand_in)
    monkeypatch.setattr("lowbit_run.train.prepare.check_torchao", lambda: None)
    return made


def agoq(folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    return tiny(folder, **sections | {"run": {"method": "agoq"} | sections.get("run", {})})


def trained(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Trainer, list[float]]:
    """The trainer after a run, and the run's losses."""
    trainers: list[Trainer] = []
    step = Trainer.step

    def noting(self: Trainer, *args: Any) -> StepMetrics:
        trainers.append(self)
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", noting)
    found = losses(config)
    return trainers[-1], found


def test_one_setting_turns_on_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_torchao: list[Any]):
    config = agoq(tmp_path, pipeline=ONE)
    trainer, found = trained(config, monkeypatch)
    assert trainer.members.prepared.activations == (LayerAware.published(),)
    assert trainer.members.prepared.storage == trainer.members.prepared.all_reduce == BlockFloat8()
    assert trainer.model.gradients.storage is not None
    assert trainer.model.gradients.storage.codec == BlockFloat8()
    assert [made.states for made in without_torchao] == ["8bit"]
    plain = losses(again(config, run={"method": "none"}, **PLAIN))
    assert found[0] == pytest.approx(plain[0], rel=1e-6), "forward is exact"
    assert found != plain
    assert found == pytest.approx(plain, abs=0.1)


PLAIN: dict[str, Any] = {
    "activations": {"bits": 16, "norm": [], "attention": []},
    "gradients": {"storage": "fp32"},
    "optimizer": {"states": "fp32"},
}


def test_the_name_means_the_settings_that_it_stands_for(tmp_path: Path):
    config = agoq(tmp_path)
    assert again(config) == config, "as launched ranks read it"
    by_hand = again(config, run={"method": "none"})
    assert (by_hand.activations, by_hand.gradients, by_hand.optimizer) == (
        config.activations, config.gradients, config.optimizer,
    )  # fmt: skip
    assert agoq(tmp_path, activations={"group": 32, "rounding": "stochastic"}).activations.group == 32


def test_a_plan_gives_the_bits_of_each_stage(tmp_path: Path, without_torchao: list[Any]):
    config = agoq(tmp_path)
    layout = prepare(config, ranks=2).layout
    made_for = planned_settings(config, layout, 256)
    assert (made_for["optimizer"], made_for["gradients.storage"]) == ("adamw-8bit", repr(BlockFloat8()))
    four, eight = (dict.fromkeys(("norm", "mlp", "linear"), bits) for bits in (4, 8))
    plan = LayerPlan.by_stage((four, eight), layers=layout.layer_counts)
    replace(plan, made_for=made_for).write(tmp_path / "plan.json")
    planned = agoq(tmp_path, activations={"plan": str(tmp_path / "plan.json")})
    assert (planned.gradients, planned.optimizer) == (config.gradients, config.optimizer)
    for policy, bits in zip(prepare(planned, ranks=2).activations, (4, 8), strict=True):
        assert isinstance(policy, LayerAware)
        assert [policy.bits_of(kind) for kind in ("norm", "mlp", "linear", "attention")] == [bits, bits, bits, 16]
        assert not policy.outliers, "tokens that stay exact in norms of 8 bits are ours, not the paper's"
    stages = ((LayerChoice(), LayerChoice(checkpoint=True)),) * 2
    LayerPlan(stages=stages, made_for=made_for).write(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"a plan by layer, and run\.method is agoq; allowed: a plan by stage"):
        prepare(planned, ranks=2)


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param({"ranks": 4, "microbatches": 8, "layers": [1, 3, 2, 2]}, marks=pytest.mark.slow),
        {"ranks": 2, "stages_per_rank": 2, "microbatches": 4, "schedule": "Interleaved1F1B"},
    ],
    ids=str,
)
def test_ranks_that_take_less_save_more_bits(tmp_path: Path, without_torchao: list[Any], pipeline: dict[str, Any]):
    """No rank takes more than the fullest one with 4 bits, and none could have one bit more."""
    config = agoq(tmp_path, pipeline={"schedule": "1F1B", **pipeline}, model={"layers": 8})
    prepared = prepare(config, ranks=pipeline["ranks"])
    assert prepared.identity["activations.bits"] == "by stage"
    for policy, kind in itertools.product(prepared.activations, ("mlp", "linear")):
        assert isinstance(policy, LayerAware)
        assert policy.bits_of(kind) == policy.bits_of("norm")
        assert policy.bits_of("attention") == 16
        assert not policy.outliers
    layout = prepared.layout
    kept, batch = model_bytes(config, vocab=256, autocast=None), batch_meter(config, vocab=256, autocast=None)
    bits = bits_by_stage(config, layout, kept, batch)
    assert bits == tuple(policy.bits_of("norm") for policy in prepared.activations if isinstance(policy, LayerAware))

    def peaks(more: int) -> list[int]:
        policies = (replace(LayerAware.published(), bits=b, norm=b) for b in (min(8, max(4, b + more)) for b in bits))
        return peaks_of(config, layout, kept, batch, tuple(policies))

    limit = max(peaks(-4))
    assert min(bits) == 4
    for rank, (least, most) in enumerate(zip(peaks(0), peaks(1), strict=True)):
        assert least <= 1.001 * limit
        assert most > limit or bits[layout.stages_of(rank)[0]] == 8


@pytest.mark.slow
def test_logits_leave_the_last_rank_fewer_bits(tmp_path: Path, without_torchao: list[Any]):
    config = agoq(tmp_path, pipeline={"ranks": 2, "microbatches": 4, "schedule": "1F1B"}, model={"layers": 8})
    layout = make_layout(config.pipeline, ranks=2, layers=8)
    few, many = (
        bits_by_stage(config, layout, model_bytes(config, **counts), batch_meter(config, **counts))
        for counts in ({"vocab": vocab, "autocast": None} for vocab in (16, 1 << 14))
    )
    assert few[0] == 4 < few[1]
    assert many[0] > 4 == many[1]


def test_activations_that_cannot_be_counted_choose_no_bits(tmp_path: Path, without_torchao: list[Any]):
    config = agoq(tmp_path, pipeline={"ranks": 2, "microbatches": 4, "layers": [1, 7]}, model={"layers": 8})
    layout, none = make_layout(config.pipeline, ranks=2, layers=8), Line()
    counted = BatchBytes(layers=(none,) * 8, first=none, middle=none, last=none, extra=none, extra_last=none)
    kept = model_bytes(config, vocab=256, autocast=None)
    assert bits_by_stage(config, layout, kept, lambda saves: counted) == (4, 4)


def test_without_torchao_the_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        prepare(agoq(tmp_path), ranks=2)
    assert raised.value.name == "torchao"


@needs_torchao
def test_the_optimizer_has_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    trainer, _ = trained(agoq(tmp_path, pipeline=ONE, model=LARGE), monkeypatch)
    assert isinstance(trainer.model.optimizer, AdamW8bit)
    for parameter in trainer.model.gradients.parameters:
        moments = (trainer.model.optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))
        assert {isinstance(m, OptimState8bit) for m in moments} == {parameter.numel() >= 4096}
    weights = sum(p.nbytes for p in trainer.model.gradients.parameters)
    assert trainer.memory()["optimizer"] < 0.7 * weights, "8 bytes a weight otherwise"


@needs_torchao
def test_ranks_and_replicas_train_as_one(ranks: Ranks, tmp_path: Path):
    pipeline = {"ranks": 1, "data_parallel": 2, "microbatches": 2}
    first, second = ranks.run(losses, agoq(tmp_path, pipeline=pipeline, model=LARGE))
    assert first == second
    assert first[2] < first[0]


@needs_torchao
def test_a_broken_run_resumes_bit_for_bit(tmp_path: Path):
    config = agoq(tmp_path, pipeline=ONE, model=LARGE, run={"steps": 4, "checkpoint_every": 2})
    whole = again(config, run={"output": str(tmp_path / "whole")})
    train(whole)
    resumed = stopped(config, 3)
    assert train(resumed).steps_here == 2
    assert curve(resumed) == curve(whole)
    with pytest.raises(ConfigError, match=r"optimizer\.states was 8bit and is fp32 now"):
        train(again(resumed, run={"method": "none"}, optimizer={"states": "fp32"}))
