"""Named sections of a payload: where in the bytes on the wire each part of a format lies.

A payload is one contiguous `uint8` tensor without a header: peers agree on the format before the first byte, so
sizes follow from the shape alone. Sections start at multiples of `ALIGNMENT` bytes, so that kernels may read them in
vectors; everything is little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
SCOPE_TILES = 256  # tiles among which "range" chooses: a GPU's program holds them in registers


@dataclass(frozen=True)
class Layout:
    """Sections of one payload, in the order in which they lie in memory.

    Attributes:
        offsets: first byte of each section, by name.
        sizes: length of each section in bytes, by name, without the padding that aligns the next one.
        nbytes: length of the whole payload.
    """

    offsets: dict[str, int]
    sizes: dict[str, int]
    nbytes: int

    @staticmethod
    def of(**sizes: int) -> Layout:
        """Lay sections of the given sizes (bytes) one after the other; a section of 0 bytes costs nothing."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT if size else end
            offsets[name], end = start, start + size
        return Layout(offsets, dict(sizes), end)

    def section(self, payload: Tensor, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The section `name` of `payload` as a 1-D view of `dtype`."""
        start = self.offsets[name]
        return payload[start : start + self.sizes[name]].view(dtype)


def ceil_div(a: int, b: int) -> int:
    """Integer division rounded up."""
    return -(-a // b)


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits; `count` is rounded up to a multiple of 8."""
    return ceil_div(count, 8) * bits


def group_int_layout(numel: int, bits: int, group: int, symmetric: bool) -> Layout:
    """Payload of `group_int_encode` (see `lowbit.codecs.GroupInt` for the meaning of the sections)."""
    groups = ceil_div(numel, group)
    return Layout.of(
        scales=2 * groups,
        mids=0 if symmetric else 2 * groups,
        codes=packed_nbytes(numel, bits),
    )


@dataclass(frozen=True)
class TAHGeometry:
    """Everything about a TAH-Quant payload that follows from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token; tiles: tiles of a token.
        full: tiles of a token that hold `tile` elements (all, or all but a ragged last one).
        scope_rows: consecutive tokens among which `low_bits` are given out; scopes: how many such scopes there are.
        per_scope: candidates of a scope; low: how many of them get `low_bits`.
        per_last, low_last: the same for the last scope, which may have fewer tokens.
        flag_bytes: bytes of a scope's bitmap of candidates.
        row_bytes: bytes of the codes of one token, were all its tiles at `high_bits`.
        saved: bytes that one candidate of `low_bits` saves.
        layout: the sections.
    """

    rows: int
    channels: int
    tile: int
    tiles: int
    full: int
    scope_rows: int
    scopes: int
    per_scope: int
    low: int
    per_last: int
    low_last: int
    flag_bytes: int
    row_bytes: int
    saved: int
    layout: Layout


def tah_geometry(
    sequences: int,
    length: int,
    channels: int,
    *,
    tile: int,
    high_bits: int,
    low_bits: int,
    low_fraction: float,
    allocation: str,
    pivot: bool,
) -> TAHGeometry:
    """Sizes of a TAH-Quant payload for `sequences` x `length` tokens of `channels` elements.

    The number of candidates at `low_bits` is floor(low_fraction * candidates) in each scope (a sequence's tokens, a
    token's tiles, or the tiles of as many tokens as have up to 256), with 1e-9 added so that 0.2 * 10 gives 2. A ragged
    last tile is never a candidate by itself, because the payload's size must not depend on the choice.
    """
    rows, tiles, full = sequences * length, ceil_div(channels, tile), channels // tile
    scope_rows = {
        "token": length,
        "tile": 1,
        "range": min(rows, max(1, SCOPE_TILES // max(1, full))),
    }[allocation]
    scopes = ceil_div(rows, scope_rows)
    in_row = 1 if allocation == "token" else full
    per_scope, per_last = scope_rows * in_row, (rows - (scopes - 1) * scope_rows) * in_row
    share = low_fraction if high_bits > low_bits else 0.0
    low, low_last = int(share * per_scope + 1e-9), int(share * per_last + 1e-9)
    flag_bytes = ceil_div(per_scope, 8) if low else 0
    padded = full * tile + ceil_div(channels - full * tile, 8) * 8
    saved = (padded if allocation == "token" else tile) * (high_bits - low_bits) // 8
    layout = Layout.of(
        exponents=rows,
        scales=rows * tiles,
        mids=rows * tiles * (2 if pivot else 1),
        pivots=rows * tiles if pivot else 0,
        widths=scopes * flag_bytes,
        codes=rows * padded * high_bits // 8 - ((scopes - 1) * low + low_last) * saved,
    )
    return TAHGeometry(
        rows=rows,
        channels=channels,
        tile=tile,
        tiles=tiles,
        full=full,
        scope_rows=scope_rows,
        scopes=scopes,
        per_scope=per_scope,
        low=low,
        per_last=per_last,
        low_last=low_last,
        flag_bytes=flag_bytes,
        row_bytes=padded * high_bits // 8,
        saved=saved,
        layout=layout,
    )


@dataclass(frozen=True)
class SubspaceGeometry:
    """Everything about a payload of `lowbit.codecs.SubspaceQuant` that follows from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token.
        group: elements that share a step; groups: of a token, a ragged last one included.
        renewed: directions that travel with a message.
        row_bytes: bytes of a token's codes.
        layout: the sections.
    """

    rows: int
    channels: int
    group: int
    groups: int
    renewed: int
    row_bytes: int
    layout: Layout


def renewals(rows: int, rank: int, refresh: int) -> int:
    """Directions that travel with a message of `rows` tokens, which cannot tell of more directions than they are."""
    return min(rows, ceil_div(rank, refresh))


def subspace_geometry(rows: int, channels: int, rank: int, bits: int, group: int, refresh: int) -> SubspaceGeometry:
    """Sizes of the payload of `rows` tokens of `channels` elements."""
    groups, ragged = ceil_div(channels, group), channels % group
    row_bytes = (channels // group * group + ceil_div(ragged, 8) * 8) * bits // 8
    renewed = renewals(rows, rank, refresh)
    layout = Layout.of(
        header=16,
        slots=2 * renewed,
        lengths=4 * renewed,
        directions=renewed * channels,
        units=2 * rank,
        factors=2 * rows,
        coefficients=rows * rank,
        exponents=rows,
        steps=rows * groups,
        codes=rows * row_bytes,
    )
    return SubspaceGeometry(rows, channels, group, groups, renewed, row_bytes, layout)
