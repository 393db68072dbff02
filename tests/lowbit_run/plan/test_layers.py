"""Costs measured on a model, predicted peaks, and what each layer keeps within a limit."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.activations import LayerChoice, LayerPlan, compress_saved_
from lowbit_run.plan import measure
from lowbit_run.plan.layers import LayerCost, StepCosts, choose_layers, measure_layers, plan_layers, predictions
from lowbit_run.train.config import ModelConfig
from lowbit_run.train.model import build_model
from lowbit_run.train.single_process import model_loss

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
    alike = [(choice,) * 5 for choice in (KEEP, LOW, EXACT, SMALL)]
    for choices in (*alike, (SMALL, SMALL, LOW, KEEP, KEEP), (LOW, KEEP, EXACT, LOW, SMALL)):
        applied = compress_saved_(model, LayerPlan(stages=(choices,)))
        loss_of(model).backward()  # gradients exist from now on
        measured = measure.traced_peak(lambda: loss_of(model).backward())
        applied.remove()
        assert peak(costs, choices) == pytest.approx(measured, rel=0.05), choices


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


BATCH = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


def exact_loss(model: Any) -> torch.Tensor:
    return model_loss(model, BATCH, BATCH)


def test_gradients_between_two_passes_are_counted_once_and_without_those_at_the_ends():
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    x = torch.randn(5, 8, requires_grad=True)
    y = layers(x)
    assert measure.bytes_between_passes(y, torch.ones(5, 8), x, layers.parameters()) == 4 * 5 * (16 + 24)
    loss = layers(x).square().mean()
    assert measure.bytes_between_passes(loss, None, x, layers.parameters()) == 4 * 5 * (16 + 24 + 8)
    assert x.grad is None


def test_errors_fall_with_bits_and_the_model_comes_back():
    model = model_of(1)
    before = measure.gradients(model, lambda: exact_loss(model))
    errors = measure.sensitivities(model, lambda: exact_loss(model), widths=(3, 6, 16))
    for kind in ("norm", "mlp"):
        assert 0.02 < errors[kind][3] < 0.5
        assert errors[kind][6] == pytest.approx(errors[kind][3] * 7 / 63, rel=0.5)  # steps are 9 times finer
        assert errors[kind][16] == 0
    assert set(errors["linear"].values()) == {0.0}  # every linear layer's input follows from something that is saved
    after = measure.gradients(model, lambda: exact_loss(model))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())


def test_bytes_fall_with_bits():
    model = model_of(1)
    by_width = measure.bytes_by_width(model, lambda: exact_loss(model), widths=(2, 4, 16))
    mlp = {bits: saved.peak["mlp"] for bits, saved in by_width.items()}
    elements = 2 * BATCH.numel() * 192  # gate and up
    assert mlp == {2: elements * 5 // 16, 4: elements * 9 // 16, 16: elements * 4}
    assert len({saved.peak["attention"] for saved in by_width.values()}) == 1


def test_a_loss_that_differs_from_call_to_call_is_refused():
    model = model_of(1)
    with pytest.raises(ValueError, match="loss gives gradients that differ by .* between two calls"):
        measure.sensitivities(model, lambda: exact_loss(model) * torch.rand(()))
    with pytest.raises(ValueError, match="loss gives gradients of norm 0.0; allowed: finite, above 0"):
        measure.sensitivities(model, lambda: exact_loss(model) * 0)


def test_relative_errors_by_hand():
    exact = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    rounded = {"a": torch.tensor([3.0]), "b": torch.tensor([[3.0, 8.0]])}
    assert measure.relative_error(rounded, exact) == 1.0
