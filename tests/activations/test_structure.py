from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations.recipes import Norm
from lowbit.activations.structure import (
    FeedForward,
    activation_like,
    feed_forward,
    in_attention,
    norm_like,
)
from tests.activations.models import Gated, GatedBlock


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
        recognized = norm_like(nn.LayerNorm(24)), feed_forward(Gated(8, 24)), activation_like(nn.GELU())
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


class Functional(nn.Module):
    def __init__(self, formula: Any, linears: int = 2) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c = nn.Linear(8, 8) if linears == 3 else None
        self.dropout, self.formula = nn.Dropout(0.1), formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


@pytest.mark.parametrize(("module", "expected"), [
    (Functional(lambda m, x: m.b(functional.relu(m.a(x)))),
     FeedForward(gate="a", up=None, down="b", activation="relu")),
    (Functional(lambda m, x: m.c(functional.silu(m.b(x)) * m.a(x)), 3),
     FeedForward(gate="b", up="a", down="c", activation="silu")),
    (Functional(lambda m, x: m.a(m.b(x) * functional.gelu(m.c(x))), 3),
     FeedForward(gate="c", up="b", down="a", activation="gelu")),
    (Functional(lambda m, x: m.b(functional.silu(m.a(x)).clamp(max=7))), None),
    (Functional(lambda m, x: m.b(functional.relu(m.a(x)) ** 2)), None),
    (Functional(lambda m, x: m.b(m.dropout(functional.relu(m.a(x))))), None),
    (Functional(lambda m, x: m.b(functional.relu(m.a(x))) + x), None),
    (Functional(lambda m, x: m.b(x) + m.a(x)), None),
    (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
     FeedForward(gate="0", up=None, down="2", activation="gelu")),
    (Gated(8, 24), FeedForward(gate="w1", up="w3", down="w2", activation="silu")),
    (GatedBlock(), None),
])  # fmt: skip
def test_feed_forward_blocks_are_known_by_what_they_compute(module: nn.Module, expected: Any):
    modes = [m.training for m in module.eval().modules()]
    state = torch.get_rng_state()
    assert feed_forward(module) == expected
    assert [m.training for m in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(m) for m in module.modules())


def test_blocks_that_may_change_their_formula_are_left():
    with_scale = Functional(lambda m, x: m.b(functional.gelu(m.a(x)) * m.scale))
    with_scale.scale = nn.Parameter(torch.ones(1))
    with_buffer = Functional(lambda m, x: m.b(functional.gelu(m.a(x)) * m.scale))
    with_buffer.register_buffer("scale", torch.ones(1))
    with_norm = Functional(lambda m, x: m.b(functional.gelu(m.a(x))))
    with_norm.norm = nn.LayerNorm(8)
    assert not any(map(feed_forward, (with_scale, with_buffer, with_norm)))


def test_nobodys_hooks_see_what_is_made_up():
    mlp, norm, seen = Gated(8, 24), nn.LayerNorm(8), []
    for module in (norm, *mlp.modules()):
        module.register_forward_hook(lambda *given: seen.append(given))
    assert feed_forward(mlp)
    assert norm_like(norm)
    assert activation_like(mlp.act)
    assert not seen
    mlp(torch.zeros(8))
    assert len(seen) == 5


def test_attention_is_known_by_its_names():
    class SelfAttention(nn.Sequential):
        pass

    model = nn.ModuleDict({"attn": nn.Sequential(nn.Linear(4, 4)), "rest": nn.Linear(4, 4)})
    model["other"] = SelfAttention(nn.Linear(4, 4))
    assert in_attention("attn.0", model)
    assert in_attention("other.0", model)
    assert not in_attention("rest", model)
