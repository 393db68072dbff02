"""`tah_quant_encode` (see `lowbit.codecs.TAHQuant`): measure all tiles, choose their widths, write their codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.ops.cpu.choice import choose, count_flags, write_flags
from lowbit.ops.cpu.entropy import put_tile_keys, put_token_key
from lowbit.ops.cpu.jit import helper, kernel
from lowbit.ops.cpu.lines import FLOAT32, KINDS, geometry, sections, widen, zero_gaps
from lowbit.ops.cpu.memory import (
    get_byte,
    get_float,
    get_int,
    put_byte,
    put_float,
    put_half,
    put_int,
)
from lowbit.ops.cpu.operations import (
    add32,
    bits_float,
    float_bits,
    greater,
    greater32,
    key_value,
    lesser,
    magnitude,
    order_key,
    power_of_two,
    round_signed,
    step_below,
    steps_below,
    truncate,
)
from lowbit.ops.cpu.threads import over_rows
from lowbit.ops.cpu.tiles import (
    HALF,
    LARGEST,
    ONE,
    SMALLEST,
    ZERO,
    are_finite,
    encode_run,
    put_extremes,
    spin,
)
from lowbit.ops.layout import ceil_div
from lowbit.ops.reference import MID_REACH, ROTATABLE

RANGE, TILE, TOKEN, NONE = 0, 1, 2, 3
ALLOCATIONS = {"range": RANGE, "tile": TILE, "token": TOKEN}
INFINITY = np.float32(np.inf)


def tah_quant_encode(
    x: Tensor,
    payload: Tensor,
    tile: int,
    high_bits: int,
    low_bits: int,
    low_fraction: float,
    allocation: str,
    pivot_ratio: float | None,
) -> None:
    """The reference's bytes."""
    geo = geometry(
        *x.shape,
        tile=tile,
        high_bits=high_bits,
        low_bits=low_bits,
        low_fraction=low_fraction,
        allocation=allocation,
        pivot=pivot_ratio is not None,
    )
    at = sections(payload, geo.layout)
    zero_gaps(payload, geo.layout)
    candidates = geo.scopes * geo.per_scope
    extents = torch.empty(geo.rows * geo.tiles)
    mids = torch.empty_like(extents)
    keys = torch.empty(candidates, dtype=torch.int32)
    flags = torch.zeros(ceil_div(candidates, 8) * 8, dtype=torch.uint8)
    width = 1 if pivot_ratio is None else 2
    shape = (geo.channels, tile, geo.tiles, geo.full)
    measured = (extents.data_ptr(), mids.data_ptr())
    room = 4 * geo.channels + 20 * geo.tiles + 5 * tile + 8

    def measure(start: int, stop: int) -> None:
        scratch = torch.empty(room, dtype=torch.uint8)
        _measure(
            x.data_ptr(), KINDS[x.dtype], *shape, ALLOCATIONS[allocation] if geo.low else NONE,
            MID_REACH[width], pivot_ratio or 0.0, tile**-0.5, *measured, keys.data_ptr(),
            at["pivots"], scratch.data_ptr(), start, stop,
        )  # fmt: skip

    def code(start: int, stop: int) -> None:
        scratch = torch.empty(room, dtype=torch.uint8)
        _code(
            x.data_ptr(), KINDS[x.dtype], *shape, high_bits, low_bits, allocation == "token",
            width, tile**-0.5, *measured, flags.data_ptr(), at["exponents"], at["scales"],
            at["mids"], at["pivots"], at["codes"], geo.row_bytes, geo.saved,
            scratch.data_ptr(), start, stop,
        )  # fmt: skip

    def select(start: int, stop: int) -> None:
        choose(keys.data_ptr(), geo.per_scope, geo.low, flags.data_ptr(), start, stop)

    over_rows(measure, geo.rows, x.nbytes)
    if geo.low:
        over_rows(select, geo.scopes, keys.nbytes)
        write_flags(flags.data_ptr(), len(flags), at["widths"])
    over_rows(code, geo.rows, x.nbytes)


@kernel
def _measure(
    source, kind, channels, tile, tiles, full, mode, reach, ratio, norm,
    extents, mids, keys, pivots, scratch, start, stop,
) -> None:  # fmt: skip
    """Half range and middle of every tile (Inf and 0 for one with NaN or Inf), pivots, and the keys for `choose`."""
    line, low, high = scratch, scratch + 4 * channels, scratch + 4 * (channels + tiles)
    sums = high + 4 * tiles
    spun = sums + 8 * tiles
    reach, ratio, norm = np.float32(reach), np.float32(ratio), np.float32(norm)
    for row in range(start, stop):
        x, first = source + 4 * row * channels, row * tiles
        if kind != FLOAT32:
            widen(source, kind, row * channels, channels, line)
            x = line
        for t in range(tiles):
            put_extremes(
                x + 4 * t * tile, min(tile, channels - t * tile), low + 4 * t, high + 4 * t
            )
        for t in range(tiles):
            _put_extent(get_int(low, t), get_int(high, t), reach, extents, mids, first + t)
        if mode == TILE:
            put_tile_keys(x, tile, full, low, high, keys + 4 * row * full, sums)
        elif mode == TOKEN:
            put_token_key(x, channels, tile, tiles, low, high, keys + 4 * row, sums)
        if ratio > ZERO:
            for t in range(tiles):
                pivot, at = 0, x + 4 * t * tile
                if t < full:
                    pivot = _find_pivot(at, tile, get_int(low, t), get_int(high, t), ratio)
                put_byte(pivots, first + t, pivot)
                if pivot:
                    spin(at, tile, pivot & 127, norm, spun)
                    put_extremes(spun, tile, low + 4 * t, high + 4 * t)
                    _put_extent(get_int(low, t), get_int(high, t), reach, extents, mids, first + t)
        if mode == RANGE:
            for t in range(full):
                put_int(keys, row * full + t, order_key(get_float(extents, first + t)))


