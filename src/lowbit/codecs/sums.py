"""Codecs whose payloads can be summed, for collectives and stored gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.codecs.checks import check_float, check_payload


@dataclass(frozen=True, kw_only=True)
class Summable(Codec):
    """A stateless codec whose payloads can be added to and summed.

    In a sum over ranks, `part(r)` is the codec of rank r's tensor, and `whole()` that of the sum. Both are this codec
    itself, unless the format distinguishes ranks, as `FeatureInt` does.

    Attributes:
        shaped: whether the format depends on the tensor's shape: then it cannot code flat pieces or sums over ranks.
        grain: elements that must stay together when a tensor is cut, such as the features of a token; 1: none.
        unit: a payload can be cut at multiples of this many elements (`copy_units`); 0: it cannot.
        ranks: number of ranks whose tensors it can code in a sum; None: any number.
    """

    shaped: ClassVar[bool] = False

    @property
    def grain(self) -> int:
        return 1

    @property
    def unit(self) -> int:
        return 0

    @property
    def ranks(self) -> int | None:
        return None

    def part(self, rank: int) -> Self:
        """Return the codec of the tensor that a rank adds to a sum."""
        return self

    def whole(self) -> Self:
        """Return the codec of a sum over all ranks."""
        return self

    def nearest(self) -> Self:
        """Return the same codec, rounding to nearest."""
        return self

    def identity(self) -> str:
        """Return what ranks compare before a sum: the same for all parts of a codec."""
        return f"{self} [{self.fingerprint()}]"

    def layer(self) -> str:
        """Return a name that distinguishes codecs with the same `identity`; empty if there is only one."""
        return ""

    def sections(self, numel: int) -> list[tuple[int, int]]:
        """Return first byte and length in bytes of each section of a payload, if there is a `unit`.

        In a section each unit of elements has equally many bytes; a shorter last unit has the first of them.

        Raises:
            TypeError: the format has no `unit`.
        """
        raise TypeError(f"codec is {self}; allowed: one whose payloads can be cut into parts, such as BlockFloat8()")

    def copy_units(
        self, source: Tensor, start: int, target: Tensor, at: int, count: int, *, numel: Sequence[int]
    ) -> None:
        """Copy encoded elements from a payload to another.

        Args:
            source, target: payloads in the format, not plain numbers.
            start, at: the first element in each, multiples of `unit`. count: of elements; what follows in the last unit
                is padding.
            numel: elements of each payload.
        """
        of_both = zip(*(self.sections(n) for n in (*numel, self.unit, count)), strict=True)
        for (from_byte, _), (to_byte, _), (_, width), (_, size) in of_both:
            part = source[from_byte + start // self.unit * width :][:size]
            target[to_byte + at // self.unit * width :][:size].copy_(part)

    def add(self, payload: Tensor, x: Tensor) -> Tensor:
        """Add a tensor to the one in a payload: decode, add in float32, code again.

        Args:
            payload: uint8, `nbytes(x.shape)` long, contiguous; changed in place.
            x: float32, bfloat16 or float16, any shape and strides; not changed.

        Returns:
            The payload.

        Raises:
            TypeError: `x` is not a tensor of one of these dtypes.
            ValueError: a payload of another length, dtype or device.
        """
        check_float("x", x)
        check_payload("payload", payload, self.nbytes(x.shape), x.device)
        if x.numel():
            target = payload.contiguous()
            add = partial(Summable._add, self) if self._sends_plain(x.shape) else self._add
            add(target, x.detach().contiguous())
            if target is not payload:
                payload.copy_(target)
        return payload

    def sum(
        self, payloads: Iterable[Tensor], *, out: Tensor, divisor: int = 1, scratch: Tensor | None = None
    ) -> Tensor:
        """Sum the payloads of all ranks: decode, sum in float32 in the order of the ranks, divide, round once.

        Args:
            payloads: of rank 0, 1, ..., each made by its `part(rank).encode`; taken one after the other.
            out: tensor to overwrite: float32, bfloat16 or float16, contiguous; its shape is that of what was coded.
            divisor: what the sum is divided by.
            scratch: float32, contiguous, as many elements as `out`: partial sums may go there; allocated if omitted.

        Returns:
            `out`.

        Raises:
            TypeError: a dtype of `out` that is not allowed.
            ValueError: an `out` or `scratch` that is not contiguous, or payloads of another number or length.
        """
        check_float("out", out)
        if not out.is_contiguous() or (scratch is not None and not scratch.is_contiguous()):
            raise ValueError("out or scratch is not contiguous; allowed: contiguous tensors")
        if out.numel():
            add_up = partial(Summable._sum, self) if self._sends_plain(out.shape) else self._sum
            add_up(payloads, out, divisor, scratch)
        return out

    def _add(self, payload: Tensor, x: Tensor) -> None:
        """Implement `add` for a contiguous tensor; formats override it to avoid a float32 copy."""
        total = x.float() if x.dtype != torch.float32 else x.clone()
        self.decode(payload, shape=x.shape, out=total, accumulate=True)
        self.encode(total, out=payload)

    def _sum(self, payloads: Iterable[Tensor], out: Tensor, divisor: int, scratch: Tensor | None) -> None:
        """Implement `sum` for a tensor that is not empty; formats override it to avoid a float32 copy."""
        total = out if out.dtype == torch.float32 else scratch
        if total is None:
            total = torch.empty(out.shape, device=out.device)
        total = total.view(out.shape)
        for rank, payload in enumerate(payloads):
            self.part(rank).decode(payload, shape=out.shape, out=total, accumulate=rank > 0)
        if divisor > 1:
            total.div_(total.new_full((), divisor))  # CUDA multiplies by the inverse of a number
        if total is not out:
            out.copy_(total)
