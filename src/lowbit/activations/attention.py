"""Attention's saved tensors in few bits: q, k, v and the output, for whatever kernel PyTorch chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lowbit.activations.follow import Call, encoded, handles, large_enough
from lowbit.activations.functions import first_order
from lowbit.activations.recipes import Itself, Recipe, attach
from lowbit.codecs import GroupInt


@handles(functional.scaled_dot_product_attention)
def attention(call: Call, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention whose kernel reads rounded q, k, v and output in backward."""
    codec = call.codec("attention")
    if codec is None or not large_enough(query) or not call.saves(query, key, value):
        return NotImplemented
    with call.handled(query, key, value, *args, **kwargs):
        saved = _Saved(codec)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            out = call.func(query, key, value, *args, **kwargs)
        return saved.carried(out)


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

    def __init__(self, codec: GroupInt) -> None:
        self.codec = codec
        self.tensors: list[Tensor] = []
        self.given: list[Tensor] | None = None  # in backward
        self.coded: dict[int, tuple[_Place, torch.dtype]] = {}
        self.has_gradient: list[bool] = []

    def pack(self, x: Tensor) -> int:
        self.tensors.append(x.detach())
        self.has_gradient.append(x.requires_grad)
        return len(self.tensors) - 1

    def unpack(self, index: int) -> Tensor:
        assert self.given is not None
        x = self.given[index]
        if index not in self.coded:
            return x
        place, dtype = self.coded[index]
        return place(self.codec.decode(x, shape=(place.shape.numel(),), dtype=dtype))

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
                recipe = Recipe(Itself(torch.Size([x.numel()]), self.codec), (held[index],), weak=True), place
        carried = _Carrier.apply(out, self, *held)
        if recipe is not None:
            flat, place = recipe
            attach(carried, flat.derived(torch.Size([carried.numel()]), place))
        return carried


class _Carrier(torch.autograd.Function):
    """Passes attention's output on; its backward runs before the kernel's, and hands that its saved tensors."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, saved: _Saved, *tensors: Tensor) -> Tensor:
        """`tensors`: what the kernel has saved, coded or not."""
        ctx.saved, ctx.count = saved, len(tensors)
        ctx.save_for_backward(*tensors)
        return out.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        ctx.saved.given = [*ctx.saved_tensors]
        return grad_out, None, *[None] * ctx.count
