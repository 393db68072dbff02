"""`finer`: a format with more bits than 8 an element, for what softmax amplifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from lowbit.codecs import Codec, GroupInt
from lowbit.codecs.sums import Summable

MORE = 4  # bits


@dataclass(frozen=True, kw_only=True)
class WithRemainder(Summable):
    """`GroupInt`, and what it leaves of each element in another one: 12 bits and 0.75 for scales, at 8 and 4 bits.

    A payload is that of `first`, up to a multiple of 16 bytes, and that of `rest`. NaN and Inf: as in `GroupInt`.
    """

    first: GroupInt

    @cached_property
    def rest(self) -> GroupInt:
        """The format of the remainder, which is centred on zero."""
        return GroupInt(bits=MORE, group=self.first.group, symmetric=True)

    def nearest(self) -> WithRemainder:
        return WithRemainder(first=self.first.nearest())

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self._split(shape) + self.rest.nbytes(shape)

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        split = self._split(x.shape)
        self.first.encode(x, out=payload[: self.first.nbytes(x.shape)])
        payload[self.first.nbytes(x.shape) : split] = 0
        wide = x.float()
        remainder = wide - self.first.decode(payload[: self.first.nbytes(x.shape)], shape=x.shape)
        self.rest.encode(remainder, out=payload[split:])

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        y = self.first.decode(payload[: self.first.nbytes(out.shape)], shape=out.shape)
        y += self.rest.decode(payload[self._split(out.shape) :], shape=out.shape)
        out.add_(y) if accumulate else out.copy_(y)

    def _split(self, shape: Sequence[int]) -> int:
        return -(-self.first.nbytes(shape) // 16) * 16


def coarser(codec: Codec) -> Codec:
    """The format with 2 bits fewer, where a remainder follows: 10.75 bits in all."""
    if isinstance(codec, GroupInt) and not codec.symmetric and codec.bits > 4:
        return replace(codec, bits=codec.bits - 2)
    return codec


def finer(codec: Codec) -> Codec:
    """The format with `MORE` more bits; a codec that has no bits to choose: itself."""
    return WithRemainder(first=codec) if isinstance(codec, GroupInt) and not codec.symmetric else codec
