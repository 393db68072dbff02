from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import compress_saved_
from lowbit.activations.recipes import Norm
from lowbit.activations.structure import activation_like, norm_like


class MyNorm(nn.Module):
    """`mean` and `offset` make it one or the other of those that are known, `power` one that is not."""

    def __init__(self, mean: bool = False, offset: float = 0.0, power: float = 0.5) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(24)), 1e-3
        self.mean, self.offset, self.power = mean, offset, power

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.mean else x
        scale = (x.square().mean(-1, keepdim=True) + self.epsilon) ** -self.power
        return x * scale * (self.weight + self.offset)


@pytest.mark.parametrize(("module", "norm"), [
    (MyNorm(), Norm(eps=1e-3)),
    (MyNorm(offset=1.0), Norm(eps=1e-3, offset=1.0)),
    (MyNorm(mean=True), Norm(eps=1e-3, centred=True)),
    (MyNorm(power=0.25), None),
    (MyNorm().to("meta"), Norm(eps=1e-3)),
    (nn.RMSNorm(24), Norm(eps=None)),
    (nn.LayerNorm(24, elementwise_affine=False), Norm(eps=1e-5, centred=True)),
    (nn.LayerNorm(24, bias=False), Norm(eps=1e-5, centred=True)),
    (nn.LayerNorm((3, 24)), None),
    (nn.GroupNorm(1, 24), None),
    (nn.BatchNorm1d(24), None),
    (nn.Linear(24, 24), None),
])  # fmt: skip
def test_norms_are_known_by_what_they_compute(module: nn.Module, norm: Norm | None):
    recognized = norm_like(module)
    assert (recognized and replace(recognized, promotes=False)) == norm


class Hidden(nn.Module):
    """A norm that does not tell its epsilon, or adds it elsewhere."""

    def __init__(self, formula: Any) -> None:
        super().__init__()
        self.normalized_shape, self.formula = (24,), formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


class OtherRMSNorm(Hidden):
    pass


@pytest.mark.parametrize(("formula", "norm"), [
    (lambda x: functional.layer_norm(x, (24,), eps=1e-5), Norm(eps=1e-5, centred=True)),
    (lambda x: functional.rms_norm(x, (24,), eps=1e-6), Norm(eps=1e-6)),
    (lambda x: functional.rms_norm(x, (24,), eps=3e-7), None),
    (lambda x: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5), None),
])  # fmt: skip
def test_an_epsilon_is_found_or_the_norm_left(formula: Any, norm: Norm | None):
    recognized = norm_like(OtherRMSNorm(formula))
    assert (recognized and replace(recognized, promotes=False)) == norm


def test_defaults_of_dtype_do_not_matter():
    torch.set_default_dtype(torch.bfloat16)
    try:
        recognized = norm_like(nn.LayerNorm(24)), activation_like(nn.GELU())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(recognized)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_default_epsilon_is_that_of_pytorch(dtype: torch.dtype):
    x = torch.randn(4, 24).to(dtype) * 1e-3
    y = Norm(eps=None).plain(x, None, None).to(dtype)
    torch.testing.assert_close(y, nn.RMSNorm(24, dtype=dtype)(x))


@pytest.mark.parametrize(("module", "name"), [
    (nn.SiLU(), "silu"), (nn.GELU(), "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh"), (nn.ReLU(), "relu"),
    (nn.ReLU(inplace=True), None), (nn.Tanh(), None), (nn.ReLU6(), None), (nn.Softmax(-1), None),
])  # fmt: skip
def test_activations_are_known_by_what_they_compute(module: nn.Module, name: str | None):
    assert activation_like(module) == name


def test_nobodys_hooks_see_what_is_made_up():
    norm, activation, seen = nn.LayerNorm(8), nn.SiLU(), []
    for module in (norm, activation):
        module.register_forward_hook(lambda *given: seen.append(given))
    assert norm_like(norm)
    assert activation_like(activation)
    assert not seen
    activation(norm(torch.zeros(8)))
    assert len(seen) == 2


class _Sign(torch.autograd.Function):
    """GELU whose gradient is of its author's choice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return grad.sign()


class MyGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sign.apply(x)


def test_an_activation_of_somebodys_own_keeps_its_own_gradient():
    model = nn.Sequential(nn.Linear(64, 64), MyGELU())
    x = torch.randn(32, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    compress_saved_(model)
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.equal(found, expected)
