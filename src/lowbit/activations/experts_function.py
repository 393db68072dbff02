"""Mixture-of-experts layers whose backward starts from rounded inputs: routing stays exact.

Backward gets what the products with the first matrices gave, in few bits. The tokens' hidden states are rebuilt from
the recipe that they have, and gathered once more; activations are recomputed. The gradient at a routing weight is a
scalar product on the inner side of the last matrix, so the experts' outputs are not needed at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.activations.experts_products import (
    Routing,
    bias_gradient,
    bias_rows,
    product,
    weight_gradient,
)
from lowbit.activations.functions import first_order, needed_now
from lowbit.activations.gated import reference as gated
from lowbit.activations.recipes import Rebuilt, SavedTensors, is_fused, room
from lowbit.codecs import Codec
from lowbit.codecs.checks import draw_seed

_ROWS = 4096  # at a time, where float32 copies are needed


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What comes between the products: (S, F) from (S, 2F), or from (S, F) without an `up` half.

    `activation`: of the formula act(gate) * up with gate in the first half, for which there are operators; None: only
    `formula`, the module's own function.
    """

    formula: Callable[[Tensor], Tensor]
    activation: str | None
    has_up: bool

    def encode(self, pre_SO: Tensor, codec: Codec | None, dtype: torch.dtype) -> tuple[Tensor, SavedTensors]:
        """The gate's output in `dtype`, and what backward needs for it."""
        if codec is None:
            return self.formula(pre_SO).to(dtype), (pre_SO,)
        if self.activation is None or not is_fused(codec):
            return self.formula(pre_SO).to(dtype), (codec.encode(pre_SO),)
        gate, up = (half.contiguous() for half in pre_SO.chunk(2, -1)) if self.has_up else (pre_SO, None)
        saved = (room(codec, gate), None if up is None else room(codec, up))
        out = torch.empty_like(gate, dtype=dtype)
        seed = draw_seed(codec.rounding, gate.device)
        gated.encode(gate, up, saved[0], saved[1], out, self.activation, codec.bits, codec.group, seed)
        return out, saved

    def backward(self, saved: SavedTensors, codec: Codec | None, grad_SF: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The gradient at the gate's input, and the gate's output again, both in the dtype of `grad_SF`."""
        first, second = (*saved, None)[:2]
        assert first is not None
        out = torch.empty_like(grad_SF)
        if self.activation is not None and is_fused(codec):
            grad_gate, grad_up = torch.empty_like(grad_SF), torch.empty_like(grad_SF) if self.has_up else None
            gated.backward(first, second, grad_SF, grad_gate, grad_up, out, self.activation, codec.bits, codec.group)
            return grad_gate if grad_up is None else torch.cat([grad_gate, grad_up], -1), out
        shape = (len(grad_SF), width)
        pre_SO = first if codec is None else codec.decode(first, shape=shape, dtype=grad_SF.dtype)
        grad = torch.empty(shape, dtype=grad_SF.dtype, device=grad_SF.device)
        for start in range(0, len(grad_SF), _ROWS):
            rows = slice(start, start + _ROWS)
            with torch.enable_grad():
                leaf = pre_SO[rows].detach().float().requires_grad_()
                value = self.formula(leaf)
            (grad[rows],) = torch.autograd.grad(value, leaf, grad_SF[rows].to(value.dtype))
            out[rows] = value.detach()
        return grad, out


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a layer computes: `transposed` weights are (E, I, O), others (E, O, I); products are in `dtype`."""

    gate: Gate
    codec: Codec | None
    transposed: bool
    dtype: torch.dtype

    def inputs_first(self, weight: Tensor) -> Tensor:
        """A weight, or its gradient, as (E, I, O); and back."""
        return weight if self.transposed else weight.transpose(1, 2)


class ExpertsFunction(torch.autograd.Function):
    """sum over a token's choices of weight * down_e(gate(up_e(x))), where e is the expert that it chose."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weights_NK: Tensor,
        up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
        form: Form, routing: Routing, rebuilt: Rebuilt | None, saved: SavedTensors,
    ) -> Tensor:  # fmt: skip
        """`rebuilt`: x in backward, from `saved`; None if `up` is frozen."""
        ctx.present = (True, True, True, up_bias is not None, True, down_bias is not None)
        ctx.form, ctx.rebuilt, ctx.ends, ctx.choices = form, rebuilt, routing.ends, routing.choices
        ctx.x_dtype = x_NI.dtype
        with torch.autocast(x_NI.device.type, enabled=False):
            pre_SO = product(routing.gather(x_NI).to(form.dtype), form.inputs_first(up), routing)
            ctx.width = pre_SO.shape[1]
            if up_bias is not None:
                pre_SO = pre_SO + bias_rows(up_bias, routing)
            inner_SF, of_gate = form.gate.encode(pre_SO, form.codec, form.dtype)
            del pre_SO
            out_SI = product(inner_SF, form.inputs_first(down), routing)
            del inner_SF
            if down_bias is not None:
                out_SI = out_SI + bias_rows(down_bias, routing)
            out_SI = out_SI * weights_NK.reshape(-1, 1).index_select(0, routing.order)
            out = routing.sums(out_SI, len(x_NI)).to(x_NI.dtype)
        ctx.of_gate = len(of_gate)
        ctx.save_for_backward(weights_NK, up, down, up_bias, down_bias, routing.order, *of_gate, *saved)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        weights_NK, up, down, up_bias, down_bias, order, *rest = ctx.saved_tensors
        of_gate, saved = tuple(rest[: ctx.of_gate]), tuple(rest[ctx.of_gate :])
        form: Form = ctx.form
        routing = Routing(order, ctx.ends, ctx.choices)
        needs_x, needs_weights, needs_up, needs_up_bias, needs_down, needs_down_bias = needed_now(ctx)
        grad_x = grad_weights = grad_up = grad_up_bias = grad_down = grad_down_bias = None
        with torch.autocast(grad_out.device.type, enabled=False):
            g_SI = routing.gather(grad_out.to(form.dtype))
            weights_S1 = weights_NK.reshape(-1, 1).index_select(0, order).to(form.dtype)
            unweighted_SF = product(g_SI, form.inputs_first(down).transpose(1, 2), routing)
            grad_pre_SO, inner_SF = form.gate.backward(of_gate, form.codec, unweighted_SF * weights_S1, ctx.width)
            if needs_weights:
                along_S = (unweighted_SF * inner_SF).sum(-1, dtype=torch.float32)
                if down_bias is not None:
                    along_S += (g_SI * bias_rows(down_bias, routing)).sum(-1, dtype=torch.float32)
                grad_weights = torch.zeros(weights_NK.numel(), dtype=torch.float32, device=grad_out.device)
                grad_weights = grad_weights.index_copy_(0, order.long(), along_S).view_as(weights_NK)
                grad_weights = grad_weights.to(weights_NK.dtype)
            del unweighted_SF
            g_SI *= weights_S1
            if needs_down_bias and down_bias is not None:
                grad_down_bias = bias_gradient(g_SI, down_bias, routing)
            if needs_down:
                grad_down = form.inputs_first(weight_gradient(inner_SF, g_SI, form.inputs_first(down), routing))
            del g_SI, inner_SF
            if needs_up_bias and up_bias is not None:
                grad_up_bias = bias_gradient(grad_pre_SO, up_bias, routing)
            if needs_up:
                x_SI = routing.gather(ctx.rebuilt.get(saved, form.dtype).reshape(len(weights_NK), -1))
                grad_up = form.inputs_first(weight_gradient(x_SI, grad_pre_SO, form.inputs_first(up), routing))
                del x_SI
            if needs_x:
                grad_SI = product(grad_pre_SO, form.inputs_first(up).transpose(1, 2), routing)
                grad_x = routing.sums(grad_SI, len(weights_NK)).to(ctx.x_dtype)
        return grad_x, grad_weights, grad_up, grad_up_bias, grad_down, grad_down_bias, None, None, None, None
