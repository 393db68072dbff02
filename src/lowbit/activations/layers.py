"""Replaces whole modules: norms and activation functions, which often consist of many torch functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.activations.follow import Layer, TorchCall, encoded, large_enough
from lowbit.activations.functions import ActivationFunction, MaskFunction, NormFunction
from lowbit.activations.recipes import (
    QUICK_GELU,
    STEEPNESS,
    GatedOutput,
    Itself,
    Masked,
    Norm,
    NormOutput,
    Recipe,
    attach,
    attach_until_backward,
    itself,
    packed_bits,
    recipe_of,
    room,
)
from lowbit.activations.sharded import on_shards
from lowbit.codecs import Codec, GroupInt


def _of_one_tensor(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a forward for calls with one tensor that save something for backward; other calls use the module's own."""

    @functools.wraps(forward)
    def called(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
        inputs = [*args, *kwargs.values()]
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            return layer.own(*args, **kwargs)
        named_right = not kwargs or [*kwargs] == [*inspect.signature(layer.own).parameters][:1]
        x, call = inputs[0], TorchCall(layer.own, module, layer)
        weights = [*module.parameters(recurse=False)]
        # PyTorch refuses mixtures of dtypes in LayerNorm: leave the error to its own functions.
        mixed = isinstance(module, nn.LayerNorm) and len({t.dtype for t in (x, *weights)}) > 1
        if (mixed and not torch.is_autocast_enabled(x.device.type)) or not named_right:
            return layer.own(*args, **kwargs)
        own = {n: t for n in ("weight", "bias") if isinstance(t := getattr(module, n, None), Tensor)}

        def run(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Any:
            if not large_enough(input) or not call.saves(input, weight, bias):
                return NotImplemented
            with call.handled(x), torch._C.DisableTorchFunction():
                return call.returned(forward(call, input, weight, bias))

        out = on_shards(layer.kind, run, x, **own) if isinstance(x, DTensor) else run(x, **own)
        return layer.own(*args, **kwargs) if out is NotImplemented else out

    return called


@_of_one_tensor
def norm_forward(call: TorchCall, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A norm over the last dimension."""
    norm: Norm = call.layer.formula
    return normalized(call, x, weight, bias, norm, _norm_dtype(call.module, norm, x))


@_of_one_tensor
def activation_forward(call: TorchCall, x: Tensor, *weights: Tensor | None) -> Tensor:
    """An activation function."""
    if call.layer.formula != QUICK_GELU:
        return activated(call, x, call.layer.formula)
    steep = activated(call, x * STEEPNESS, "silu")
    recipe, out = recipe_of(steep), steep / STEEPNESS
    if recipe is not None:
        attach(out, recipe.derived(steep.shape, functools.partial(torch.div, other=STEEPNESS)))
    return out


def normalized(
    call: TorchCall, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm, dtype: torch.dtype
) -> Tensor:
    """A norm over the last dimension; attaches a recipe to its output for the layers that follow.

    The norm shares a payload of `x` that a linear layer has saved, unless that has fewer bits: then both are saved.
    """
    codec = call.codec("norm", x)
    existing = None if codec is None else itself(x, codec)
    saved, codec = existing or ((room(codec, x),), codec)
    form = NormOutput(x.shape, codec, norm, norm.eps_of(x))
    out = NormFunction.apply(x, weight, bias, form, saved, existing is None, dtype)
    if existing is None and recipe_of(x) is None:
        attach(x, Recipe(Itself(x.shape, codec), saved, weak=True))
    attach_until_backward(out, Recipe(form, (*saved, weight, bias)))
    return out


def activated(call: TorchCall, x: Tensor, activation: str) -> Any:
    """act(x); attaches a recipe to it for the product or layer that follows."""
    codec = call.codec("gate" if activation == "silu" else "mlp", x)
    if activation == "relu" and codec is not None:
        return _rectified(x, codec)
    saved = room(codec, x)
    form = GatedOutput(x.shape, codec, activation)
    out = ActivationFunction.apply(x, form, saved)
    if recipe_of(x) is None:
        attach(x, Recipe(Itself(x.shape, codec), (saved,), weak=True))
    attach_until_backward(out, Recipe(form, (saved, None)))
    return out


def _rectified(x: Tensor, codec: Codec) -> Tensor:
    """ReLU, which saves an exact mask of one bit per element, and its output with one bit less."""
    with torch.no_grad():
        out = x.relu()
        mask = packed_bits(out)
    if isinstance(codec, GroupInt):
        codec = replace(codec, bits=max(codec.bits - 1, 2))
    payload = encoded(codec, out)
    out = MaskFunction.apply(x, out, mask, 1.0)
    whole = Recipe(Itself(out.shape, codec), (payload,))
    attach_until_backward(out, whole.derived(out.shape, Masked(), mask))
    return out


def _norm_dtype(module: nn.Module, norm: Norm, x: Tensor) -> torch.dtype:
    if x.is_cuda and torch.is_autocast_enabled("cuda") and isinstance(module, _FLOAT32_ON_CUDA):
        return torch.float32
    weight = getattr(module, "weight", None)
    if norm.promotes and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


_FLOAT32_ON_CUDA = (nn.LayerNorm, nn.RMSNorm)  # autocast computes these in float32
