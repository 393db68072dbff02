"""Megatron-Core's autograd functions: its linear layers, and gates that it computes as one function.

PyTorch does not pass autograd functions written in Python to the mode that follows a model. Here `apply` of these
classes does, so that handlers get the call. Megatron is not imported: functions that are not loaded are not used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from lowbit.activations.follow import HANDLERS, Following, TorchCall, large_enough, say_once
from lowbit.activations.functions import first_order
from lowbit.activations.recipes import Rebuilt, SavedTensors


def ask_first() -> None:
    """Pass calls of the functions below to the mode, if they are loaded; outside of followed models nothing changes."""
    for (module, name), handler in _KNOWN.items():
        owner: Any = sys.modules.get(module)
        own = getattr(owner, name, None)
        if isinstance(own, type):
            owner, name, own = own, "apply", own.apply  # pyright: ignore
        if own is not None and own not in HANDLERS:
            asking = _asking(own)
            HANDLERS[asking] = handler
            setattr(owner, name, staticmethod(asking) if isinstance(owner, type) else asking)


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*args: Any) -> Any:
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        return handle_torch_function(apply, tensors, *args) if has_torch_function(tensors) else own(*args)

    apply.__name__ = getattr(own, "__self__", own).__name__  # of the class
    apply.function = getattr(own, "__self__", None)  # pyright: ignore
    return apply


def _linear(call: TorchCall, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """A column- or row-wise linear layer: Megatron's own forward and backward, which gets the rebuilt input."""
    if not weight.requires_grad or not large_enough(input) or not call.saves(input, weight, bias):
        return NotImplemented
    return _Rebuilding.apply(input, weight, bias, call.func.function, rest, *call.source(input, input.dtype))


class _Rebuilding(torch.autograd.Function):
    """Wraps another function of x, weight and bias; saves tensors that rebuild x instead of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, function: Any, rest: tuple[Any, ...],
        rebuilt: Rebuilt, saved: SavedTensors,
    ) -> Tensor:  # fmt: skip
        """`function`: the class, which also gets `rest`; `rebuilt`: x in backward, from `saved`."""
        given: list[Tensor] = []
        ctx.own = SimpleNamespace(save_for_backward=lambda *tensors: given.extend(tensors))
        out = function.forward(ctx.own, x, weight, bias, *rest)
        del ctx.own.save_for_backward
        ctx.is_x, ctx.function = [t is x for t in given], function
        ctx.rebuilt, ctx.shape, ctx.dtype = rebuilt, x.shape, x.dtype
        ctx.save_for_backward(*saved, *(t for t in given if t is not x))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        split = len(ctx.saved_tensors) - ctx.is_x.count(False)
        saved, others = ctx.saved_tensors[:split], iter(ctx.saved_tensors[split:])
        x = ctx.rebuilt.get(saved, ctx.dtype).reshape(ctx.shape)
        own = SimpleNamespace(**vars(ctx.own), needs_input_grad=ctx.needs_input_grad[:3])
        own.saved_tensors = tuple(x if is_x else next(others) for is_x in ctx.is_x)
        return *ctx.function.backward(own, grad_out)[:3], None, None, None, None


def _gate(call: TorchCall, x: Tensor, *rest: Any, activation: Callable[..., Tensor], has_up: bool = True) -> Any:
    """Compute act(gate) * up, or act(gate), by torch functions, which are followed.

    `rest`: a bias of `x`, if there is one, and for SwiGLU whether Megatron saves in FP8 or moves to the CPU.
    """
    if any(arg is True for arg in rest):
        say_once("gates that Megatron saves in FP8 or moves to the CPU are left to it")
        return NotImplemented
    bias = next((arg for arg in rest if isinstance(arg, Tensor)), None)
    if not call.saves(x, bias):
        return NotImplemented
    with Following():
        x = x if bias is None else x + bias
        if not has_up:
            return activation(x)
        gate, up = torch.chunk(x, 2, -1)
        return activation(gate) * up


_gelu = functools.partial(functional.gelu, approximate="tanh")
_swiglu, _geglu = (functools.partial(_gate, activation=each) for each in (functional.silu, _gelu))
_FUSIONS = "megatron.core.fusions.fused_bias_"
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("megatron.core.tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication"): _linear,
    (f"{_FUSIONS}swiglu", "SwiGLUFunction"): _swiglu,
    (f"{_FUSIONS}swiglu", "BiasSwiGLUFunction"): _swiglu,
    (f"{_FUSIONS}geglu", "GeGLUFunction"): _geglu,
    (f"{_FUSIONS}geglu", "BiasGeGLUFunction"): _geglu,
    # It is bound when Megatron is imported.
    ("megatron.core.transformer.mlp", "bias_gelu_impl"): functools.partial(_geglu, has_up=False),
}
