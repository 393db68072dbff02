"""Tiles, tokens and scopes of a program: flags of the low bits, and positions of codes."""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.codecs.tah_quant.gpu_choice import bitmap, count_before, count_both


@triton.jit
def store_bitmap(
    flags, widths, per_scope, flag_bytes,
    C: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """Write the flags of a program's tiles, which make up a scope."""
    if C % TILE > 0:  # a ragged last tile is not a candidate
        full: tl.constexpr = C // TILE
        candidate = tl.arange(0, NT)
        index = tl.minimum(candidate // full * T + candidate % full, NT - 1)
        flags = tl.where(candidate < per_scope, tl.gather(flags, index, axis=0), 0)
    if NT >= 8:
        byte = tl.arange(0, NT // 8)
        packed = bitmap(flags, NT // 8)
    else:
        byte = tl.arange(0, 1)
        packed = tl.sum(flags << tl.arange(0, NT), axis=0, keep_dims=True).to(tl.uint8)
    scope = tl.program_id(0).to(tl.int64)
    tl.store(widths + scope * flag_bytes + byte, packed, mask=byte < flag_bytes)


@triton.jit
def load_flags(
    widths, first, row, t, exists, length, flag_bytes,
    C: tl.constexpr, TILE: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Load the flags of a program's tiles from their bitmaps."""
    full: tl.constexpr = C // TILE
    if BY_TOKEN:
        token = first + row
        scope, candidate = token // length, token % length
    else:
        scope = tl.program_id(0).to(tl.int64)
        candidate = row * full + t
        exists = exists & (t < full)
    byte = tl.load(widths + scope * flag_bytes + candidate // 8, mask=exists, other=0).to(tl.int32)
    return (byte >> (candidate % 8).to(tl.int32)) & 1


@triton.jit
def checked_flags(
    widths, first, row, t, exists, length, low, low_last, flag_bytes, rows,
    C: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Load the flags of an untrusted payload, `low_before`, and whether each tile's scope is intact.

    A scope is intact if it has the number of flags that the geometry requires. If not, its first candidates are flagged
    instead: with a wrong number of flags, positions of codes could be beyond the payload.
    """
    flags = load_flags(widths, first, row, t, exists, length, flag_bytes, C, TILE, BY_TOKEN)
    full: tl.constexpr = C // TILE
    if BY_TOKEN:
        token = first + row
        scope, last = first // length, (tl.minimum(first + ROWS, rows) - 1) // length
        ahead = first % length
        some, given = count_both(widths + scope * flag_bytes, ahead, length)
        before = scope * low + tl.where(given == low, some, tl.minimum(ahead, low))
        intact = (given == low) | (row < 0)
        while scope < last:
            scope += 1
            _, given = count_both(widths + scope * flag_bytes, 0, length)
            whole = given == low
            intact = tl.where(token // length == scope, whole, intact)
        flags = tl.where(intact, flags, (token % length < low).to(tl.int32))
    else:
        before = low_before(widths, first, length, low, flag_bytes, False)
        given = tl.where(tl.program_id(0) == tl.num_programs(0) - 1, low_last, low)
        intact = (tl.sum(flags, axis=0) == given) | (row < 0)
        chosen = exists & (t < full) & (row * full + t < given)
        flags = tl.where(intact, flags, chosen.to(tl.int32))
    return flags, before, intact


@triton.jit
def low_before(widths, first, length, low, flag_bytes, BY_TOKEN: tl.constexpr):
    """Count the candidates before a program's first token that have the low bits."""
    if BY_TOKEN:
        scope = first // length
        return scope * low + count_before(widths + scope * flag_bytes, first % length)
    else:
        return tl.program_id(0).to(tl.int64) * low


@triton.jit
def code_offsets(
    first, bits, v, before, exists, C: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr,
    HIGH: tl.constexpr, LOW: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Start of each tile's codes in their section: (NT, 1) int64."""
    if C % TILE > 0:
        ragged: tl.constexpr = (C % TILE + 7) // 8
        eighths: tl.constexpr = C // TILE * (TILE // 8) + ragged
        saved: tl.constexpr = (eighths if BY_TOKEN else TILE // 8) * (HIGH - LOW)
        size = tl.where(exists, bits * tl.sum(v, axis=1), 0)
        start = first * (eighths * HIGH) - before * saved
        return (start + (tl.cumsum(size, axis=0) - size))[:, None]
    else:  # in eighths, which shows the compiler their alignment
        size = tl.where(exists, bits, 0)
        saved: tl.constexpr = (T if BY_TOKEN else 1) * (HIGH - LOW)
        start = first * (T * HIGH) - before * saved
        return ((start + (tl.cumsum(size, axis=0) - size)) * (TILE // 8))[:, None]
