"""The layout of TAH-Quant payloads, derived from a tensor's shape and the settings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from lowbit.kernels.layout import Layout, ceil_div

SCOPE_TILES = 256  # tiles among which "range" chooses: a GPU's program holds them in registers


@dataclass(frozen=True)
class TAHGeometry:
    """Sizes of a TAH-Quant payload, derived from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token; tiles: tiles of a token.
        tile, high_bits, low_bits, allocation: as in `lowbit.codecs.TAHQuant`; pivot: whether tiles may be rotated.
        full: tiles of a token that hold `tile` elements (all, or all but a ragged last one).
        scope_rows: consecutive tokens among which `low_bits` are allocated; scopes: number of such scopes.
        per_scope: candidates of a scope; low: number of them that get `low_bits`.
        per_last, low_last: the same for the last scope, which may have fewer tokens.
        flag_bytes: bytes of a scope's bitmap of candidates.
        row_bytes: bytes of the codes of one token, were all its tiles at `high_bits`.
        saved: bytes that one candidate of `low_bits` saves.
        layout: the sections.
    """

    rows: int
    channels: int
    tile: int
    high_bits: int
    low_bits: int
    allocation: str
    pivot: bool
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

    @property
    def mid_bytes(self) -> int:
        """Bytes of a tile's middle."""
        return 2 if self.pivot else 1


def tah_geometry(
    shape: Sequence[int],
    tile: int,
    high_bits: int,
    low_bits: int,
    low_fraction: float,
    allocation: str,
    pivot: float | bool | None,
) -> TAHGeometry:
    """Compute the sizes of a TAH-Quant payload of a tensor (sequences, length, channels).

    The number of candidates at `low_bits` is floor(low_fraction * candidates) in each scope (a sequence's tokens, a
    token's tiles, or the tiles of as many tokens as have up to 256), with 1e-9 added so that 0.2 * 10 gives 2. A ragged
    last tile is never a candidate by itself, because the payload's size must not depend on the choice.

    Args:
        shape: of the tensor. pivot: the `pivot_ratio`, or whether there is one.
    """
    sequences, length, channels = shape
    rows, tiles, full = sequences * length, ceil_div(channels, tile), channels // tile
    at_once = min(rows, max(1, SCOPE_TILES // max(1, full)))
    scope_rows = {"token": length, "tile": 1, "range": at_once}[allocation]
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
        rows, channels, tile, high_bits, low_bits, allocation, bool(pivot), tiles, full, scope_rows, scopes,
        per_scope, low, per_last, low_last, flag_bytes, padded * high_bits // 8, saved, layout,
    )  # fmt: skip


kernel_geometry = functools.lru_cache(tah_geometry)
"""`tah_geometry` with a cache. (Not for codecs, which `torch.compile` traces.)"""