@helper
def _put_extent(low, high, reach, extents, mids, i):
    least = greater(key_value(low), -LARGEST)
    most = lesser(key_value(high), LARGEST)
    half = most * HALF - least * HALF
    mid = most * HALF + least * HALF
    extent = greater(half, magnitude(mid) / reach)
    finite = are_finite(low, high)
    put_float(extents, i, extent if finite else INFINITY)
    put_float(mids, i, mid if finite else ZERO)


@helper
def _find_pivot(x, count, low, high, ratio) -> Any:
    """128 + position of the tile's pivot, or 0."""
    least, most = key_value(low), key_value(high)
    first, other = greater(most, -least), lesser(most, -least)
    # The other end of the range is a second magnitude already: most tiles are decided by it.
    if not (are_finite(low, high) and ZERO < first < ROTATABLE) or other * ratio > first:
        return 0
    top, second, equal = float_bits(first), np.int32(0), np.int32(0)
    for j in range(count):
        a = float_bits(magnitude(get_float(x, j)))
        equal = add32(equal, a == top)
        second = greater32(second, a if a < top else 0)
    if equal > 1 or not first >= bits_float(second) * ratio:
        return 0
    position = 0
    while magnitude(get_float(x, position)) != first:
        position += 1
    return 128 + position


@kernel
def _code(
    source, kind, channels, tile, tiles, full, high_bits, low_bits, by_token, width, norm,
    extents, mids, flags, exponents, scales, middles, pivots, codes_to, row_bytes, saved,
    scratch, start, stop,
) -> None:  # fmt: skip
    """Parameters and codes of every tile."""
    line, octave, bits = scratch, scratch + 4 * channels, scratch + 4 * (channels + tiles)
    step, shift, middle = bits + 4 * tiles, bits + 8 * tiles, bits + 12 * tiles
    spun = middle + 4 * tiles
    codes = spun + 4 * tile
    chosen = start if by_token else start * full
    to = codes_to + start * row_bytes - count_flags(flags, chosen) * saved
    norm = np.float32(norm)
    for row in range(start, stop):
        x, first = source + 4 * row * channels, row * tiles
        if kind != FLOAT32:
            widen(source, kind, row * channels, channels, line)
            x = line
        _set_bits(flags, row, tiles, full, by_token, high_bits, low_bits, bits)
        exponent = _set_octaves(extents + 4 * first, tiles, bits, octave)
        put_byte(exponents, row, exponent)
        _parameters(
            octave, exponent * 16 + 15, bits, extents + 4 * first, mids + 4 * first, tiles, width,
            scales + first, step, shift, middle,
        )  # fmt: skip
        for t in range(tiles):
            if width == 1:
                put_byte(middles, first + t, get_int(middle, t))
            else:
                put_half(middles, first + t, get_int(middle, t))
        for t in range(tiles):
            at, count, b = x + 4 * t * tile, min(tile, channels - t * tile), get_int(bits, t)
            top = power_of_two(b) - ONE if get_int(octave, t) else ZERO
            pivot = get_byte(pivots, first + t) if width == 2 else 0
            if pivot:
                spin(at, tile, pivot & 127, norm, spun)
                at = spun
            size, added = get_float(step, t), get_float(shift, t)
            to = encode_run(at, count, size, added, top, b, to, codes)


@helper
def _set_bits(flags, row, tiles, full, by_token, high_bits, low_bits, bits):
    for t in range(tiles):
        low = t < full and get_byte(flags, row * full + t) > 0
        if by_token:
            low = get_byte(flags, row) > 0
        put_int(bits, t, low_bits if low else high_bits)


@helper
def _set_octaves(extents, tiles, bits, octave) -> Any:
    """Each tile's step in sixteenths of an octave (0: all zero, or not finite); the largest one's float32 exponent."""
    largest = np.int32(0)
    for t in range(tiles):
        extent, b = get_float(extents, t), get_int(bits, t)
        step = greater(extent * power_of_two(1 - b), SMALLEST)
        n = np.int32((float_bits(step) + (1 << 18 if b < 6 else (1 << 19) - 1)) >> 19)
        n = n if ZERO < extent < INFINITY else np.int32(0)
        put_int(octave, t, n)
        largest = greater32(largest, n)
    return np.int64(largest) >> 4


@helper
def _parameters(octave, top, bits, extents, mids, tiles, width, scales, step, shift, middle):
    """Each tile's scale as it travels, its step, what is added to x / step, and its middle as an integer."""
    units, limit = (
        (np.float32(64), np.float32(127)) if width == 1 else (np.float32(256), np.float32(32767))
    )
    nan = -128 if width == 1 else -32768
    for t in range(tiles):
        below = steps_below(get_int(octave, t), top)
        put_byte(scales, t, below)
        size, cells = step_below(below, top), power_of_two(get_int(bits, t))
        empty = size == ZERO
        size = ONE if empty else size
        m = round_signed(get_float(mids, t) / size * (units * power_of_two(-get_int(bits, t))))
        m = lesser(greater(m, -limit), limit)
        m = ZERO if empty else m
        put_float(step, t, size)
        put_float(shift, t, (cells - ONE) * HALF - m * (cells * (ONE / units)))
        put_int(middle, t, truncate(m) if get_float(extents, t) < INFINITY else nan)
