"""Attention's saved tensors in few bits: q, k, v and the output, for whatever kernel PyTorch chooses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lowbit.activations.follow import Call, encoded, handles, large_enough
from lowbit.activations.functions import first_order, owned
from lowbit.activations.layers import attach_until_backward
from lowbit.activations.recipes import Itself, Recipe, release
from lowbit.codecs import Codec

_MOST = 1.5  # times the bytes of q, k and v: more is saved only if no fused kernel takes the arguments


@handles(functional.scaled_dot_product_attention)
def attention(call: Call, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention whose kernel reads rounded q, k, v and output in backward."""
    codec = call.codec("attention")
    if codec is None or not large_enough(query) or not call.saves(query, key, value):
        return NotImplemented
    with call.handled(query, key, value, *args, **kwargs):
        dropout = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
        random = _random_state(query) if dropout else None
        saved = _Saved(codec)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            out = call.func(query, key, value, *args, **kwargs)
        masks = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
        if saved.bytes_without(out, *masks) <= _MOST * (query.nbytes + key.nbytes + value.nbytes):
            return call.returned(saved.carried(out))
        # No fused kernel takes these arguments, so probabilities were saved: repeat them in backward instead.
        if any(x.requires_grad for x in masks):
            call.left("a mask that is trained")
            return saved.carried(out)
        del saved
        inputs = query, key, value
        autocast = torch.is_autocast_enabled(out.device.type), torch.get_autocast_dtype(out.device.type)
        repeat = _Repeat(call.func, args, kwargs, codec, random, autocast, [(x.shape, x.dtype) for x in inputs])
        repeated = _Repeated.apply(*inputs, out.detach(), repeat, *(encoded(codec, x) for x in inputs))
        return call.returned(repeated)


def _random_state(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


@dataclass(frozen=True)
class _Repeat:
    """How attention is computed again."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    codec: Codec
    random: Tensor | None
    autocast: tuple[bool, torch.dtype]
    inputs: list[tuple[torch.Size, torch.dtype]]

    def gradients(self, payloads: Sequence[Tensor], grad_out: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of q, k and v where they are needed, at what the payloads decode to."""
        device = grad_out.device
        decoded = [
            self.codec.decode(payload, shape=shape, dtype=dtype).requires_grad_(wanted)
            for payload, (shape, dtype), wanted in zip(payloads, self.inputs, needed, strict=True)
        ]
        with ExitStack() as stack:
            if self.random is not None:  # the same elements drop out
                stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
                (torch.cuda.set_rng_state if device.type == "cuda" else torch.set_rng_state)(self.random)
            stack.enter_context(torch.autocast(device.type, dtype=self.autocast[1], enabled=self.autocast[0]))
            stack.enter_context(torch.enable_grad())
            out = self.func(*decoded, *self.args, **self.kwargs)
        gradients = iter(torch.autograd.grad(out, [x for x in decoded if x.requires_grad], grad_out))
        return [next(gradients) if wanted else None for wanted in needed]


class _Repeated(torch.autograd.Function):
    """Attention that is computed again in backward; saves payloads of q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor, repeat: _Repeat, *payloads: Tensor
    ) -> Tensor:  # fmt: skip
        """`out`: the result."""
        ctx.repeat = repeat
        ctx.save_for_backward(*payloads)
        return owned(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[:3]
        return *ctx.repeat.gradients(ctx.saved_tensors, grad_out, needed), None, None, None, None, None


class _Place:
    """The order of a tensor's elements in memory, where it has no gaps; otherwise that of its dimensions."""

    def __init__(self, x: Tensor) -> None:
        order = sorted(range(x.dim()), key=lambda i: (-x.stride(i), i))
        if not x.permute(order).is_contiguous():
            order = [*range(x.dim())]
        self.order, self.shape = order, torch.Size(x.shape[i] for i in order)

    def flat(self, x: Tensor) -> Tensor:
        """The elements in this order."""
        return x.permute(self.order).reshape(-1)

    def __call__(self, flat: Tensor) -> Tensor:
        """The tensor of these elements."""
        return flat.view(self.shape).permute([self.order.index(i) for i in range(len(self.order))])


class _Saved:
    """What a kernel saves; `_Carrier` holds it, so that PyTorch's checks, hooks and checkpointing see payloads."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.tensors: list[Tensor] = []
        self.given: list[Tensor | None] = []  # in backward, until they are read
        self.coded: dict[int, tuple[_Place, torch.dtype]] = {}
        self.has_gradient: list[bool] = []

    def pack(self, x: Tensor) -> int:
        self.tensors.append(x.detach())
        self.has_gradient.append(x.requires_grad)
        return len(self.tensors) - 1

    def unpack(self, index: int) -> Tensor:
        x = self.given[index] if self.given else None
        if x is None:
            raise RuntimeError("what attention saves can be read in backward only")
        self.given[index] = None  # the graph may live on
        if index not in self.coded:
            return x
        place, dtype = self.coded[index]
        return place(self.codec.decode(x, shape=(place.shape.numel(),), dtype=dtype))

    def bytes_without(self, *known: Tensor) -> int:
        """Bytes that the kernel saves beside these: of its inputs, or of casts of these, and of statistics."""
        own = {x.untyped_storage()._cdata for x in known}
        others = {x.untyped_storage()._cdata: x.nbytes for x in self.tensors}
        return sum(size for key, size in others.items() if key not in own)

    def carried(self, out: Tensor) -> Tensor:
        """The output, whose node holds payloads of it and of the inputs; statistics and masks are held as they are."""
        payloads: dict[Any, tuple[Tensor, _Place]] = {}
        held, self.tensors = self.tensors, []
        recipe = None
        for index, x in enumerate(held):
            is_out = x.data_ptr() == out.data_ptr()
            if not (self.has_gradient[index] or is_out) or not x.is_floating_point() or 0 in x.stride():
                continue
            key = (x.data_ptr(), x.shape, x.stride())
            if key not in payloads:
                place = _Place(x)
                payloads[key] = encoded(self.codec, place.flat(x)), place
            held[index], place = payloads[key]
            self.coded[index] = place, x.dtype
            if is_out and x.shape == out.shape:
                recipe = Recipe(Itself(torch.Size([x.numel()]), self.codec), (held[index],)), place
        carried = _Carrier.apply(out, self, *held)
        if recipe is not None:
            flat, place = recipe
            attach_until_backward(carried, flat.derived(torch.Size([carried.numel()]), place))
        return carried


class _Carrier(torch.autograd.Function):
    """Passes attention's output on; its backward runs before the kernel's, and hands that its saved tensors."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, saved: _Saved, *tensors: Tensor) -> Tensor:
        """`tensors`: what the kernel has saved, coded or not."""
        ctx.saved, ctx.count = saved, len(tensors)
        ctx.save_for_backward(*tensors)
        return owned(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        ctx.saved.given = [*ctx.saved_tensors]
        release(ctx)
        return grad_out, None, *[None] * ctx.count
