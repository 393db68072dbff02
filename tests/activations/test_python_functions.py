"""Linear layers by an autograd function of their own, as Megatron-Core has them: here a small one in its place."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, counted, python_functions
from tests.activations.models import Calls

MODULE, NAME = "megatron.core.tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication"


class Own(torch.autograd.Function):
    """x times the transposed weight, times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * (x @ weight.t())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_out = ctx.factor * grad_out
        return grad_out @ weight, grad_out.flatten(0, -2).t() @ x.flatten(0, -2), None, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(x, self.weight, None, 2.0)


def gradients(model: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    with counted(model) as kept:
        loss = model(x)[..., :50].sum()
    return kept.total, list(torch.autograd.grad(loss, [*model.parameters()], retain_graph=True))


@pytest.mark.parametrize(("bits", "tolerance"), [(16, 1e-6), (8, 0.02), (4, 0.2)])
def test_a_function_of_its_own_gets_its_input_rebuilt(monkeypatch: pytest.MonkeyPatch, bits: int, tolerance: float):
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(**{NAME: Own}))  # pyright: ignore
    monkeypatch.setattr(Own, "apply", Own.apply)  # for the time of this test
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.RMSNorm(64), Layer()), torch.randn(4, 32, 64)
    size, expected = gradients(model, x)
    compressed = compress_saved_(model, LayerAware(bits=bits))
    for _ in range(2):
        kept, ours = gradients(model, x)
        assert kept < (0.6 if bits == 16 else 0.3) * size
        for g, e in zip(ours, expected, strict=True):
            assert (g - e).norm() <= tolerance * e.norm()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(model(x).sum(), [*model.parameters()], create_graph=True)
    compressed.remove()
    assert gradients(model, x)[0] == size


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def gated(activation: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return activation(gate) * up


FUSIONS = "megatron.core.fusions.fused_bias_"
GATES: dict[tuple[str, str], Any] = {
    (f"{FUSIONS}swiglu", "SwiGLUFunction"): lambda x, bias: gated(functional.silu, x),
    (f"{FUSIONS}swiglu", "BiasSwiGLUFunction"): lambda x, bias: gated(functional.silu, x + bias),
    (f"{FUSIONS}geglu", "GeGLUFunction"): lambda x, bias: gated(gelu, x),
    (f"{FUSIONS}geglu", "BiasGeGLUFunction"): lambda x, bias: gated(gelu, x + bias),
    ("megatron.core.transformer.mlp", "bias_gelu_impl"): lambda x, bias: gelu(x + bias),
}


class Opaque(torch.autograd.Function):
    """A formula of x and a bias whose functions nobody can follow."""

    @staticmethod
    def forward(ctx: Any, formula: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(x, bias)
        return formula(x, bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.formula(*leaves)
        grads = torch.autograd.grad(out, [t for t in leaves if t is not None], grad_out)
        return None, *grads, *[None] * leaves.count(None)


class Gate(nn.Module):
    """Calls a function of Megatron's as its layers do."""

    def __init__(self, place: tuple[str, str]) -> None:
        super().__init__()
        self.place, self.bias = place, nn.Parameter(torch.randn(128))

    def forward(self, x: Tensor) -> Tensor:
        module, name = self.place
        given = (x, *([self.bias] if "ias" in name else []), *([False, False] if "Swi" in name else []))
        function = getattr(sys.modules[module], name)
        return (function.apply if isinstance(function, type) else function)(*given)


@pytest.mark.parametrize("place", GATES, ids=lambda place: place[1])
@pytest.mark.parametrize(("bits", "tolerance"), [(16, 1e-5), (8, 0.03)])
def test_gates_are_computed_by_functions_that_are_followed(
    monkeypatch: pytest.MonkeyPatch, place: tuple[str, str], bits: int, tolerance: float
):
    def own(x: Tensor, *rest: Any) -> Any:
        return Opaque.apply(GATES[place], x, rest[0] if "ias" in place[1] else None)

    module, name = place
    stand_in = type(name, (), {"apply": staticmethod(own)}) if name.endswith("Function") else own
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: stand_in}))  # pyright: ignore
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), Gate(place)), torch.randn(4, 32, 64)

    def grads() -> list[Tensor]:
        parameters = [p for p in model.parameters() if p is not model[1].bias or "ias" in name]
        return list(torch.autograd.grad(model(x).square().sum(), parameters))

    expected = grads()
    compress_saved_(model, LayerAware(bits=bits))
    with Calls() as calls:
        ours = grads()
    assert ("gated_encode" in calls.count) == (bits == 8)
    for g, e in zip(ours, expected, strict=True):
        assert (g - e).norm() <= tolerance * e.norm()


def test_nothing_is_changed_where_megatron_is_not_loaded(monkeypatch: pytest.MonkeyPatch):
    for name, _ in python_functions._KNOWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = dict(python_functions.HANDLERS)
    python_functions.ask_first()
    assert before == python_functions.HANDLERS
