"""Saves q, k and v of attention in few bits, from which attention runs again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from lowbit.activations.follow import TorchCall, encoded, handles, large_enough, say_once
from lowbit.activations.formats import coarser, finer
from lowbit.activations.functions import first_order, owned
from lowbit.activations.recipes import Recipe, SavedTensors, attach_until_backward, decoded, release
from lowbit.codecs import Codec

_NAMES = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@handles(functional.scaled_dot_product_attention)
def attention(call: TorchCall, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run attention again in backward, from rounded q, k and v.

    So probabilities match the rounded q and k from which gradients are computed. The forward's softmax sums and a
    separately rounded output would not: at 8 bits that caused over half of the error of a small Llama's gradients.
    """
    codec = call.codec("attention")
    if codec is None or not large_enough(query) or not call.saves(query, key, value):
        return NotImplemented
    options = dict(zip(_NAMES, args, strict=False)) | kwargs
    if options.get("dropout_p") and query.device.type != "cpu":
        # Each kernel draws another dropout mask, and PyTorch chooses it by requires_grad, which differs in the rerun.
        say_once("attention with dropout is saved uncompressed on GPUs")
        return NotImplemented
    with call.handled(query, key, value, *args, **kwargs):
        mask = options.pop("attn_mask", None)
        random = torch.get_rng_state() if options.get("dropout_p") else None
        with torch.no_grad():
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
        attach_until_backward(repeated, Recipe(AttentionOutput(repeat), saved))
        return call.returned(repeated)


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


@dataclass(frozen=True)
class AttentionOutput:
    """Rebuilds attention's output from saved q, k, v and mask."""

    repeat: _Repeat

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        """Run attention on the rounded inputs; attention's own backward, which follows, uses the same graph."""
        repeat = self.repeat
        if not repeat.ready:
            repeat.ready.append(repeat.run(saved, (True, True, True, repeat.mask_is_trained)))
            torch.autograd.Variable._execution_engine.queue_callback(repeat.ready.clear)  # pyright: ignore
        return repeat.ready[0][1].detach().to(dtype)


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
        saved = ctx.saved_tensors
        release(ctx)
        return *ctx.repeat.gradients(saved, grad_out, ctx.needs_input_grad[:4]), None, None, None, None, None
