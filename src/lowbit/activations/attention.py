"""Saves attention in few bits, fused or written out as products and softmax; it is computed again in backward.

Fused attention runs again from payloads of q, k and v. Written out, each product saves payloads of its two factors.
What follows it (a factor, a mask, tanh, softmax, dropout) has a recipe derived from the product's, so softmax and tanh
save the same payloads again, and only dropout keeps tensors of the size tokens x tokens. All is computed again in the
dtypes of the forward pass, in which a mask with the lowest float32 stays finite.
"""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from lowbit.activations.follow import TorchCall, encoded, handles, say_once, source_of
from lowbit.activations.functions import MatmulFunction, OutputFunction, first_order, owned
from lowbit.activations.policy import coarser, finer
from lowbit.activations.recipes import (
    Computed,
    Form,
    Operand,
    Recipe,
    SavedTensors,
    attach,
    attach_until_backward,
    decoded,
    recipe_of,
)
from lowbit.codecs import Codec

_NAMES = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@handles(functional.scaled_dot_product_attention)
def attention(call: TorchCall, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run attention again in backward, from rounded q, k and v.

    So probabilities match the rounded q and k from which gradients are computed. The forward's softmax sums and a
    separately rounded output would not: at 8 bits that caused over half of the error of a small Llama's gradients.
    """
    codec = call.codec("attention")
    if codec is None or not call.saves(query, key, value):
        return NotImplemented
    options = dict(zip(_NAMES, args, strict=False)) | kwargs
    if options.get("dropout_p") and query.device.type != "cpu":
        # Each kernel draws another dropout mask, and PyTorch chooses it by requires_grad, which differs in the rerun.
        say_once("attention with dropout is saved uncompressed on GPUs")
        return NotImplemented
    mask = options.pop("attn_mask", None)
    random = torch.get_rng_state() if options.get("dropout_p") else None
    with torch.no_grad():
        # With a graph, attention would keep its own q, k, v and output.
        out = call.func(query, key, value, mask, **options)
    inputs = (query, key, value)
    autocast = torch.is_autocast_enabled(out.device.type), torch.get_autocast_dtype(out.device.type)
    # Softmax amplifies errors of q and k, so they get more bits than v. If k is smaller than q, as with grouped
    # heads, even more bits cost little.
    codecs = (finer(coarser(codec)), finer(codec if key.numel() < query.numel() else coarser(codec)), codec)
    kinds = [(x.shape, x.dtype) for x in inputs]
    trained = mask is not None and mask.requires_grad
    repeat = _Repeat(call.func, options, codecs, random, autocast, _cur_sdpa_kernel_backends(), kinds, trained)
    payloads = [encoded(c, x) for c, x in zip(codecs, inputs, strict=True)]
    repeated = _Repeated.apply(*inputs, mask, out, repeat, *payloads)
    saved = (*payloads, None if mask is None else mask.detach())
    attach_until_backward(repeated, Recipe(repeat, saved))
    return repeated


@dataclass(frozen=True)
class _Repeat:
    """A call of attention to repeat in backward; `ready` holds its result until the gradients are computed."""

    func: Any
    options: dict[str, Any]
    codecs: Sequence[Codec]
    random: Tensor | None
    autocast: tuple[bool, torch.dtype]
    backends: list[SDPBackend]
    inputs: list[tuple[torch.Size, torch.dtype]]
    mask_is_trained: bool
    ready: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)

    def run(self, saved: SavedTensors, needed: Sequence[bool]) -> tuple[list[Tensor], Tensor]:
        """Run attention on the decoded payloads; return inputs, which require gradients as `needed`, and output."""
        payloads, mask = saved[:3], saved[3]
        leaves = [
            decoded(codec, payload, shape, dtype).requires_grad_(wanted)
            for codec, payload, (shape, dtype), wanted in zip(self.codecs, payloads, self.inputs, needed, strict=False)
            if payload is not None
        ]
        leaves += [] if mask is None else [mask.detach().requires_grad_(needed[3])]
        device = leaves[0].device
        with ExitStack() as stack:
            if self.random is not None:  # so that the same elements drop out
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.set_rng_state(self.random)
            enabled, dtype = self.autocast  # uncached: casts of q, k and v would be kept until an outer autocast ends
            stack.enter_context(torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(sdpa_kernel(self.backends))  # another kernel would drop other elements
            stack.enter_context(torch.enable_grad())
            return leaves, self.func(*leaves, **self.options)

    def gradients(self, saved: SavedTensors, grad_out: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        try:
            leaves, out = self.ready.pop()
        except IndexError:  # it was not rebuilt yet, or another pass of the same graph has taken it
            leaves, out = self.run(saved, needed)
        wanted = [x for x, is_needed in zip(leaves, needed, strict=False) if is_needed]
        gradients = iter(torch.autograd.grad(out, wanted, grad_out))
        return [next(gradients) if is_needed else None for is_needed in needed]

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        """Attention's output; attention's own backward, which follows, uses the same graph."""
        if not self.ready:
            self.ready.append(self.run(saved, (True, True, True, self.mask_is_trained)))
            torch.autograd.Variable._execution_engine.queue_callback(self.ready.clear)  # pyright: ignore
        return self.ready[0][1].detach().to(dtype)


class _Repeated(torch.autograd.Function):
    """Attention that is computed again in backward; saves payloads of q, k and v, and the unchanged mask."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, repeat: _Repeat,
        *payloads: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.repeat, ctx.present = repeat, (True, True, True, mask is not None)
        ctx.save_for_backward(*payloads, mask)
        return owned(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        return (
            *ctx.repeat.gradients(ctx.saved_tensors, grad_out, ctx.needs_input_grad[:4]),
            None,
            None,
            None,
            None,
            None,
        )


def product_of_two(
    call: TorchCall, x: Any, y: Any, given: Sequence[Any], added: Tensor | None = None, beta: float = 1,
    alpha: float = 1,
) -> Any:  # fmt: skip
    """beta * added + alpha * x @ y of two activations, both with two dimensions or more; saves a payload of each."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or min(x.dim(), y.dim()) < 2:
        return NotImplemented
    # A parameter, which PyTorch saves by reference: coding it would take more memory.
    if any(t.is_leaf and t.requires_grad for t in (x, y)):
        return NotImplemented
    if added is not None and (added.requires_grad or added.is_inference()):
        return NotImplemented
    # PyTorch saves a factor only if the other one's gradient is needed; a constant factor is kept by reference.
    if not (x.requires_grad and y.requires_grad and call.saves(x, y) and call.saves(y)):
        return NotImplemented
    codec = call.codec("attention")
    kwargs = {} if added is None else {"beta": beta, "alpha": alpha}
    with torch.no_grad():
        out = call.func(*(t.detach() for t in given), **kwargs)
    # Softmax amplifies errors of q and k, so they get more bits than v.
    fine = codec if codec is None or any(map(_is_softmax, (x, y))) else finer(codec)
    found = [(t, *source_of(t, fine, out.dtype)) for t in (x, y)]
    parts = tuple(Operand(rebuilt, t.shape, len(saved), out.dtype) for t, rebuilt, saved in found)
    saved = (*found[0][2], *found[1][2])
    rest = () if added is None or not beta else (added.detach(),)  # unused if beta is 0, and may be overwritten
    form = Computed(parts, functools.partial(_product, beta, alpha))
    out = MatmulFunction.apply(x, y, out, parts, alpha, saved)
    attach_until_backward(out, Recipe(form, (*saved, *rest)))
    return out


def _product(beta: float, alpha: float, x: Tensor, y: Tensor, *added: Tensor) -> Tensor:
    """A product with the factors of `torch.baddbmm`."""
    if not added and alpha == 1:
        return x @ y
    shift = added[0].to(x.dtype) if added else x.new_empty(1)
    return torch.baddbmm(shift, x, y, beta=beta, alpha=alpha)


@handles(torch.baddbmm, Tensor.baddbmm)
def baddbmm(
    call: TorchCall, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """A product of two activations, added to a tensor without a gradient."""
    return product_of_two(call, batch1, batch2, (input, batch1, batch2), input, beta, alpha)


def _recipe_of(x: Any) -> Recipe | None:
    """The recipe of `x` if it is derived from a product of two activations."""
    recipe = recipe_of(x) if isinstance(x, Tensor) and x.requires_grad else None
    is_ours = recipe is not None and isinstance(recipe.form, Computed) and recipe.form.parts[0].dtype is not None
    return recipe if is_ours else None


def _is_softmax(x: Tensor) -> bool:
    """Whether a tensor is softmax's output, perhaps after dropout."""
    recipe = recipe_of(x)
    form: Form | None = None if recipe is None else recipe.form
    while isinstance(form, Computed) and form.parts[0].dtype is None:
        form = form.parts[0].rebuilt.form
    return isinstance(form, Computed) and getattr(form.function, "func", None) is torch.softmax


_IN_PLACE = {
    Tensor.__imul__: torch.mul, Tensor.mul_: torch.mul, Tensor.__itruediv__: torch.div, Tensor.div_: torch.div,
    Tensor.__iadd__: torch.add, Tensor.add_: torch.add, Tensor.masked_fill_: torch.masked_fill,
}  # fmt: skip


@handles(
    torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.__truediv__, torch.add, Tensor.add,
    Tensor.__add__, Tensor.__radd__, Tensor.masked_fill, torch.masked_fill, *_IN_PLACE,
)  # fmt: skip
def elementwise(call: TorchCall, input: Any, other: Any, *value: Any) -> Any:
    """A factor, a mask or a bias of scores, for which PyTorch saves nothing."""
    if (recipe := _recipe_of(input)) is None:
        if call.func not in (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__) or not _recipe_of(other):
            return NotImplemented
        input, other = other, input
        recipe = _recipe_of(input)
    tensors = [t for t in (other, *value) if isinstance(t, Tensor)]
    # A tensor as large as the scores would be kept only for the recipe: let softmax save its output instead. Inference
    # tensors cannot be saved at all.
    if recipe is None or any(t.requires_grad or t.is_inference() or 2 * t.numel() > input.numel() for t in tensors):
        return NotImplemented
    places = tuple(_GIVEN if isinstance(arg, Tensor) else arg for arg in (other, *value))
    function = functools.partial(_with, _IN_PLACE.get(call.func, call.func), places)
    before = recipe.derived(input.shape, function, *tensors, dtype=input.dtype)
    out = call.func(input, other, *value)
    if isinstance(out, Tensor) and out.shape == input.shape:
        attach(out, before)
    return out


def _with(function: Any, places: tuple[Any, ...], x: Tensor, *tensors: Tensor) -> Tensor:
    """A function of x and other arguments, with `tensors` in the places of those that are tensors."""
    given = iter(tensors)
    return function(x, *(next(given) if arg is _GIVEN else arg for arg in places))


_GIVEN = object()


@handles(torch.tanh, Tensor.tanh, functional.tanh)
def tanh(call: TorchCall, input: Tensor) -> Any:
    """The soft cap of scores, which is computed again in backward."""
    return _output(call, input, {}, torch.tanh, torch.ops.aten.tanh_backward)


@handles(functional.softmax)
def functional_softmax(
    call: TorchCall, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    """Softmax of scores, which is computed again in backward."""
    return NotImplemented if dim is None else softmax(call, input, dim, dtype)


@handles(torch.softmax, Tensor.softmax)
def softmax(call: TorchCall, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Handle `torch.softmax` and the method like `functional.softmax`."""

    def gradient(grad_out: Tensor, out: Tensor) -> Tensor:
        return torch.ops.aten._softmax_backward_data(grad_out, out, dim, out.dtype)

    return _output(call, input, {"dim": dim, "dtype": dtype}, torch.softmax, gradient)


def _output(call: TorchCall, x: Tensor, kwargs: dict[str, Any], function: Any, gradient: Any) -> Any:
    """Handle a function of scores whose gradient needs only its output."""
    recipe = _recipe_of(x)
    if recipe is None or not call.saves(x):
        return NotImplemented
    with torch.no_grad():
        out = call.func(x.detach(), **kwargs)
    if kwargs:  # autocast may have chosen another dtype
        function = functools.partial(function, **kwargs | {"dtype": out.dtype})
    own = recipe.derived(x.shape, function, dtype=x.dtype)
    own.rebuilt.add_user()
    out = OutputFunction.apply(x, out, own.rebuilt, gradient, own.saved())
    attach_until_backward(out, own)
    return out
