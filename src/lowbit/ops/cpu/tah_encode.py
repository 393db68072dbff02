"""`tah_quant_encode` (see `lowbit.codecs.TAHQuant`): measure all tiles, choose their widths, write their codes."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lowbit.ops.cpu.choice import choose, count_flags, write_flags
from lowbit.ops.cpu.floats import FLOAT32, as_arrays, widen, zero_gaps
from lowbit.ops.cpu.jit import get, helper, kernel, put
from lowbit.ops.cpu.operations import (
    add32,
    bits_float,
    float_bits,
    greater,
    greater32,
    key_value,
    lesser,
    lesser32,
    level,
    log2,
    magnitude,
    order_key,
    round_signed,
    weighted_log,
)
from lowbit.ops.cpu.planes import pack, store16
from lowbit.ops.cpu.threads import over_rows
from lowbit.ops.cpu.tiles import (
    HALF,
    KEY_INFINITY,
    LARGEST,
    ONE,
    SMALLEST,
    ZERO,
    are_finite,
    extremes,
    quantize,
    spin,
)
from lowbit.ops.layout import ceil_div, tah_geometry
from lowbit.ops.reference import MID_LIMIT, MID_REACH, MID_UNITS, NAN_MID, ROTATABLE

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
    geo = tah_geometry(
        *x.shape,
        tile=tile,
        high_bits=high_bits,
        low_bits=low_bits,
        low_fraction=low_fraction,
        allocation=allocation,
        pivot=pivot_ratio is not None,
    )
    source, target, at = as_arrays(x), payload.numpy(), geo.layout.offsets
    extents = np.empty(geo.rows * geo.tiles, np.float32)
    mids = np.empty_like(extents)
    keys = np.empty(geo.scopes * geo.per_scope, np.int32)
    flags = np.zeros(ceil_div(len(keys), 8) * 8, np.uint8)
    width = 1 if pivot_ratio is None else 2
    mode = ALLOCATIONS[allocation] if geo.low else NONE
    sizes = (geo.channels, tile, geo.tiles, geo.full)
    zero_gaps(target, geo.layout)

    def measure(start: int, stop: int) -> None:
        _measure(
            *source, *sizes, mode, MID_REACH[width], pivot_ratio or 0.0, tile**-0.5,
            extents, mids, keys, target, at["pivots"], start, stop,
        )  # fmt: skip

    def code(start: int, stop: int) -> None:
        _code(
            *source, *sizes, high_bits, low_bits, allocation == "token", width, tile**-0.5,
            extents, mids, flags, target, at["exponents"], at["scales"], at["mids"], at["pivots"],
            at["codes"], geo.row_bytes, geo.saved, start, stop,
        )  # fmt: skip

    over_rows(measure, geo.rows, x.nbytes)
    if geo.low:
        over_rows(
            lambda start, stop: choose(keys, geo.per_scope, geo.low, flags, start, stop),
            geo.scopes,
            keys.nbytes,
        )
        write_flags(flags, target, at["widths"], len(flags) // 8)
    over_rows(code, geo.rows, x.nbytes)


@kernel
def _measure(
    floats, halves, kind, channels, tile, tiles, full, mode, reach, ratio, norm,
    extents, mids, keys, payload, at_pivots, start, stop,
):  # fmt: skip
    """Half range and middle of every tile (Inf and 0 for one with NaN or Inf), pivots, and the keys for `choose`."""
    line = np.empty(0 if kind == FLOAT32 else channels, np.float32)
    low, high = np.empty(tiles, np.int32), np.empty(tiles, np.int32)
    spun = np.empty(tile, np.float32)
    reach, ratio, norm = np.float32(reach), np.float32(ratio), np.float32(norm)
    for row in range(start, stop):
        x, base = floats, row * channels
        if kind != FLOAT32:
            widen(halves, kind, base, channels, line)
            x, base = line, 0
        for t in range(tiles):
            count = tile if t < full else channels - t * tile
            low[t], high[t] = extremes(x, base + t * tile, count)
        if mode == TOKEN:
            put(keys, row, _token_key(x, base, channels, tile, tiles, low, high))
        first = row * tiles
        for t in range(tiles):
            _set_extent(get(low, t), get(high, t), reach, extents, mids, first + t)
        for t in range(full):
            at = base + t * tile
            if mode == TILE:
                put(keys, row * full + t, _tile_key(x, at, tile, get(low, t), get(high, t)))
            if ratio > ZERO:
                pivot = _find_pivot(x, at, tile, get(low, t), get(high, t), ratio)
                put(payload, at_pivots + first + t, pivot)
                if pivot:
                    spin(x, at, tile, pivot & 127, norm, spun)
                    least, most = extremes(spun, 0, tile)
                    _set_extent(least, most, reach, extents, mids, first + t)
        if ratio > ZERO and full < tiles:
            put(payload, at_pivots + first + full, 0)
        if mode == RANGE:
            for t in range(full):
                put(keys, row * full + t, order_key(get(extents, first + t)))


@helper
def _set_extent(low, high, reach, extents, mids, i):
    least = greater(key_value(low), -LARGEST)
    most = lesser(key_value(high), LARGEST)
    half = most * HALF - least * HALF
    mid = most * HALF + least * HALF
    extent = greater(half, magnitude(mid) / reach)
    finite = are_finite(low, high)
    put(extents, i, extent if finite else INFINITY)
    put(mids, i, mid if finite else ZERO)


@helper
def _find_pivot(x, base, tile, low, high, ratio):
    """128 + position of the tile's pivot, or 0."""
    least, most = key_value(low), key_value(high)
    first, other = greater(most, -least), lesser(most, -least)
    # The other end of the range is a second magnitude already: most tiles are decided by it.
    if not (are_finite(low, high) and ZERO < first < ROTATABLE) or other * ratio > first:
        return 0
    top, second, equal = float_bits(first), np.int32(0), np.int32(0)
    for j in range(tile):
        a = float_bits(magnitude(get(x, base + j)))
        equal = add32(equal, a == top)
        second = greater32(second, a if a < top else 0)
    if equal > 1 or not first >= bits_float(second) * ratio:
        return 0
    position = 0
    while magnitude(get(x, base + position)) != first:
        position += 1
    return 128 + position


