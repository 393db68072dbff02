"""Runs of elements that share a scale (tiles, groups), cut into eight parts, one element of each in the same lane.

A run of n elements, n a multiple of 8, has codes in bit planes (see `lowbit.kernels.layout`): byte j of a plane of p
bits holds elements j, j + w, j + 2 w, ... with w = n p / 8. With v = n / 8, element k v + j is element j of eighth k,
and byte m v + j of the plane holds eighths m, m + p, m + 2 p, ... So eight tensors (runs, v) pack and unpack lane by
lane, whatever the widths, and a lane that holds whole runs needs no other lane. A program for whole tokens has a lane
for each of their tiles, token after token (`lanes`).
"""

import triton
import triton.language as tl

from lowbit.kernels.gpu.numbers import code_of, narrowed, rounded, widened


@triton.jit
def present(k: tl.constexpr, v, keep, count, j, RAGGED: tl.constexpr):
    """Mask of the elements of eighth k that exist."""
    if RAGGED:
        return keep & (k * v + j < count)
    else:
        return keep


@triton.jit
def load(x, at, v, keep, count, j, RAGGED: tl.constexpr):
    """Load eight float32 tensors, with 0 for elements that do not exist.

    Args:
        x: pointer; at: element j of each run, (runs, width); v: length of an eighth; keep: which of `at` exist.
        count: elements of each run, less than 8 v in a ragged one.
    """
    parts = ()
    for k in tl.static_range(8):
        mask = present(k, v, keep, count, j, RAGGED)
        parts = parts + (widened(tl.load(x + at + k * v, mask=mask, other=0.0)),)
    return parts


@triton.jit
def extremes(parts, v, keep, count, j, RAGGED: tl.constexpr):
    """Minimum and maximum of each run, and whether it holds neither NaN nor Inf."""
    low = tl.full(parts[0].shape, float("inf"), tl.float32)
    high = tl.full(parts[0].shape, float("-inf"), tl.float32)
    nan = tl.zeros(parts[0].shape, tl.float32)
    for k in tl.static_range(8):
        x = parts[k]
        nan = tl.fma(x, 0.0, nan)  # 0, or NaN once there is NaN or Inf
        if RAGGED:
            exists = present(k, v, keep, count, j, RAGGED)
            low = tl.minimum(low, tl.where(exists, x, float("inf")))
            high = tl.maximum(high, tl.where(exists, x, float("-inf")))
        else:
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
    if not RAGGED:
        low = tl.where(keep, low, float("inf"))
        high = tl.where(keep, high, float("-inf"))
    finite = tl.sum(nan, axis=1) == 0
    return tl.min(low, axis=1), tl.max(high, axis=1), finite


@triton.jit
def codes_of(parts, inverse, shift, top, v, count, j, RAGGED: tl.constexpr):
    """Codes of eight float32 tensors, 0 for elements that do not exist (see `numbers.code_of`)."""
    codes = ()
    for k in tl.static_range(8):
        code = code_of(parts[k], inverse, shift, top)
        if RAGGED:
            code = tl.where(k * v + j < count, code, 0)
        codes = codes + (code,)
    return codes


@triton.jit
def store_plane(to, codes, v, done, keep, P: tl.constexpr):
    """Write the plane of P bits that has `done` bits of a code below it.

    Args:
        to: pointers to byte j of each run's codes, (runs, width); codes: eight int32 tensors.
    """
    for m in tl.static_range(P):
        byte = (codes[m] >> done) & ((1 << P) - 1)
        for a in tl.static_range(1, 8 // P):
            byte |= ((codes[m + P * a] >> done) & ((1 << P) - 1)) << (P * a)
        tl.store(to + m * v + v * done, byte.to(tl.uint8), mask=keep)


@triton.jit
def store_codes(to, codes, v, bits, keep, WIDTHS: tl.constexpr):
    """Write all planes; `bits` is each run's width, (runs, 1); WIDTHS: all that occur, or-ed."""
    for p in tl.static_range(4):  # planes of 8, 4, 2 and 1 bits; 0xF0 >> p: the widths of those before
        if WIDTHS & (8 >> p):
            store_plane(to, codes, v, bits & (0xF0 >> p), keep & ((bits & (8 >> p)) > 0), 8 >> p)


@triton.jit
def add_plane(codes, at, v, done, keep, P: tl.constexpr):
    """Add the bits of one more plane to the codes."""
    plane = ()
    for m in tl.static_range(P):
        byte = tl.load(at + m * v + v * done, mask=keep, other=0)
        plane = plane + (byte.to(tl.int32),)
    added = ()
    for k in tl.static_range(8):
        field = (plane[k % P] >> (P * (k // P))) & ((1 << P) - 1)
        added = added + (codes[k] | (field << done),)
    return added


@triton.jit
def load_codes(at, v, bits, keep, WIDTHS: tl.constexpr):
    """Inverse of `store_codes`: eight int32 tensors."""
    zeros = tl.zeros(keep.shape, tl.int32)
    codes = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    for p in tl.static_range(4):
        if WIDTHS & (8 >> p):
            codes = add_plane(codes, at, v, bits & (0xF0 >> p), keep & ((bits & (8 >> p)) > 0), 8 >> p)
    return codes


@triton.jit
def store_numbers(y, out, at, v, keep, count, j, RAGGED: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Write eight float32 tensors to `out`, or add them, rounding once (see `lowbit.kernels.exact.store`)."""
    for k in tl.static_range(8):
        mask = present(k, v, keep, count, j, RAGGED)
        value, to = y[k], out + at + k * v
        if ACCUMULATE:
            value = widened(tl.load(to, mask=mask, other=0.0)) + value
        tl.store(to, narrowed(value, out.dtype.element_ty), mask=mask)


@triton.jit
def store(y, out, at, v, keep, count, j, RAGGED: tl.constexpr):
    """Write eight float32 tensors to `out`; beyond float16 they become Inf."""
    for k in tl.static_range(8):
        mask = present(k, v, keep, count, j, RAGGED)
        tl.store(out + at + k * v, rounded(y[k], out.dtype.element_ty), mask=mask)


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
