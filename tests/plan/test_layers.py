"""What each layer keeps: measured costs, predicted peaks, and the choice within a limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from lowbit.activations import LayerChoice, LayerPlan, compress_saved_
from lowbit.plan.layers import LayerCost, StepCosts, choose_layers, measure_layers, plan_layers, predictions
from lowbit.plan.measure import traced_peak
from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model
from lowbit.train.single_process import model_loss

BYTE = "GroupInt(bits=8, group=64)"
KEEP, LOW = LayerChoice(), LayerChoice(norm=8, mlp=4, linear=4)
EXACT, SMALL = LayerChoice(checkpoint=True), LayerChoice(checkpoint=True, input=BYTE)
IDS = torch.randint(0, 64, (1, 128), generator=torch.Generator().manual_seed(0))
COSTS = StepCosts(
    layers={
        KEEP: LayerCost(kept=100, forward=110, backward=120),
        LOW: LayerCost(kept=30, forward=50, backward=60, seconds=0.1, error=4e-4),
        EXACT: LayerCost(kept=10, forward=40, backward=120, seconds=0.4),
        SMALL: LayerCost(kept=3, forward=40, backward=125, seconds=0.45, error=1e-4),
    },
    before=20, start=10, between=70, end=12, after=15, end_of_forward=11, seconds=8.0, measured=8,
)  # fmt: skip


def peak(costs: StepCosts, choices: Iterable[LayerChoice], *, held: int = 1) -> int:
    return costs.predict(tuple((choice, 1) for choice in choices), held=held).peak


def model_of(layers: int) -> Any:
    return build_model(ModelConfig(dim=64, layers=layers, heads=2), vocab=64, sequence=128, seed=0).train()


def loss_of(model: Any) -> torch.Tensor:
    return model_loss(model, IDS, IDS, autocast=torch.bfloat16)


def test_the_peak_of_any_combination_is_the_measured_one():
    small, model = model_of(3), model_of(5)
    costs = measure_layers(small, lambda: loss_of(small).backward(), choices=(KEEP, LOW, EXACT, SMALL), repeats=1)
    assert not any("forward" in vars(m) for m in small.modules())
    assert all(p.grad is None for p in small.parameters())
    for choices in (
        (KEEP,) * 5,
        (LOW,) * 5,
        (EXACT,) * 5,
        (SMALL,) * 5,
        (SMALL, SMALL, LOW, KEEP, KEEP),
        (LOW, KEEP, EXACT, LOW, SMALL),
    ):
        applied = compress_saved_(model, LayerPlan(stages=(choices,)))
        loss_of(model).backward()  # gradients exist from now on
        measured = traced_peak(lambda: loss_of(model).backward())
        applied.remove()
        assert peak(costs, choices) == pytest.approx(measured, rel=0.05)


def test_predictions_by_hand():
    assert peak(COSTS, (KEEP, KEEP)) == 70 + 2 * 100
    assert peak(COSTS, (SMALL, LOW)) == 12 + 125
    assert peak(COSTS, (LOW,) * 4) == 70 + 4 * 30
    assert peak(COSTS, (SMALL, LOW), held=3) == 137 + 2 * (11 + 33)
    one = COSTS.predict(((KEEP, 1), (LOW, 3)))
    assert one.seconds == pytest.approx(4.3)
    assert one.error == pytest.approx((3 * 4e-4 / 4) ** 0.5)
    assert one.choices == (KEEP, LOW, LOW, LOW)


@pytest.mark.parametrize("limit", [210, 230, 260, 300, 400, 1000])
def test_no_other_combination_is_faster(limit: int):
    plan = choose_layers(COSTS, 4, limit=limit, max_error=0.015)
    (choices,) = plan.stages
    best = COSTS.predict(tuple((c, 1) for c in choices))
    assert peak(COSTS, choices) <= limit
    assert best.error <= 0.015
    for other in itertools.product(COSTS.layers, repeat=4):
        if peak(COSTS, other) <= limit:
            one = COSTS.predict(tuple((c, 1) for c in other))
            assert one.error > 0.015 or one.seconds >= best.seconds / 1.01


def test_what_nothing_meets_is_one_line():
    least = min(one.peak for one in predictions(COSTS, 4, max_error=0.03))
    with pytest.raises(ValueError, match=f"limit is 5 bytes; allowed: at least {least} with max_error 0.03"):
        choose_layers(COSTS, 4, limit=5, max_error=0.03)
    choose_layers(COSTS, 4, limit=least, max_error=0.03)
    noisy = StepCosts(**{**vars(COSTS), "layers": {LOW: COSTS.layers[LOW]}})
    with pytest.raises(ValueError, match=r"max_error is 0.001; allowed: at least 0.0200 with these choices"):
        choose_layers(noisy, 4, limit=1000, max_error=0.001)


def test_a_model_gets_its_own_plan():
    model = model_of(3)
    choices = (KEEP, LOW, SMALL)
    plan = plan_layers(model, lambda: loss_of(model), limit=1 << 40, choices=choices, repeats=1)
    assert plan.made_for["layer"] == "LlamaDecoderLayer"
    compress_saved_(model, plan)
    with pytest.raises(ValueError, match="the plan is for 3 x LlamaDecoderLayer"):
        compress_saved_(model_of(2), plan)