@helper
def _tile_key(x, base, count, low, high):
    if not are_finite(low, high):
        return KEY_INFINITY
    scale = _entropy_scale(greater(key_value(high), -key_value(low)))
    total, terms = _entropy_sums(x, base, count, scale)
    return np.int64(order_key(_entropy(total, terms)))


@helper
def _token_key(x, base, channels, tile, tiles, low, high):
    least, most = get(low, 0), get(high, 0)
    for t in range(1, tiles):
        least, most = lesser32(least, get(low, t)), greater32(most, get(high, t))
    if not are_finite(least, most):
        return KEY_INFINITY
    scale = _entropy_scale(greater(key_value(most), -key_value(least)))
    total, terms = 0, 0
    for t in range(tiles):
        count = min(tile, channels - t * tile)
        more, more_terms = _entropy_sums(x, base + t * tile, count, scale)
        total += more
        terms += more_terms
    return np.int64(order_key(_entropy(total, terms)))


@helper
def _entropy_scale(most):
    exponent = min(max(float_bits(most) >> 23, 27), 254)
    return bits_float((127 + 14 + 127 - exponent) << 23)


@helper
def _entropy_sums(x, base, count, scale):
    """Sums of integers below 2^31 for up to 128 elements, so that 32 bits suffice."""
    total, terms = np.int32(0), np.int32(0)
    for j in range(count):
        total = add32(total, level(get(x, base + j), scale))
        terms = add32(terms, weighted_log(get(x, base + j), scale))
    return np.int64(total), np.int64(terms)


@helper
def _entropy(total, terms):
    weight = np.float32(max(total, 1))
    return log2(weight) - np.float32(terms) * np.float32(0.0625) / weight


