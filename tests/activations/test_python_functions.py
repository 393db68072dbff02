"""Linear layers by an autograd function of their own, as Megatron-Core has them: here a small one in its place."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_, counted, python_functions

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


def test_nothing_is_changed_where_megatron_is_not_loaded(monkeypatch: pytest.MonkeyPatch):
    for name, _ in python_functions._KNOWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = dict(python_functions.HANDLERS)
    python_functions.ask_first()
    assert before == python_functions.HANDLERS
