"""Low-bit saved activations inside graphs of `torch.compile`, where functions cannot be followed.

Norms, activation functions and linear layers that are modules each save a payload of their own input. They share no
table of recipes; if several layers save the same tensor, the compiler computes the payload once.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lowbit.activations.gated.reference import ACTIVATIONS
from lowbit.activations.policy import LayerAware
from lowbit.activations.recipes import FEWEST, Norm, default_eps, plain_gated
from lowbit.codecs import Codec
from lowbit.codecs.checks import FLOATS

log = logging.getLogger(__name__)

_codecs: dict[str, Codec] = {}


@torch.library.custom_op("lowbit::saved_encode", mutates_args=())
def _encode(x: Tensor, codec: str) -> Tensor:
    return _codecs[codec].encode(x)


@_encode.register_fake
def _(x: Tensor, codec: str) -> Tensor:
    return x.new_empty(_codecs[codec].nbytes(x.shape), dtype=torch.uint8)


@torch.library.custom_op("lowbit::saved_decode", mutates_args=())
def _decode(payload: Tensor, shape: list[int], dtype: torch.dtype, codec: str) -> Tensor:
    return _codecs[codec].decode(payload, shape=shape, dtype=dtype)


@_decode.register_fake
def _(payload: Tensor, shape: list[int], dtype: torch.dtype, codec: str) -> Tensor:
    return payload.new_empty(shape, dtype=dtype)


def name_of(policy: LayerAware, kind: str, name: str) -> str | None:
    """Name of a layer's format for operators in graphs; None: its input is saved unchanged."""
    codec = policy.codec(policy.bits_of(kind, name)) if kind in ("norm", "mlp", "gate", "linear") else None
    if codec is None:
        return None
    _codecs[repr(codec)] = codec
    return repr(codec)


class _Linear(torch.autograd.Function):
    """x times the transposed weight, plus bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, codec: str) -> Tensor:
        ctx.save_for_backward(torch.ops.lowbit.saved_encode(x, codec), weight)
        ctx.shape, ctx.x_dtype, ctx.dtype, ctx.codec = x.shape, x.dtype, dtype, codec
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        payload, weight = ctx.saved_tensors
        x = torch.ops.lowbit.saved_decode(payload, ctx.shape, ctx.dtype, ctx.codec)
        grad_NO, x_NI = grad_out.flatten(0, -2), x.flatten(0, -2)
        grad_x = (grad_out @ weight.to(ctx.dtype)).to(ctx.x_dtype)
        grad_weight = (grad_NO.t() @ x_NI).to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else grad_NO.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


class _Norm(torch.autograd.Function):
    """A norm over the last dimension, with `scale` and `shift` in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, centred: bool, eps: float,
        dtype: torch.dtype, codec: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(torch.ops.lowbit.saved_encode(x, codec), scale)
        ctx.shape, ctx.dtype, ctx.codec, ctx.centred, ctx.eps = x.shape, x.dtype, codec, centred, eps
        ctx.has_shift = shift is not None
        out, _ = _normal(x, centred, eps)
        out = out if scale is None else out * scale
        return (out if shift is None else out + shift).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        payload, scale = ctx.saved_tensors
        x = torch.ops.lowbit.saved_decode(payload, ctx.shape, torch.float32, ctx.codec)
        normal, factor = _normal(x, ctx.centred, ctx.eps)
        grad = grad_out.float()
        rows = tuple(range(grad.dim() - 1))
        grad_scale = None if scale is None else (grad * normal).sum(rows)
        grad_shift = grad.sum(rows) if ctx.has_shift else None
        grad = grad if scale is None else grad * scale
        along = grad - normal * (grad * normal).mean(-1, keepdim=True)
        if ctx.centred:
            along = along - grad.mean(-1, keepdim=True)
        return (along * factor).to(ctx.dtype), grad_scale, grad_shift, None, None, None, None


def _normal(x: Tensor, centred: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize rows to a mean square of 1, and to a mean of 0 if `centred`; also return the factors."""
    x = x.float()
    x = x - x.mean(-1, keepdim=True) if centred else x
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * factor, factor


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, codec: str) -> Tensor:
        ctx.save_for_backward(torch.ops.lowbit.saved_encode(x, codec))
        ctx.shape, ctx.dtype, ctx.activation, ctx.codec = x.shape, x.dtype, activation, codec
        return plain_gated(x, None, activation, wide=False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (payload,) = ctx.saved_tensors
        x = torch.ops.lowbit.saved_decode(payload, ctx.shape, ctx.dtype, ctx.codec)
        if ctx.activation == "silu":
            return torch.ops.aten.silu_backward(grad_out, x), None, None
        if ctx.activation == "relu":
            return torch.ops.aten.threshold_backward(grad_out, x, 0), None, None
        kind = "tanh" if ctx.activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward(grad_out, x, approximate=kind), None, None


@torch.compiler.assume_constant_result
def _default_eps(dtype: torch.dtype, device: str) -> float:
    return default_eps(dtype, device)


@torch.compiler.assume_constant_result  # so that it runs while the graph is made
@functools.cache
def _say_left() -> None:
    log.warning("activations are saved in full where graphs of torch.compile have DTensors")


def compiled_forward(module: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """A module's forward inside a graph."""
    x = args[0] if len(args) == 1 and not kwargs else None
    codec: str | None = layer.in_graphs
    if codec is None or not isinstance(x, Tensor) or not module.training or x.dtype not in FLOATS or x.dim() < 2:
        return layer.own(*args, **kwargs)
    if isinstance(x, DTensor):
        _say_left()
        return layer.own(x)
    if layer.kind == "linear":
        return _linear(module, layer, x, codec)
    if x.numel() < FEWEST:
        return layer.own(x)
    if layer.kind == "norm":
        return _norm(module, layer.formula, x, codec)
    supported = layer.formula in ACTIVATIONS
    return _Activation.apply(x, layer.formula, codec) if supported and x.requires_grad else layer.own(x)


def _linear(module: Any, layer: Any, x: Tensor, codec: str) -> Tensor:
    weight, bias = module.weight, module.bias
    plain = type(module).forward is nn.Linear.forward and weight.requires_grad and weight.dtype in FLOATS
    if not plain or x.numel() < max(FEWEST, layer.shared.policy.smallest):
        return layer.own(x)
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return _Linear.apply(x, weight, bias, dtype, codec)


def _norm(module: Any, norm: Norm, x: Tensor, codec: str) -> Tensor:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = _default_eps(x.dtype, x.device.type) if norm.eps is None else norm.eps
    scale = None if weight is None else weight.float() + norm.offset
    shift = None if bias is None else bias.float()
    dtype = x.dtype
    if norm.promotes and weight is not None:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    return _Norm.apply(x, scale, shift, norm.centred, eps, dtype, codec)
