"""Attention that is written out as products and a softmax: probabilities and what is multiplied, in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.activations import handlers
from lowbit.activations.follow import Call, encoded, handles, large_enough
from lowbit.activations.functions import first_order, needed_now
from lowbit.activations.recipes import Itself, Rebuilt, Recipe, SavedTensors, attach, recipe_of
from lowbit.codecs import GroupInt


@dataclass(frozen=True)
class Probabilities:
    """Saved: square roots of probabilities, so that a group's small ones are more than 0 beside large ones."""

    shape: torch.Size
    codec: GroupInt

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        """The probabilities, rounded."""
        payload = saved[0]
        assert payload is not None
        return self.codec.decode(payload, shape=self.shape, dtype=dtype).square_()


@handles(functional.softmax, torch.softmax, Tensor.softmax)
def softmax(call: Call, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Probabilities of attention, which have four dimensions; those of routers are saved as they are."""
    dim = args[0] if args else kwargs.get("dim")
    codec = call.codec("attention")
    if input.dim() != 4 or dim not in (-1, 3) or codec is None or not large_enough(input) or not call.saves(input):
        return NotImplemented
    with call.handled(input, *args, **kwargs):
        with torch.no_grad():
            out = call.func(input, *args, **kwargs)
            payload = encoded(codec, out.sqrt())
        form = Probabilities(out.shape, codec)
        out = _Softmax.apply(input, out, form, payload)
        attach(out, Recipe(form, (payload,), weak=True))
    return call.returned(out)


class _Softmax(torch.autograd.Function):
    """Softmax over the last dimension; saves a payload of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, form: Probabilities, payload: Tensor) -> Tensor:
        ctx.form, ctx.dtype = form, x.dtype
        ctx.save_for_backward(payload)
        return out.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        out = ctx.form.rebuild(ctx.saved_tensors, torch.float32)
        grad = out * (grad_out - (grad_out * out).sum(-1, keepdim=True))
        return grad.to(ctx.dtype), None, None, None


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(call: Call, input: Any, other: Any, **kwargs: Any) -> Any:
    """A product of two activations of four dimensions; others: linear layers."""
    out = handlers.matmul(call, input, other, **kwargs)
    if out is not NotImplemented or kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return out
    codec = call.codec("attention")
    if codec is None or input.dim() != 4 or other.dim() != 4 or input.shape[:2] != other.shape[:2]:
        return NotImplemented
    autocast = torch.is_autocast_enabled(input.device.type)
    if not autocast and input.dtype != other.dtype:
        return NotImplemented
    if not (input.requires_grad and other.requires_grad and large_enough(input) and large_enough(other)):
        return NotImplemented
    if not call.saves(input, other):
        return NotImplemented
    dtype = torch.get_autocast_dtype(input.device.type) if autocast else input.dtype
    with call.handled(input, other):
        first, second = _source(input, codec), _source(other, codec)
        out = _Product.apply(input, other, dtype, *first, *second)
    return call.returned(out)


def _source(x: Tensor, codec: GroupInt) -> tuple[Rebuilt, SavedTensors]:
    """How backward gets `x` again, and from which tensors."""
    recipe = recipe_of(x)
    if recipe is None:
        recipe = Recipe(Itself(x.shape, codec), (encoded(codec, x.contiguous()),), weak=True)
        saved = recipe.saved()
        attach(x, recipe)
    else:
        saved = recipe.saved()
    recipe.rebuilt.add_user()
    return recipe.rebuilt, saved or ()


class _Product(torch.autograd.Function):
    """A batch of matrix products; saves tensors that rebuild both sides."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype,
        first: Rebuilt, of_first: SavedTensors, second: Rebuilt, of_second: SavedTensors,
    ) -> Tensor:  # fmt: skip
        ctx.dtype, ctx.count, ctx.rebuilt, ctx.present = dtype, len(of_first), (first, second), (True, True)
        ctx.shapes, ctx.dtypes = (x.shape, y.shape), (x.dtype, y.dtype)
        ctx.save_for_backward(*of_first, *of_second)
        with torch.autocast(x.device.type, enabled=False):
            return x.to(dtype) @ y.to(dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        needs = needed_now(ctx)
        parts = saved[: ctx.count], saved[ctx.count :]
        grads: list[Tensor | None] = [None, None]
        with torch.autocast(grad_out.device.type, enabled=False):
            for side in (0, 1):
                if not needs[side]:
                    continue
                other = ctx.rebuilt[1 - side].get(tuple(parts[1 - side]), ctx.dtype).reshape(ctx.shapes[1 - side])
                other = other.transpose(2, 3)
                grads[side] = (grad_out @ other if side == 0 else other @ grad_out).to(ctx.dtypes[side])
        return *grads, None, None, None, None, None
