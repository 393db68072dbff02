"""What is saved for functions of mixture-of-experts layers that are written out: gathers, batched products, sums.

`lowbit.activations.experts` replaces whole layers of the usual form. These handlers serve loops over modules, and
products with the weights of all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import handlers
from lowbit.activations.follow import Call, handles, large_enough
from lowbit.activations.functions import first_order, needed_now
from lowbit.activations.products import product_of_two
from lowbit.activations.recipes import Rebuilt, SavedTensors, attach, recipe_of


@handles(Tensor.__getitem__)
def getitem(call: Call, input: Tensor, index: Any) -> Any:
    """Rows of a tensor by their numbers, which are gathered again in backward; other indices: views."""
    rows = index[-1] if isinstance(index, tuple) and [*index[:-1]] == [None] else index
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        return handlers.moved_elements(call, input, index)
    return _gathered(call, input, rows, (index,))


@handles(torch.index_select, Tensor.index_select)
def index_select(call: Call, input: Tensor, dim: int, index: Tensor) -> Any:
    """The same, written so."""
    return _gathered(call, input, index, (dim, index)) if dim == 0 and index.dim() == 1 else NotImplemented


def _gathered(call: Call, x: Tensor, rows: Tensor, args: tuple[Any, ...]) -> Any:
    recipe = recipe_of(x)
    if recipe is None or x.dim() != 2 or not len(rows):
        return NotImplemented
    out = call.func(x, *args)
    attach(out, recipe.derived(x.shape, _rows, rows))
    return out


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


handles(Tensor.repeat, Tensor.repeat_interleave, torch.repeat_interleave)(handlers.moved_elements)


@handles(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
def product(call: Call, input: Any, other: Any, **kwargs: Any) -> Any:
    """Rows times a number each, such as outputs of experts times routing weights; other products as usual."""
    out = handlers.product(call, input, other, **kwargs)
    if out is not NotImplemented or kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return out
    x, factors = (input, other) if input.dim() == 2 and input.shape[1] > 1 else (other, input)
    if x.dim() != 2 or x.shape[1] == 1 or factors.shape != (len(x), 1) or not factors.requires_grad:
        return NotImplemented
    if not large_enough(x) or not call.saves(x, factors):
        return NotImplemented
    with call.handled(input, other):
        rebuilt, saved = call.source(x, x.dtype)
        out = _RowsTimes.apply(x, factors, rebuilt, saved)
        if recipe := recipe_of(x):
            attach(out, recipe.derived(x.shape, torch.mul, factors))
    return call.returned(out)


class _RowsTimes(torch.autograd.Function):
    """x (S, C) times factors (S, 1); saves tensors that rebuild x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, rebuilt: Rebuilt, saved: SavedTensors) -> Tensor:
        ctx.rebuilt, ctx.shape, ctx.dtype, ctx.present = rebuilt, x.shape, x.dtype, (True, True)
        ctx.save_for_backward(factors, *saved)
        return x * factors

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        factors, *saved = ctx.saved_tensors
        needs_x, needs_factors = needed_now(ctx)
        grad_x = grad_factors = None
        if needs_x:
            grad_x = (grad_out * factors).to(ctx.dtype)
        if needs_factors:
            x = ctx.rebuilt.get(tuple(saved), ctx.dtype).view(ctx.shape)
            grad_factors = (grad_out * x).sum(1, keepdim=True, dtype=torch.float32).to(factors.dtype)
        return grad_x, grad_factors, None, None


@handles(Tensor.index_add_)
def index_add_(call: Call, input: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: Any) -> Any:
    """Rows added to those with these numbers: PyTorch saves the rows for their shape alone."""
    if kwargs or dim != 0 or index.dim() != 1 or not source.requires_grad or (input.is_leaf and input.requires_grad):
        return NotImplemented
    if source.dtype != input.dtype or not call.saves(source):
        return NotImplemented
    with call.handled(input.detach().clone(), dim, index, source):
        out = _IndexAdd.apply(input, index, source)
    return call.returned(out)


class _IndexAdd(torch.autograd.Function):
    """`index_add_` that saves the index alone."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, index: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.mark_dirty(input)
        return input.index_add_(0, index, source)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        return grad_out, None, grad_out.index_select(0, ctx.saved_tensors[0])


@handles(torch.bmm, Tensor.bmm)
def bmm(call: Call, input: Tensor, mat2: Tensor) -> Any:
    """A batch of linear layers, if the second matrices are a parameter; otherwise a product of two activations."""
    out = _batched(call, input, mat2, (input, mat2), {})
    return product_of_two(call, input, mat2, (input, mat2)) if out is NotImplemented else out


@handles(functional.grouped_mm, torch._grouped_mm)  # pyright: ignore[reportPrivateImportUsage]
def grouped_mm(call: Call, mat_a: Tensor, mat_b: Tensor, **kwargs: Any) -> Any:
    """A linear layer for each group of rows, if the second matrices are a parameter."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    offsets_only = [*kwargs] == ["offs"] and mat_a.dim() == 2
    return _batched(call, mat_a, mat_b, (mat_a, mat_b), kwargs) if offsets_only else NotImplemented


def _batched(call: Call, x: Tensor, weight: Tensor, given: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = weight._base if weight._is_view() else weight
    if not isinstance(base, nn.Parameter) or weight.dim() != 3 or not weight.requires_grad:
        return NotImplemented
    if not large_enough(x) or not call.saves(x, weight):
        return NotImplemented
    # Autocast does not know grouped products; PyTorch refuses mixtures of dtypes otherwise.
    autocast = torch.is_autocast_enabled(x.device.type) and not kwargs
    if not autocast and x.dtype != weight.dtype:
        return NotImplemented
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    offsets = kwargs.get("offs")
    with call.handled(*given, **kwargs):
        rebuilt, saved = call.source(x, dtype)
        out = _Batched.apply(x, weight, call.func, offsets, dtype, rebuilt, saved)
    return call.returned(out)


class _Batched(torch.autograd.Function):
    """x (B, N, I), or (N, I) in groups that end at `offsets`, times weight (B, I, O)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, func: Callable[..., Tensor], offsets: Tensor | None,
        dtype: torch.dtype, rebuilt: Rebuilt, saved: SavedTensors,
    ) -> Tensor:  # fmt: skip
        ctx.func, ctx.dtype, ctx.rebuilt = func, dtype, rebuilt
        ctx.shape, ctx.x_dtype, ctx.present = x.shape, x.dtype, (True, True)
        ctx.save_for_backward(weight, offsets, *saved)
        with torch.autocast(x.device.type, enabled=False):
            return _with(func, offsets)(x.to(dtype), weight.to(dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        weight, offsets, *saved = ctx.saved_tensors
        needs_x, needs_weight = needed_now(ctx)[:2]
        func, grad_x, grad_weight = _with(ctx.func, offsets), None, None
        grad_out = grad_out.contiguous()
        with torch.autocast(grad_out.device.type, enabled=False):
            if needs_x:
                grad_x = func(grad_out, weight.to(ctx.dtype).transpose(1, 2)).to(ctx.x_dtype)
            if needs_weight:
                x = ctx.rebuilt.get(tuple(saved), ctx.dtype).reshape(ctx.shape)
                grad_weight = func(x.transpose(-2, -1), grad_out).to(weight.dtype)
        return grad_x, grad_weight, None, None, None, None, None


def _with(func: Callable[..., Tensor], offsets: Tensor | None) -> Callable[..., Tensor]:
    return func if offsets is None else functools.partial(func, offs=offsets)
