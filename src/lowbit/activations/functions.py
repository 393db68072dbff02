"""Autograd functions whose backward starts from what `lowbit.activations.kept` describes.

Each computes forward from its inputs as they are; only backward sees rounded ones. Everything kept goes through
`save_for_backward`, so PyTorch's own checks, hooks and checkpointing see it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lowbit.activations.gated import reference as gated
from lowbit.activations.kept import (
    GatedOutput,
    Kept,
    NormOutput,
    Rebuilt,
    check_present,
    plain_gated,
    release,
)
from lowbit.activations.norm import reference as norm_operators
from lowbit.codecs.checks import draw_seed


def first_order(backward: Any) -> Any:
    """A backward that PyTorch refuses to differentiate.

    With a constant `grad_out`, `once_differentiable` alone would take the result for a constant, too.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            grad_out = grad_out.detach().requires_grad_()
        return once(ctx, grad_out)

    return checked


class NormFunction(torch.autograd.Function):
    """norm(x) of (..., C); keeps x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
        form: NormOutput, kept: Kept, fresh: bool, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """`kept`: room for the payload if it is `fresh`, otherwise a payload of x, or x; `dtype`: of the output."""
        ctx.form, ctx.shape, ctx.dtype = form, x.shape, x.dtype
        ctx.given = (True, weight is not None, bias is not None)
        ctx.of_bias = None if bias is None else bias.dtype
        ctx.save_for_backward(*kept, weight)
        codec, norm = form.codec, form.norm
        if codec is None or not fresh:
            return norm.plain(x, weight, bias).to(dtype)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        norm_operators.encode(
            _rows(x), weight, bias, kept[0], _rows(out), form.eps, norm.centred, norm.offset,
            codec.bits, codec.group, draw_seed(codec.rounding, x.device),
        )  # fmt: skip
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        kept, weight = ctx.saved_tensors
        release(ctx)
        form: NormOutput = ctx.form
        check_present(weight)
        _, wants_weight, wants_bias = wanted(ctx)
        bias = None  # the gradients depend on no values of it
        if wants_bias:
            bias = torch.zeros(ctx.shape[-1:], dtype=ctx.of_bias, device=grad_out.device)
        if form.codec is None:
            grads = _differentiate(form.norm.plain, kept, weight, bias, grad_out=grad_out)
            return *grads, None, None, None, None
        grad_x = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad_out.device)
        grad_weight = torch.empty_like(weight) if wants_weight else None
        norm_operators.backward(
            kept, weight, None, _rows(grad_out), _rows(grad_x), grad_weight, bias, None,
            form.eps, form.norm.centred, form.norm.offset, form.codec.bits, form.codec.group,
        )  # fmt: skip
        return grad_x, grad_weight, bias, None, None, None, None


class GatedFunction(torch.autograd.Function):
    """act(gate) * up, or act(gate); keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, form: GatedOutput, kept: Kept) -> Tensor:
        """`kept`: room for the payloads, or gate and up."""
        ctx.form, ctx.dtypes = form, (gate.dtype, None if up is None else up.dtype)
        ctx.save_for_backward(*kept)
        dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
        codec = form.codec
        if codec is None:
            return plain_gated(gate, up, form.activation).to(dtype)
        out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
        gated.encode(
            gate.contiguous(), None if up is None else up.contiguous(), kept[0], kept[1], out,
            form.activation, codec.bits, codec.group, draw_seed(codec.rounding, gate.device),
        )  # fmt: skip
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        release(ctx)
        form: GatedOutput = ctx.form
        if form.codec is None:

            def formula(gate: Tensor, up: Tensor | None) -> Tensor:
                return plain_gated(gate, up, form.activation)

            return *_differentiate(formula, gate, up, grad_out=grad_out), None, None
        of_gate, of_up = ctx.dtypes
        grad_gate = torch.empty(form.shape, dtype=of_gate, device=grad_out.device)
        grad_up = None if of_up is None else torch.empty_like(grad_gate, dtype=of_up)
        gated.backward(
            gate, up, grad_out.contiguous(), grad_gate, grad_up, None,
            form.activation, form.codec.bits, form.codec.group,
        )  # fmt: skip
        return grad_gate, grad_up, None, None


class LinearFunction(torch.autograd.Function):
    """x (..., I) times weight (O, I), or (I, O) if `transposed`, plus bias; keeps what gives x back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
        transposed: bool, dtype: torch.dtype, rebuilt: Rebuilt | None, kept: Kept,
    ) -> Tensor:  # fmt: skip
        """Computes in `dtype`. `rebuilt`: x in backward, None if the weight is frozen; `kept`: from what."""
        ctx.transposed, ctx.rebuilt, ctx.dtype = transposed, rebuilt, dtype
        ctx.of_x, ctx.of_bias = x.dtype, None if bias is None else bias.dtype
        ctx.given = (True, True, bias is not None)
        ctx.save_for_backward(weight, *kept)
        with torch.autocast(x.device.type, enabled=False):  # its cache must not meet no_grad
            w = weight.to(dtype)
            shift = None if bias is None else bias.to(dtype)
            return functional.linear(x.to(dtype), w.t() if transposed else w, shift)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        weight, *kept = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = wanted(ctx)
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(grad_out.device.type, enabled=False):
            if wants_x:
                w = weight.to(ctx.dtype)
                grad_x = (grad_out @ (w.t() if ctx.transposed else w)).to(ctx.of_x)
            g_NO = grad_out.reshape(-1, grad_out.shape[-1])
            if wants_weight:
                x_NI = ctx.rebuilt.get(tuple(kept), ctx.dtype).reshape(len(g_NO), -1)
                product = x_NI.t() @ g_NO if ctx.transposed else g_NO.t() @ x_NI
                grad_weight = product.to(weight.dtype)
            if wants_bias:
                grad_bias = g_NO.sum(0).to(ctx.of_bias)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def wanted(ctx: Any) -> list[bool]:
    """Of which inputs this very backward pass needs gradients; `ctx.given` says which ones there are.

    `needs_input_grad` says only which ones any pass could need; zero-bubble schedules ask for those of inputs and of
    weights in separate passes.
    """
    found = []
    nodes = iter(ctx.next_functions)  # of the tensors among the inputs
    for given, needed in zip(ctx.given, ctx.needs_input_grad, strict=False):
        node = next(nodes)[0] if given else None
        if needed:
            try:
                needed = torch._C._will_engine_execute_node(node)  # pyright: ignore
            except RuntimeError:  # a leaf that torch.autograd.grad asks for
                needed = True
        found.append(needed)
    return found


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _differentiate(formula: Any, *inputs: Tensor | None, grad_out: Tensor) -> list[Tensor | None]:
    """Gradients of a formula of PyTorch's own functions at these inputs."""
    with torch.enable_grad(), torch.autocast(grad_out.device.type, enabled=False):
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        out = formula(*leaves)
    there = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(out, there, grad_out.to(out.dtype)))
    return [None if leaf is None else next(found) for leaf in leaves]
