"""Errors and bytes measured on a model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.plan.measure import bytes_between_passes, bytes_by_width, gradients, relative_error, sensitivities
from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model

IDS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Any:
    return build_model(ModelConfig(dim=64, layers=1, heads=2), vocab=64, sequence=32, seed=0).train()


def loss_of(model: Any) -> Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def test_gradients_between_two_passes_are_counted_once_and_without_those_at_the_ends():
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    x = torch.randn(5, 8, requires_grad=True)
    y = layers(x)
    assert bytes_between_passes(y, torch.ones(5, 8), x, layers.parameters()) == 4 * 5 * (16 + 24)
    loss = layers(x).square().mean()
    assert bytes_between_passes(loss, None, x, layers.parameters()) == 4 * 5 * (16 + 24 + 8)
    assert x.grad is None


def test_errors_fall_with_bits_and_the_model_comes_back(model: Any):
    before = gradients(model, lambda: loss_of(model))
    errors = sensitivities(model, lambda: loss_of(model), widths=(3, 6, 16))
    for kind in ("norm", "mlp"):
        assert 0.02 < errors[kind][3] < 0.5
        assert errors[kind][6] == pytest.approx(errors[kind][3] * 7 / 63, rel=0.5)  # steps are 9 times finer
        assert errors[kind][16] == 0
    assert set(errors["linear"].values()) == {0.0}  # every linear layer's input follows from something that is saved
    after = gradients(model, lambda: loss_of(model))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())


def test_bytes_fall_with_bits(model: Any):
    by_width = bytes_by_width(model, lambda: loss_of(model), widths=(2, 4, 16))
    mlp = {bits: saved.peak["mlp"] for bits, saved in by_width.items()}
    elements = 2 * IDS.numel() * 192  # gate and up
    assert mlp == {2: elements * 5 // 16, 4: elements * 9 // 16, 16: elements * 4}
    assert len({saved.peak["attention"] for saved in by_width.values()}) == 1


def test_a_loss_that_differs_from_call_to_call_is_refused(model: Any):
    with pytest.raises(ValueError, match="loss gives gradients that differ by .* between two calls"):
        sensitivities(model, lambda: loss_of(model) * torch.rand(()))
    with pytest.raises(ValueError, match="loss gives gradients of norm 0.0; allowed: finite, above 0"):
        sensitivities(model, lambda: loss_of(model) * 0)


def test_relative_errors_by_hand():
    exact = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    rounded = {"a": torch.tensor([3.0]), "b": torch.tensor([[3.0, 8.0]])}
    assert relative_error(rounded, exact) == 1.0
