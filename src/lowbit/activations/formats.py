"""Formats for tensors that need more than 8 bits in groups: `WithRemainder` has more bits, `WithRows` exact tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.codecs import Codec, GroupInt
from lowbit.codecs.base import Summable
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.kernels.layout import Layout, ceil_div, zero_gaps

MORE = 4
"""Bits of the remainder."""
EVERY = 128
"""One token in this many is kept exactly."""
LEAST = 16
"""Tensors with fewer tokens keep none exactly."""
FAR = 8.0
"""A token is an outlier if its norm is at least this many times the tensor's median."""


@dataclass(frozen=True, kw_only=True)
class WithRemainder(Summable):
    """`GroupInt`, and a second one of the remainders: with 8 and 4 bits 12 bits per element, and 0.75 for scales.

    A payload is that of `first`, padded to a multiple of 16 bytes, and that of `rest`. NaN and Inf: as in `GroupInt`.
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
    """The format with 2 bits fewer if it has a remainder: 10.75 bits in all."""
    if isinstance(codec, GroupInt) and not codec.symmetric and codec.bits > 4:
        return replace(codec, bits=codec.bits - 2)
    return codec


def finer(codec: Codec) -> Codec:
    """The format with `MORE` more bits; a codec without a choice of bits is returned unchanged."""
    return WithRemainder(first=codec) if isinstance(codec, GroupInt) and not codec.symmetric else codec


@dataclass(frozen=True, kw_only=True)
class WithRows(Summable):
    """`inner`, and the tokens (rows of the last dimension) of largest norm in float32: one of every 128, rounded up.

    The tokens are chosen by their norms in each tensor; their number follows from the shape. A tensor of fewer than 16
    tokens keeps none. For a kept token `inner` codes zeros. Sections of a payload, at multiples of 16 bytes, for K kept
    tokens of C channels: `inner`'s payload; K indices in int32; K C float32 values. NaN and Inf: a kept token returns
    them unchanged; others as in `inner`.
    """

    shaped: ClassVar[bool] = True

    inner: GroupInt | WithRemainder

    def nearest(self) -> WithRows:
        return WithRows(inner=self.inner.nearest())

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self._layout(shape).nbytes

    def inner_of(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        return payload[: self.inner.format_nbytes(shape)]

    def kept(self, payload: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Indices (K,) int64 and values (K, C) float32 of the tokens that are kept."""
        layout = self._layout(shape)
        values = layout.section(payload, "values", torch.float32).view(-1, shape[-1])
        return layout.section(payload, "indices", torch.int32).long(), values

    def keep(self, x: Tensor, payload: Tensor) -> None:
        """Write the tokens of largest norm into a payload, and zeros for them into that of `inner`, a `GroupInt`.

        It is for kernels that have coded all tokens. Channels are a multiple of the group (see `is_aligned`).
        """
        assert isinstance(self.inner, GroupInt)
        index_K = self._write(x, payload)
        layout, channels = _sections(self.inner, x.numel()), x.shape[-1]
        zeros = torch.zeros(channels, device=x.device)
        row, whole = _sections(self.inner, channels), self.inner.nearest().encode(zeros)
        for name in layout.sizes:
            part = row.section(whole, name)
            layout.section(payload, name).view(-1, len(part))[index_K] = part
        zero_gaps(payload, self._layout(x.shape))

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        index_K = self._write(x, payload)
        rest = x.clone()
        rest.view(-1, x.shape[-1])[index_K] = 0
        self.inner.encode(rest, out=self.inner_of(payload, x.shape))
        zero_gaps(payload, self._layout(x.shape))

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        self.inner.decode(self.inner_of(payload, out.shape), shape=out.shape, out=out, accumulate=accumulate)
        index_K, values_KC = self.kept(payload, out.shape)
        rows = out.view(-1, out.shape[-1])
        if accumulate:  # for these tokens `inner` has added zeros
            rows[index_K] += values_KC.to(out.dtype)
        else:
            rows[index_K] = values_KC.to(out.dtype)

    def _write(self, x: Tensor, payload: Tensor) -> Tensor:
        layout, rows = self._layout(x.shape), x.view(-1, x.shape[-1])
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
        index_K = norms.topk(count_of(x.shape)).indices
        layout.section(payload, "indices", torch.int32).copy_(index_K)
        layout.section(payload, "values", torch.float32).view(-1, x.shape[-1]).copy_(rows[index_K])
        return index_K

    def _layout(self, shape: Sequence[int]) -> Layout:
        count = count_of(shape)
        return Layout.of(
            inner=self.inner.format_nbytes(shape), indices=4 * count, values=4 * count * (shape[-1] if count else 0)
        )


def is_aligned(inner: GroupInt | WithRemainder, channels: int) -> bool:
    """Whether no group of `inner` holds elements of two tokens."""
    return channels % (inner if isinstance(inner, GroupInt) else inner.first).group == 0


def count_of(shape: Sequence[int]) -> int:
    """Number of tokens of a tensor of this shape that are kept."""
    rows = math.prod(shape[:-1])
    return ceil_div(rows, EVERY) if rows >= LEAST and len(shape) > 1 else 0


def outliers_and_rest(x: Tensor) -> tuple[bool, Tensor]:
    """Return whether any token's norm is `FAR` above the median, and the (tokens, channels) that would not be kept.

    Without outliers, or with NaN, these are all tokens.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    count, norms = count_of(x.shape), torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    if not count or not bool(norms.max() > FAR * norms.median()):
        return False, rows
    rest = torch.ones(len(rows), dtype=torch.bool, device=x.device)
    rest[norms.topk(count).indices] = False
    return True, rows[rest]


def _sections(codec: GroupInt, numel: int) -> Layout:
    return group_int_layout(numel, codec.bits, codec.group, codec.symmetric)
