"""Handlers of modules and torch functions: linear layers, norms, activations, products, dropout, views, casts, losses.

Norms and activation functions often consist of many torch functions, so their modules are replaced as a whole.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from lowbit.activations.attention import elementwise, product_of_two
from lowbit.activations.checkpoint import after_linear
from lowbit.activations.follow import Layer, TorchCall, encoded, handles, saved_recipe
from lowbit.activations.functions import (
    ActivationFunction,
    LinearFunction,
    MaskFunction,
    NormFunction,
    ProductFunction,
    anchor_leaf,
    first_order,
)
from lowbit.activations.gated.reference import TABLE
from lowbit.activations.policy import GATES
from lowbit.activations.recipes import (
    Formula,
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
from lowbit.activations.structure import is_observed
from lowbit.codecs import GroupInt
from lowbit.codecs.checks import FLOATS

_FLOAT32_ON_CUDA = (nn.LayerNorm, nn.RMSNorm)  # autocast computes these in float32
_CHUNK = 1 << 22  # elements of float32 logits at a time


@handles(functional.linear)
def linear(
    call: TorchCall, input: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Any:
    """A linear layer, which saves its input unless that has a recipe."""
    if weight.dim() != 2 or input.dim() < 1 or not call.saves(input, weight, bias):
        return NotImplemented
    device = input.device.type
    autocast = torch.is_autocast_enabled(device)
    # PyTorch refuses mixtures of dtypes: leave the error to its own functions.
    if not autocast and len({t.dtype for t in (input, weight, bias) if t is not None}) > 1:
        return NotImplemented
    dtype = torch.get_autocast_dtype(device) if autocast else input.dtype
    # Only the weight's gradient needs the input.
    rebuilt, saved = call.source(input, dtype) if weight.requires_grad else (None, ())
    return after_linear(LinearFunction.apply(input, weight, bias, transposed, dtype, rebuilt, saved))


@handles(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
def mm(call: TorchCall, input: Tensor, mat2: Tensor, **kwargs: Any) -> Any:
    """Handle `mm` and `bmm` like `matmul`; PyTorch names their second argument `mat2`."""
    return matmul(call, input, mat2, **kwargs)


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(call: TorchCall, input: Any, other: Any, **kwargs: Any) -> Any:
    """A linear layer, if the second matrix is a parameter; otherwise a product of two activations."""
    if kwargs or not isinstance(input, Tensor) or input.dim() < 2:
        return NotImplemented
    if not _is_parameter(other):
        return product_of_two(call, input, other, (input, other))
    return linear(call, input, other, transposed=True)


@handles(torch.addmm)
def addmm(call: TorchCall, input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Any:
    """A linear layer with bias, if the second matrix is a parameter: Conv1D of Hugging Face."""
    if kwargs or not _is_parameter(mat2) or input.dim() != 1:
        return NotImplemented
    return linear(call, mat1, mat2, input, transposed=True)


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
    if not same or len(shape) != 1 or not call.saves(x, weight, bias):
        return NotImplemented
    on_cuda = x.is_cuda and torch.is_autocast_enabled("cuda")  # autocast computes norms in float32 there
    return _normalized(call, x, weight, bias, norm, torch.float32 if on_cuda else x.dtype)


def _normalized(
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


_NAMES = {spelling: name for name, activation in TABLE.items() for spelling in activation.spellings}


@handles(*(each for each in _NAMES if each is not functional.gelu))
def silu_or_relu(call: TorchCall, input: Tensor, inplace: bool = False) -> Any:
    """SiLU and ReLU."""
    return NotImplemented if inplace else _activated(call, input, _NAMES[call.func])


@handles(functional.gelu)
def gelu(call: TorchCall, input: Tensor, approximate: str = "none") -> Any:
    """Handle GELU, exact or tanh-approximated."""
    return _activated(call, input, "gelu" if approximate == "none" else "gelu_tanh")


@handles(
    functional.mish, functional.hardswish, functional.elu, functional.selu, functional.celu, functional.relu6,
    functional.leaky_relu,
)  # fmt: skip
def without_kernels(call: TorchCall, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Activation functions that backward calls again, unless they work in place."""
    if any(arg is True for arg in (*args, *kwargs.values())):
        return NotImplemented
    return _activated(call, input, lambda x: call.func(x, *args, **kwargs))


