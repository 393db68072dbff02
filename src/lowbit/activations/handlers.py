"""Handlers of torch functions: linear layers, norms, activations, products, dropout, views and casts.

They also handle the parts of mixture-of-experts layers (gathers, batched products, sums): `lowbit.activations.experts`
replaces whole layers of the usual form; these handlers serve loops over modules and products with all experts' weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations.checkpoint import after_linear
from lowbit.activations.follow import TorchCall, encoded, handles, large_enough, saved_recipe
from lowbit.activations.functions import (
    BatchedFunction,
    IndexAddFunction,
    LinearFunction,
    MaskFunction,
    ProductFunction,
    SquareFunction,
    TimesFunction,
    first_order,
    nobodys,
)
from lowbit.activations.layers import activated, normalized
from lowbit.activations.products import elementwise, product_of_two
from lowbit.activations.recipes import (
    GatedOutput,
    Itself,
    Masked,
    Norm,
    Recipe,
    attach,
    attach_until_backward,
    itself,
    packed_bits,
    recipe_of,
)
from lowbit.codecs.checks import FLOATS

_CHUNK = 1 << 22  # elements of float32 logits at a time
_MUCH_WIDER = 4  # times as many outputs as inputs: computing the product again is cheaper than saving it


@handles(functional.linear)
def linear(call: TorchCall, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear layer, which saves its input unless that has a recipe."""
    return _linear(call, (input, weight, bias), input, weight, bias, transposed=False)


@handles(torch.mm, Tensor.mm)
def mm(call: TorchCall, input: Tensor, mat2: Tensor, **kwargs: Any) -> Any:
    """Handle `mm` like `matmul`; PyTorch names its second argument `mat2`."""
    return matmul(call, input, mat2, **kwargs)


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(call: TorchCall, input: Any, other: Any, **kwargs: Any) -> Any:
    """A linear layer, if the second matrix is a parameter; otherwise a product of two activations."""
    if kwargs or not isinstance(input, Tensor) or input.dim() < 2:
        return NotImplemented
    if not _is_parameter(other):
        return product_of_two(call, input, other, (input, other))
    return _linear(call, (input, other), input, other, None, transposed=True)


