"""Lanes of programs that process whole tokens, cut into tiles or groups: one lane for each, token after token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lanes(
    rows, C: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr,
    NT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute a program's first token and its tiles.

    Returns:
        The first token; for each tile, (NT,): its token, counted from the first, its position in it, whether it exists;
        for element j of an eighth, (NT, WIDTH) or a shape that broadcasts to it: j, its offset in the tensor, the
        tile's elements, the length of its eighths, and whether the element exists.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    i = tl.arange(0, NT)
    row, t = i // T, i % T
    exists = (row < ROWS) & (first + row < rows)
    j = tl.arange(0, WIDTH)[None, :]
    at = ((first + row) * C + t * TILE)[:, None] + j
    count = tl.full((NT, 1), TILE, tl.int32)
    v = tl.full((1, 1), TILE // 8, tl.int32)
    if C % TILE > 0:
        count = tl.where(t < C // TILE, TILE, C % TILE)[:, None]
        v = (count + 7) // 8
    return first, row, t, exists, j, at, count, v, exists[:, None] & (j < v)


@triton.jit
def row_maximum(value, row, T: tl.constexpr, ROWS: tl.constexpr, NT: tl.constexpr, RP: tl.constexpr):
    """Maximum of each token's values, which must not be negative, repeated for each of its tiles."""
    if ROWS == 1:
        return tl.full((NT,), 0, tl.int32) + tl.max(value, axis=0)
    elif ROWS * T == NT:
        largest = tl.max(tl.reshape(value, (ROWS, T)), axis=1)
        return tl.reshape(tl.broadcast_to(largest[:, None], (ROWS, T)), (NT,))
    else:
        of_row = row[None, :] == tl.arange(0, RP)[:, None]
        largest = tl.max(tl.where(of_row, value[None, :], 0), axis=1)
        return tl.max(tl.where(of_row, largest[:, None], 0), axis=0)


@triton.jit
def step_of(below, exponent):
    """Bits of float32 steps (see `lowbit.kernels.exact.octave_steps`)."""
    octave = tl.maximum(exponent * 16 + 15 - below, 16)
    return tl.where(below == 255, 0, octave << 19)