@kernel
def _code(
    floats, halves, kind, channels, tile, tiles, full, high_bits, low_bits, by_token, width, norm,
    extents, mids, flags, payload, at_exponents, at_scales, at_mids, at_pivots,
    at_codes, row_bytes, saved, start, stop,
):  # fmt: skip
    """Parameters and codes of every tile."""
    line = np.empty(0 if kind == FLOAT32 else channels, np.float32)
    codes, spun = np.empty(tile + 8, np.uint8), np.empty(tile, np.float32)
    octave, bits = np.empty(tiles, np.int32), np.empty(tiles, np.int32)
    step, shift = np.empty(tiles, np.float32), np.empty(tiles, np.float32)
    per_row = 1 if by_token else full
    to = at_codes + start * row_bytes - count_flags(flags, start * per_row) * saved
    norm = np.float32(norm)
    for row in range(start, stop):
        x, base = floats, row * channels
        if kind != FLOAT32:
            widen(halves, kind, base, channels, line)
            x, base = line, 0
        first = row * tiles
        for t in range(tiles):
            low = t < full and get(flags, row if by_token else row * full + t)
            low = get(flags, row) if by_token else low
            put(bits, t, low_bits if low else high_bits)
        exponent = _octaves(extents, first, tiles, bits, octave)
        put(payload, at_exponents + row, exponent)
        top = exponent * 16 + 15
        for t in range(tiles):
            _parameters(
                get(octave, t), top, get(bits, t), get(extents, first + t), get(mids, first + t),
                width, payload, at_scales + first + t, at_mids + width * (first + t), step, shift, t,
            )  # fmt: skip
        for t in range(tiles):
            count = tile if t < full else channels - t * tile
            padded = (count + 7) & -8
            limit = np.float32((1 << get(bits, t)) - 1)
            for j in range(count, padded):
                put(codes, j, 0)
            if get(step, t) == ZERO:
                for j in range(count):
                    put(codes, j, 0)
            elif width == 2 and get(payload, at_pivots + first + t):
                position = get(payload, at_pivots + first + t) & 127
                spin(x, base + t * tile, tile, position, norm, spun)
                quantize(spun, 0, tile, get(step, t), get(shift, t), limit, codes, 0)
            else:
                at = base + t * tile
                quantize(x, at, count, get(step, t), get(shift, t), limit, codes, 0)
            to = pack(codes, 0, padded, get(bits, t), payload, to)


@helper
def _octaves(extents, first, tiles, bits, octave):
    """Each tile's step in sixteenths of an octave (0: all zero, or not finite); the largest one's float32 exponent."""
    largest = np.int32(0)
    for t in range(tiles):
        extent, b = get(extents, first + t), get(bits, t)
        # 2^(1 - bits)
        step = greater(extent * bits_float((128 - b) << 23), SMALLEST)
        rounding = (1 << 18) if b < 6 else (1 << 19) - 1
        n = (float_bits(step) + rounding) >> 19
        n = n if ZERO < extent < INFINITY else 0
        put(octave, t, n)
        largest = greater32(largest, n)
    return np.int64(largest) >> 4


@helper
def _parameters(octave, top, bits, extent, mid, width, payload, at_scale, at_mid, step, shift, t):
    """Write a tile's parameters, and keep its step and shift as they will be read."""
    below = min(max(top - octave, 0), 254)
    n = max(top - below, 16)
    size = bits_float(n << 19)
    cells = np.float32(1 << bits)
    units, limit = (np.float32(64), 127) if width == 1 else (np.float32(256), 32767)
    m = round_signed(mid / size * (units / cells))
    m = lesser(greater(m, -limit), limit)
    m = m if octave > 0 else ZERO
    put(payload, at_scale, below if octave > 0 else 255)
    stored = np.int64(m) if extent < INFINITY else (-128 if width == 1 else -32768)
    if width == 1:
        put(payload, at_mid, stored)
    else:
        store16(payload, at_mid, stored)
    put(step, t, size if octave > 0 else ZERO)
    put(shift, t, (cells - ONE) / np.float32(2) - m * (cells / units))