class Followed:
    """An activation function that modules call, which the mode that follows a model sees as one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        """Whether it stands for this function: modules such as Megatron's compare theirs with those they know."""
        return self.function == (other.function if isinstance(other, Followed) else other)

    def __hash__(self) -> int:
        return hash(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        return called(args[0], self.function)


def called(input: Any, function: Callable[..., Any]) -> Any:
    """A function of one tensor."""
    if has_torch_function((input,)):
        return handle_torch_function(called, (input,), input, function)
    return function(input)


@handles(called)
def _called(call: TorchCall, input: Any, function: Callable[..., Any]) -> Any:
    return _activated(call, input, function) if isinstance(input, Tensor) else NotImplemented


def _activated(call: TorchCall, x: Tensor, activation: Formula) -> Any:
    """act(x); attaches a recipe to it for the product or layer that follows."""
    if not call.saves(x):
        return NotImplemented
    codec = call.codec("gate" if activation in GATES else "mlp", x)
    if activation == "relu" and codec is not None:  # an exact mask, and the output in one bit less
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
    saved = room(codec, x)
    form = GatedOutput(x.shape, codec, activation)
    out = ActivationFunction.apply(x, form, saved)
    if recipe_of(x) is None:
        attach(x, Recipe(Itself(x.shape, codec), (saved,), weak=True))
    attach_until_backward(out, Recipe(form, (saved, None)))
    return out


def norm_or_activation(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    """Forward of a norm or an activation function for calls with one tensor; other calls use the module's own."""
    inputs = [*args, *kwargs.values()]
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or is_observed(module):
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
        if not call.saves(input, weight, bias):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            if layer.kind != "norm":
                return _activated(call, input, layer.formula)
            dtype = input.dtype
            if input.is_cuda and torch.is_autocast_enabled("cuda") and isinstance(module, _FLOAT32_ON_CUDA):
                dtype = torch.float32
            elif layer.formula.promotes and weight is not None:
                dtype = torch.promote_types(dtype, weight.dtype)
            return _normalized(call, input, weight, bias, layer.formula, dtype)

    out = on_shards(layer.kind, run, x, **own) if isinstance(x, DTensor) else run(x, **own)
    return layer.own(*args, **kwargs) if out is NotImplemented else out


@handles(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
def product(call: TorchCall, input: Any, other: Any, **kwargs: Any) -> Any:
    """act(gate) * up: payloads of gate and up serve the product, its gradients and the layer that follows."""
    if kwargs or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return NotImplemented if kwargs else elementwise(call, input, other)
    if input.shape != other.shape:
        return NotImplemented
    # Either factor may be the gate.
    for gate, up in ((input, other), (other, input)):
        recipe = recipe_of(gate)
        if recipe is None or not isinstance(recipe.form, GatedOutput) or gate.shape != recipe.form.shape:
            continue
        saved = recipe.saved()
        # A second payload means that this is a product already, not the output of an activation function.
        if saved is None or saved[1] is not None or not up.requires_grad or not call.saves(gate, up):
            continue
        form, second = recipe.form, up
        if form.codec is not None:
            before = itself(up, form.codec)
            second = before[0][0] if before and before[1] == form.codec else encoded(form.codec, up)
            if recipe_of(up) is None:
                attach(up, Recipe(Itself(up.shape, form.codec), (second,), weak=True))
        both = (saved[0], second)
        out = ProductFunction.apply(gate, up, anchor_leaf(up.device), form, both)
        attach_until_backward(out, Recipe(form, both))
        return out
    return NotImplemented


@handles(functional.dropout, torch.dropout)
def dropout(call: TorchCall, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout, which saves a bit for each element."""
    if inplace or not training or not 0 < p < 1 or not call.saves(input):
        return NotImplemented
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
    Tensor.repeat, Tensor.repeat_interleave, torch.repeat_interleave, Tensor.__getitem__,
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
    if not call.saves(input):
        return NotImplemented
    with torch.no_grad():
        narrow = _narrow(input)
        if narrow is None:
            return NotImplemented
        loss = functional.cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)
    # As int64: PyTorch also takes bytes, which nothing else can be indexed with, and of which -100 would be 156.
    return CrossEntropyFunction.apply(input, loss, narrow, target.long(), ignore_index, reduction)


def _narrow(x_RV: Tensor) -> Tensor | None:
    """Return float32 logits in a 16-bit dtype that holds them exactly; None if neither does."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(x_RV[rows].to(dtype).float(), x_RV[rows]) for rows in _chunks(x_RV)):
            return x_RV.to(dtype)
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