@handles(torch.addmm)
def addmm(call: TorchCall, input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Any:
    """A linear layer with bias, if the second matrix is a parameter: Conv1D of Hugging Face."""
    if kwargs or not _is_parameter(mat2) or input.dim() != 1:
        return NotImplemented
    return _linear(call, (input, mat1, mat2), mat1, mat2, input, transposed=True)


def _linear(
    call: TorchCall, given: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool
) -> Any:
    if weight.dim() != 2 or x.dim() < 1 or not large_enough(x) or not call.saves(x, weight, bias):
        return NotImplemented
    autocast = torch.is_autocast_enabled(x.device.type)
    # PyTorch refuses mixtures of dtypes: leave the error to its own functions.
    if not autocast and len({t.dtype for t in (x, weight, bias) if t is not None}) > 1:
        return NotImplemented
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    with call.handled(*given):
        rebuilt, saved = call.source(x, dtype) if weight.requires_grad else (None, ())
        out = after_linear(LinearFunction.apply(x, weight, bias, transposed, dtype, rebuilt, saved))
        recipe = recipe_of(x) if rebuilt is not None and bias is None and not transposed else None
        if recipe is not None and _MUCH_WIDER * weight.shape[1] <= weight.shape[0]:  # an adapter, which DoRA scales
            attach(out, recipe.derived(x.shape, _times, weight))
        return out


def _times(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x, weight.to(x.dtype))


def _is_parameter(x: Any) -> bool:
    """Whether `x` is a matrix that is a parameter, or a view of one."""
    if not isinstance(x, Tensor) or x.dim() != 2:
        return False
    return isinstance(x, nn.Parameter) or (x._is_view() and isinstance(x._base, nn.Parameter))


@handles(functional.layer_norm)
def layer_norm(
    call: TorchCall, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """LayerNorm over the last dimension."""
    return _norm(call, input, normalized_shape, weight, bias, Norm(eps=eps, centred=True))


@handles(functional.rms_norm)
def rms_norm(
    call: TorchCall, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:  # fmt: skip
    """RMSNorm over the last dimension."""
    return _norm(call, input, normalized_shape, weight, None, Norm(eps=eps))


def _norm(
    call: TorchCall, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, norm: Norm
) -> Any:  # fmt: skip
    same = len({t.dtype for t in (x, weight, bias) if t is not None}) == 1
    if not same or len(shape) != 1 or not large_enough(x) or not call.saves(x, weight, bias):
        return NotImplemented
    given = (x, shape, weight, bias, norm.eps) if norm.centred else (x, shape, weight, norm.eps)
    on_cuda = x.is_cuda and torch.is_autocast_enabled("cuda")  # autocast computes norms in float32 there
    with call.handled(*given):
        return normalized(call, x, weight, bias, norm, torch.float32 if on_cuda else x.dtype)


@handles(functional.silu, functional.relu, torch.relu, Tensor.relu)
def silu_or_relu(call: TorchCall, input: Tensor, inplace: bool = False) -> Any:
    """SiLU and ReLU."""
    if inplace:
        return call.left("changed in place")
    return _activation(call, (input,), input, "silu" if call.func is functional.silu else "relu")


@handles(functional.gelu)
def gelu(call: TorchCall, input: Tensor, approximate: str = "none") -> Any:
    """GELU of both kinds."""
    return _activation(call, (input,), input, "gelu" if approximate == "none" else "gelu_tanh", approximate=approximate)


def _activation(call: TorchCall, given: tuple[Any, ...], x: Tensor, activation: str, **kwargs: Any) -> Any:
    if not large_enough(x) or not call.saves(x):
        return NotImplemented
    with call.handled(*given, **kwargs):
        return call.returned(activated(call, x, activation))


@handles(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
def product(call: TorchCall, input: Any, other: Any, **kwargs: Any) -> Any:
    """act(gate) * up: payloads of gate and up serve the product, its gradients and the layer that follows.

    A tensor times a trained factor for each channel (DoRA, LayerScale) saves a payload of the tensor, and so do rows
    times one factor each, such as outputs of experts times routing weights.
    """
    if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return NotImplemented if kwargs else elementwise(call, input, other)
    if input.shape != other.shape:
        return _scaled(call, input, other)
    for gate, up in ((input, other), (other, input)):
        recipe = recipe_of(gate)
        if recipe is None or not isinstance(recipe.form, GatedOutput) or gate.shape != recipe.form.shape:
            continue
        saved = recipe.saved()
        if saved is None or saved[1] is not None or not up.requires_grad or not call.saves(gate, up):
            continue
        with call.handled(input, other):
            return _gated(gate, up, recipe.form, saved[0])
    return NotImplemented


def _scaled(call: TorchCall, input: Tensor, other: Tensor) -> Any:
    x, factor = (input, other) if input.numel() > other.numel() else (other, input)
    if x.dim() < 2 or factor.dim() > x.dim() or not factor.requires_grad:
        return NotImplemented
    by_channel = factor.shape[-1:] == x.shape[-1:] and factor.numel() == x.shape[-1]
    by_row = x.dim() == 2 and factor.shape == (len(x), 1)
    if not (by_channel or by_row) or not large_enough(x) or not call.saves(x, factor):
        return NotImplemented
    with call.handled(input, other):
        out = TimesFunction.apply(x, factor, *call.source(x, x.dtype))
        if by_row and (recipe := recipe_of(x)):
            attach(out, recipe.derived(x.shape, torch.mul, factor))
    return call.returned(out)


@handles(torch.square, Tensor.square)
def square(call: TorchCall, input: Tensor) -> Any:
    """The square of a tensor that is saved anyway, such as ReLU's output."""
    recipe = recipe_of(input)
    if recipe is None or not call.saves(input):
        return NotImplemented
    with call.handled(input):
        out = SquareFunction.apply(input, *call.source(input, input.dtype))
        attach_until_backward(out, recipe.derived(input.shape, torch.square))
        return out


def _gated(activation: Tensor, up: Tensor, form: GatedOutput, payload: Tensor | None) -> Tensor:
    if form.codec is None:
        second: Tensor | None = up
    else:
        before = itself(up, form.codec)
        second = before[0][0] if before and before[1] == form.codec else encoded(form.codec, up)
        if recipe_of(up) is None:
            attach(up, Recipe(Itself(up.shape, form.codec), (second,), weak=True))
    saved = (payload, second)
    out = ProductFunction.apply(activation, up, nobodys(up.device), form, saved)
    attach_until_backward(out, Recipe(form, saved))
    return out


@handles(functional.dropout, torch.dropout)
def dropout(call: TorchCall, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout, which saves a bit for each element."""
    if inplace or not training or not 0 < p < 1 or not large_enough(input) or not call.saves(input):
        return NotImplemented
    with call.handled(input, p, training):
        # The mask is drawn in the same way as by PyTorch, so that results are the same.
        with torch.no_grad():
            factors = functional.dropout(torch.ones_like(input), p)
            out, mask, scale = input * factors, packed_bits(factors), 1 / (1 - p)
        recipe = saved_recipe(input)
        out = MaskFunction.apply(input, out, mask, scale)
        if recipe is not None:
            attach_until_backward(out, recipe.derived(input.shape, Masked(scale), mask))
        return out


@handles(
    Tensor.view, Tensor.view_as, Tensor.reshape, torch.reshape, Tensor.reshape_as, Tensor.flatten, torch.flatten,
    Tensor.unflatten, torch.unflatten, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze,
    Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.type, Tensor.type_as,
    Tensor.float, Tensor.bfloat16, Tensor.half,
)  # fmt: skip
def same_elements(call: TorchCall, *args: Any, **kwargs: Any) -> Any:
    """Views and casts with the same elements in the same order, for which the tensor's recipe is also valid."""
    recipe = saved_recipe(args[0]) if args and isinstance(args[0], Tensor) else None
    if recipe is None:
        return NotImplemented
    x, out = args[0], call.func(*args, **kwargs)
    is_same = isinstance(out, Tensor) and out.numel() == x.numel() and out.device == x.device and out.dtype in FLOATS
    if is_same and out is not x and recipe_of(out) is None:
        attach(out, recipe)
    return out


@handles(
    Tensor.transpose, torch.transpose, Tensor.swapaxes, Tensor.permute, torch.permute, Tensor.movedim, Tensor.t,
    Tensor.T.__get__, Tensor.mT.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.unbind,
    torch.unbind, Tensor.narrow, torch.narrow, Tensor.select, torch.select, Tensor.expand,
    Tensor.repeat, Tensor.repeat_interleave, torch.repeat_interleave,
)  # fmt: skip
def moved_elements(call: TorchCall, *args: Any, **kwargs: Any) -> Any:
    """Views with only some of the elements, or in another order."""
    recipe = recipe_of(args[0]) if args and isinstance(args[0], Tensor) else None
    if recipe is None or not _is_basic(args[1:]):
        return NotImplemented
    x, out = args[0], call.func(*args, **kwargs)
    for index, part in enumerate([out] if isinstance(out, Tensor) else out):
        which = None if isinstance(out, Tensor) else index
        attach(part, recipe.derived(x.shape, functools.partial(_again, call.func, args[1:], kwargs, which)))
    return out


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None, x: Tensor) -> Tensor:
    out = func(x, *args, **kwargs)
    return out if index is None else out[index]


def _is_basic(args: Any) -> bool:
    """Whether arguments contain no tensors: indexing with these is a view."""
    if isinstance(args, list | tuple):
        return all(map(_is_basic, args))
    return not isinstance(args, Tensor)


@handles(Tensor.__getitem__)
def getitem(call: TorchCall, input: Tensor, index: Any) -> Any:
    """Rows of a tensor by their numbers, which are gathered again in backward; other indices are views."""
    rows = index[-1] if isinstance(index, tuple) and [*index[:-1]] == [None] else index
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        return moved_elements(call, input, index)
    return _gathered(call, input, rows, (index,))


@handles(torch.index_select, Tensor.index_select)
def index_select(call: TorchCall, input: Tensor, dim: int, index: Tensor) -> Any:
    """Handle `index_select` along the first dimension like an index of rows."""
    return _gathered(call, input, index, (dim, index)) if dim == 0 and index.dim() == 1 else NotImplemented


def _gathered(call: TorchCall, x: Tensor, rows: Tensor, args: tuple[Any, ...]) -> Any:
    recipe = recipe_of(x)
    if recipe is None or x.dim() != 2 or not len(rows):
        return NotImplemented
    out = call.func(x, *args)
    attach(out, recipe.derived(x.shape, lambda x, rows: x.index_select(0, rows), rows))
    return out


@handles(Tensor.index_add_)
def index_add_(call: TorchCall, input: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: Any) -> Any:
    """Add rows to those with these numbers; unlike PyTorch, do not save the rows, of which only the shape is needed."""
    if kwargs or dim != 0 or index.dim() != 1 or not source.requires_grad or (input.is_leaf and input.requires_grad):
        return NotImplemented
    if source.dtype != input.dtype or not call.saves(source):
        return NotImplemented
    with call.handled(input.detach().clone(), dim, index, source):
        out = IndexAddFunction.apply(input, index, source)
    return call.returned(out)


@handles(torch.bmm, Tensor.bmm)
def bmm(call: TorchCall, input: Tensor, mat2: Tensor) -> Any:
    """A batch of linear layers, if the second matrices are a parameter; otherwise a product of two activations."""
    out = _batched(call, input, mat2, (input, mat2), {})
    return product_of_two(call, input, mat2, (input, mat2)) if out is NotImplemented else out


@handles(functional.grouped_mm, torch._grouped_mm)  # pyright: ignore[reportPrivateImportUsage]
def grouped_mm(call: TorchCall, mat_a: Tensor, mat_b: Tensor, **kwargs: Any) -> Any:
    """A linear layer for each group of rows, if the second matrices are a parameter."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    offsets_only = [*kwargs] == ["offs"] and mat_a.dim() == 2
    return _batched(call, mat_a, mat_b, (mat_a, mat_b), kwargs) if offsets_only else NotImplemented


def _batched(call: TorchCall, x: Tensor, weight: Tensor, given: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        out = BatchedFunction.apply(x, weight, call.func, offsets, dtype, rebuilt, saved)
    return call.returned(out)


@handles(functional.cross_entropy)
def cross_entropy(
    call: TorchCall, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """The mean, or sum, over rows of float32 logits that were cast from 16 bits."""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return NotImplemented
    if reduction not in ("mean", "sum") or input.dim() != 2 or target.dim() != 1 or input.dtype != torch.float32:
        return NotImplemented
    if not large_enough(input) or not call.saves(input):
        return NotImplemented
    with torch.no_grad():
        narrow = _narrow(input)
    if narrow is None:
        return NotImplemented
    with call.handled(input, target, ignore_index=ignore_index, reduction=reduction):
        with torch.no_grad():
            loss = functional.cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)
        return CrossEntropyFunction.apply(input, loss, narrow, target, ignore_index, reduction)


def _narrow(x_RV: Tensor) -> Tensor | None:
    """Return float32 logits in a 16-bit dtype that holds them exactly; None if neither does."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(x_RV[:1].to(dtype).float(), x_RV[:1]):
            narrow = x_RV.to(dtype)
            return narrow if all(torch.equal(narrow[r].float(), x_RV[r]) for r in _chunks(x_RV)) else None
    return None


def _chunks(x_RV: Tensor) -> list[slice]:
    rows = max(1, _CHUNK // x_RV.shape[1])
    return [slice(start, start + rows) for start in range(0, len(x_RV), rows)]


class CrossEntropyFunction(torch.autograd.Function):
    """Cross-entropy of logits (R, V) and targets (R,), whose backward computes softmax again."""

    @staticmethod
    def forward(
        ctx: Any, x_RV: Tensor, loss: Tensor, narrow_RV: Tensor, target_R: Tensor, ignored: int, reduction: str
    ) -> Tensor:
        """`loss`: the result; `narrow_RV`: the logits in 16 bits."""
        ctx.ignored, ctx.reduction = ignored, reduction
        ctx.save_for_backward(narrow_RV, target_R)
        return loss.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        narrow_RV, target_R = ctx.saved_tensors
        counts_R = target_R != ctx.ignored
        scale = grad_out.float() / counts_R.sum() if ctx.reduction == "mean" else grad_out.float()
        grad_RV = torch.empty(narrow_RV.shape, dtype=torch.float32, device=narrow_RV.device)
        for rows in _chunks(narrow_RV):
            counts = counts_R[rows].unsqueeze(1)
            grad = torch.softmax(narrow_RV[rows].float(), -1)
            grad.scatter_add_(1, target_R[rows].unsqueeze(1).where(counts, 0), counts.float().neg())
            grad_RV[rows] = grad.mul_(scale).masked_fill_(~counts, 0)
        return grad_RV, None, None, None, None, None
