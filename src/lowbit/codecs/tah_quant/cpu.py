"""`TAHQuant` on the CPU: encoding measures all tiles, chooses their widths, and writes their codes."""

import functools
from collections import namedtuple
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.tah_quant.cpu_select import (
    count_flags,
    flag_smallest,
    put_tile_keys,
    put_token_key,
    read_checked_flags,
)
from lowbit.codecs.tah_quant.reference import (
    APART_MOST,
    APART_SHARE,
    APART_SHIFT,
    APART_ZERO,
    LAST_APART,
    MID_SHARE,
    ROTATABLE,
    kernel_geometry,
)
from lowbit.kernels.cpu.jit import helper, kernel, over_rows
from lowbit.kernels.cpu.lines import FLOAT32, KINDS, narrow, sections, widen, zero_gaps
from lowbit.kernels.cpu.memory import (
    get_byte,
    get_float,
    get_half,
    get_int,
    get_word,
    put_byte,
    put_float,
    put_half,
    put_int,
)
from lowbit.kernels.cpu.operations import (
    HALF,
    ONE,
    ZERO,
    add32,
    bits_float,
    byte_of_flags,
    float_bits,
    from_fp16,
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
    to_fp16,
    truncate,
)
from lowbit.kernels.cpu.runs import (
    LARGEST,
    SMALLEST,
    are_finite,
    decode_run,
    encode_run,
    put_extremes,
)

RANGE, TILE, TOKEN, NONE = 0, 1, 2, 3
ALLOCATIONS = {"range": RANGE, "tile": TILE, "token": TOKEN}
INFINITY, NAN, TWO = np.float32(np.inf), np.float32(np.nan), np.float32(2)
NAN_FLOAT16 = 0x7E00


_Message = namedtuple(
    "_Message",
    "source kind rows channels tile tiles full mode high_bits low_bits float16 width share ratio norm scope_rows "
    "scopes low low_last flag_bytes row_bytes saved exponents scales mids pivots widths codes",
)
"""Addresses of a tensor and of the sections of its payload, and the numbers of its `TAHGeometry`."""


def encode(x: Tensor, payload: Tensor, *settings: Any) -> None:
    """Encode; the bytes equal those of `reference.encode`."""
    geo, ratio = kernel_geometry(x.shape, *settings), settings[-1] or 0.0
    at = sections(payload, geo.layout)
    zero_gaps(payload, geo.layout)
    message = _Message(
        x.data_ptr(), KINDS[x.dtype], geo.rows, geo.channels, geo.tile, geo.tiles, geo.full,
        ALLOCATIONS[geo.allocation] if geo.low else NONE, geo.high_bits, geo.low_bits, geo.float16, geo.mid_bytes,
        MID_SHARE[geo.mid_bytes], ratio, geo.tile**-0.5,
        geo.scope_rows, geo.scopes, geo.low, geo.low_last, geo.flag_bytes, geo.row_bytes, geo.saved,
        *(at[name] for name in ("exponents", "scales", "mids", "pivots", "widths", "codes")),
    )  # fmt: skip
    nbytes = 4 * geo.channels + 20 * geo.tiles + 5 * geo.tile + 8

    def notes(rows: int, scopes: int) -> tuple[Tensor, ...]:
        """Allocate half ranges and middles (float16: ranges and minima), keys and flags for tokens and scopes."""
        tiles = torch.empty(2, rows * geo.tiles, dtype=torch.float32)
        keys = torch.empty(scopes * geo.per_scope, dtype=torch.int32)
        return *tiles, keys, torch.zeros(scopes * geo.flag_bytes * 8, dtype=torch.uint8)

    def run(work: Any, kept: tuple[Tensor, ...], start: int, stop: int) -> None:
        scratch = torch.empty(nbytes, dtype=torch.uint8)
        work(message, *(t.data_ptr() for t in kept), scratch.data_ptr(), start, stop)

    if geo.allocation == "token":  # a scope is a whole sequence: larger than a cache, and perhaps the only one
        kept = notes(geo.rows, geo.scopes)
        over_rows(functools.partial(run, _measure, kept), geo.rows, x.nbytes)
        over_rows(functools.partial(run, _select, kept), geo.scopes, x.nbytes)
        over_rows(functools.partial(run, _code, kept), geo.rows, x.nbytes)
    else:
        over_rows(lambda *b: run(_encode, notes(geo.scope_rows, 1), *b), geo.scopes, x.nbytes)


@kernel
def _encode(m, extents, mids, keys, flags, scratch, start, stop) -> None:
    """Encode scope after scope, so that a scope's tokens are still in the cache when they are coded."""
    for scope in range(start, stop):
        first = scope * m.scope_rows
        last = min(m.rows, first + m.scope_rows)
        # The notes hold one scope, but the phases index from the first scope of all.
        notes = (
            extents - 4 * first * m.tiles, mids - 4 * first * m.tiles,
            keys - 4 * first * m.full, flags - 8 * scope * m.flag_bytes, scratch,
        )  # fmt: skip
        _measure(m, *notes, first, last)
        _select(m, *notes, scope, scope + 1)
        _code(m, *notes, first, last)


@kernel
def _measure(m, extents, mids, keys, flags, scratch, start, stop) -> None:
    """Compute half ranges and middles of tiles (Inf and 0 for NaN or Inf), pivots, and the keys for `flag_smallest`."""
    channels, tile, tiles, full, mode = m.channels, m.tile, m.tiles, m.full, m.mode
    line, low, high = scratch, scratch + 4 * channels, scratch + 4 * (channels + tiles)
    sums = high + 4 * tiles
    spun = sums + 8 * tiles
    share, ratio, norm = np.float32(m.share), np.float32(m.ratio), np.float32(m.norm)
    for row in range(start, stop):
        x, first = m.source + 4 * row * channels, row * tiles
        if m.kind != FLOAT32:
            widen(m.source, m.kind, row * channels, channels, line)
            x = line
        for t in range(tiles):
            put_extremes(x + 4 * t * tile, min(tile, channels - t * tile), low + 4 * t, high + 4 * t)
        for t in range(tiles):
            if m.float16:
                _put_span(get_int(low, t), get_int(high, t), extents, mids, first + t)
            else:
                _put_extent(get_int(low, t), get_int(high, t), share, extents, mids, first + t)
        if mode == TILE:
            put_tile_keys(x, tile, full, low, high, keys + 4 * row * full, sums)
        elif mode == TOKEN:
            put_token_key(x, channels, tile, tiles, low, high, keys + 4 * row, sums)
        if ratio > ZERO:
            for t in range(tiles):
                pivot, at = 0, x + 4 * t * tile
                if t < full:
                    pivot = _find_pivot(at, tile, get_int(low, t), get_int(high, t), ratio)
                if pivot:
                    plain = _half(get_int(low, t), get_int(high, t))
                    peak = spin(at, tile, pivot, m.float16, norm, spun)
                    put_extremes(spun, tile, low + 4 * t, high + 4 * t)
                    if m.float16:
                        _put_span(get_int(low, t), get_int(high, t), extents, mids, first + t)
                    else:
                        pivot = _put_turned(
                            get_int(low, t), get_int(high, t), plain, pivot, peak, peak * norm, share,
                            extents, mids, first + t,
                        )  # fmt: skip
                put_byte(m.pivots, first + t, pivot)
        if mode == RANGE:
            for t in range(full):
                put_int(keys, row * full + t, order_key(get_float(extents, first + t)))


@kernel
def _select(m, extents, mids, keys, flags, scratch, start, stop) -> None:
    """Set the flags of the scopes' candidates, and write their bitmaps."""
    if m.mode == NONE:
        return
    in_row = 1 if m.mode == TOKEN else m.full
    for scope in range(start, stop):
        first = scope * m.scope_rows
        candidates = (min(m.rows, first + m.scope_rows) - first) * in_row
        chosen = flags + 8 * scope * m.flag_bytes
        for i in range(candidates, 8 * m.flag_bytes):
            put_byte(chosen, i, 0)
        low = m.low if scope < m.scopes - 1 else m.low_last
        flag_smallest(keys + 4 * first * in_row, candidates, low, chosen)
        for i in range(m.flag_bytes):
            put_byte(m.widths + scope * m.flag_bytes, i, byte_of_flags(get_word(chosen, i)))


@helper
def _put_extent(low, high, share, extents, mids, i):
    least = greater(key_value(low), -LARGEST)
    most = lesser(key_value(high), LARGEST)
    half = most * HALF - least * HALF
    mid = most * HALF + least * HALF
    extent = greater(half, magnitude(mid) * share)
    finite = are_finite(low, high)
    put_float(extents, i, extent if finite else INFINITY)
    put_float(mids, i, mid if finite else ZERO)


@helper
def _half(low, high) -> Any:
    """Half the range."""
    return lesser(key_value(high), LARGEST) * HALF - greater(key_value(low), -LARGEST) * HALF


@helper
def _put_turned(low, high, plain, pivot, peak, offset, share, extents, mids, i) -> Any:
    """Measure a tile that was rotated without its pivot; return the byte of its pivot, 0 for the tile as it was."""
    half = _half(low, high)
    if half > plain * TWO:
        return 0
    mid = lesser(key_value(high), LARGEST) * HALF + greater(key_value(low), -LARGEST) * HALF
    if magnitude(mid + offset) * share > half or pivot == LAST_APART:
        put_float(extents, i, greater(half, magnitude(peak) * np.float32(APART_SHARE)))
        put_float(mids, i, mid)
        return pivot
    put_float(extents, i, half)
    put_float(mids, i, mid + offset)
    return pivot + LAST_APART


@helper
def _put_span(low, high, extents, mids, i) -> None:
    """Range and minimum of a tile."""
    least = greater(key_value(low), -LARGEST)
    put_float(extents, i, lesser(key_value(high), LARGEST) - least if are_finite(low, high) else INFINITY)
    put_float(mids, i, least + ZERO)  # not -0


@helper
def _find_pivot(x, count, low, high, ratio) -> Any:
    """1 + position of the tile's pivot, or 0."""
    least, most = key_value(low), key_value(high)
    first, other = greater(most, -least), lesser(most, -least)
    # The other end of the range is a lower bound of the second magnitude, which decides most tiles.
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
    return 1 + position


@kernel
def _code(m, extents, mids, keys, flags, scratch, start, stop) -> None:
    """Write parameters and codes of every tile."""
    if m.float16:
        _code_float16(m, extents, mids, flags, scratch, start, stop)
        return
    channels, tile, tiles = m.channels, m.tile, m.tiles
    line, octave, bits = scratch, scratch + 4 * channels, scratch + 4 * (channels + tiles)
    inverse, shift, middle = bits + 4 * tiles, bits + 8 * tiles, bits + 12 * tiles
    spun = middle + 4 * tiles
    codes = spun + 4 * tile
    norm, to = np.float32(m.norm), _first_code(m, flags, start)
    for row in range(start, stop):
        x, first = m.source + 4 * row * channels, row * tiles
        if m.kind != FLOAT32:
            widen(m.source, m.kind, row * channels, channels, line)
            x = line
        _put_bits(m, flags, row, bits)
        exponent = _set_octaves(extents + 4 * first, tiles, bits, octave)
        put_byte(m.exponents, row, exponent)
        _parameters(
            octave, exponent * 16 + 15, bits, extents + 4 * first, mids + 4 * first, tiles, m.width,
            m.scales + first, inverse, shift, middle,
        )  # fmt: skip
        for t in range(tiles):
            if m.width == 1:
                put_byte(m.mids, first + t, get_int(middle, t))
            else:
                put_half(m.mids, first + t, get_int(middle, t))
        for t in range(tiles):
            at, count, b = x + 4 * t * tile, min(tile, channels - t * tile), get_int(bits, t)
            top = power_of_two(b) - ONE if get_int(octave, t) else ZERO
            pivot = np.int64(get_byte(m.pivots, first + t)) if m.width == 2 else 0
            factor, added = get_float(inverse, t), get_float(shift, t)
            if pivot:
                peak = spin(at, tile, pivot, False, norm, spun)
                at = spun
                if pivot > LAST_APART:
                    added += peak * norm * factor
                else:
                    added = (power_of_two(b) - ONE) * HALF - get_float(mids, first + t) * factor
                    step = step_below(get_byte(m.scales, first + t), exponent * 16 + 15)
                    put_half(m.mids, first + t, _distance(peak, step))
            to = encode_run(at, count, factor, added, top, b, to, codes)


@helper
def _put_bits(m, flags, row, bits) -> None:
    """Write the widths of a token's tiles."""
    in_row = 0 if m.mode == NONE else 1 if m.mode == TOKEN else m.full
    chosen = flags + 8 * (row // m.scope_rows) * m.flag_bytes + row % m.scope_rows * in_row
    for t in range(m.tiles):
        low = m.mode != NONE and t < m.full and get_byte(chosen, t) > 0
        if m.mode == TOKEN:
            low = get_byte(chosen, 0) > 0
        put_int(bits, t, m.low_bits if low else m.high_bits)


@helper
def _first_code(m, flags, row) -> Any:
    """Address of a token's first code."""
    in_row = 0 if m.mode == NONE else 1 if m.mode == TOKEN else m.full
    scope, begun = row // m.scope_rows, row % m.scope_rows
    before = scope * m.low + count_flags(flags + 8 * scope * m.flag_bytes, begun * in_row)
    return m.codes + row * m.row_bytes - before * m.saved


@helper
def _code_float16(m, extents, mids, flags, scratch, start, stop) -> None:
    """`_code` with a scale and a zero for each tile: see `reference._quantize_float16`."""
    channels, tile, tiles = m.channels, m.tile, m.tiles
    line, bits, spun = scratch, scratch + 4 * channels, scratch + 4 * (channels + tiles)
    codes = spun + 4 * tile
    norm, to = np.float32(m.norm), _first_code(m, flags, start)
    for row in range(start, stop):
        x, first = m.source + 4 * row * channels, row * tiles
        if m.kind != FLOAT32:
            widen(m.source, m.kind, row * channels, channels, line)
            x = line
        _put_bits(m, flags, row, bits)
        for t in range(tiles):
            at, count, b = x + 4 * t * tile, min(tile, channels - t * tile), get_int(bits, t)
            span, least = get_float(extents, first + t), get_float(mids, first + t)
            scale, finite = span / (power_of_two(b) - ONE), span < INFINITY
            put_half(m.scales, first + t, to_fp16(scale if finite else ZERO))
            put_half(m.mids, first + t, to_fp16(least) if finite else NAN_FLOAT16)
            pivot = np.int64(get_byte(m.pivots, first + t)) if m.ratio > ZERO else 0
            if pivot:
                spin(at, tile, pivot, True, norm, spun)
                at = spun
            used = finite and scale > ZERO
            divisor = scale if used else ONE
            for j in range(count):
                put_float(spun, j, (get_float(at, j) - least) / divisor)
            to = encode_run(spun, count, ONE, ZERO, power_of_two(b) - ONE if used else ZERO, b, to, codes)


@helper
def _distance(peak, step) -> Any:
    """See `reference._distance`."""
    above = (float_bits(magnitude(peak)) + (1 << (APART_SHIFT - 1))) >> APART_SHIFT
    above = min(max(above - (float_bits(step) >> APART_SHIFT) + APART_ZERO, 1), 32767)
    return above | 0x8000 if peak < ZERO else above


@helper
def _at_distance(half, step) -> Any:
    """See `reference._at_distance`."""
    above = (float_bits(step) >> APART_SHIFT) + (half & 0x7FFF) - APART_ZERO
    peak = bits_float(np.int32(min(max(above, 0), APART_MOST) << APART_SHIFT))
    return NAN if step != step else -peak if half & 0x8000 else peak


@helper
def _set_octaves(extents, tiles, bits, octave) -> Any:
    """Set tiles' steps in sixteenths of an octave (0: all zero or not finite); return the largest float32 exponent."""
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
def _parameters(octave, top, bits, extents, mids, tiles, width, scales, inverse, shift, middle):
    """Compute each tile's scale as it is sent, 1 / step, the addend to x / step, and its middle as an integer."""
    units, limit = (np.float32(64), np.float32(127)) if width == 1 else (np.float32(256), np.float32(32767))
    nan = -128 if width == 1 else -32768
    for t in range(tiles):
        below = steps_below(get_int(octave, t), top)
        put_byte(scales, t, below)
        size, cells = step_below(below, top), power_of_two(get_int(bits, t))
        empty = size == ZERO
        factor = ONE / (ONE if empty else size)
        m = round_signed(get_float(mids, t) * factor * (units * power_of_two(-get_int(bits, t))))
        m = lesser(greater(m, -limit), limit)
        m = ZERO if empty else m
        put_float(inverse, t, factor)
        put_float(shift, t, (cells - ONE) * HALF - m * (cells * (ONE / units)))
        put_int(middle, t, truncate(m) if get_float(extents, t) < INFINITY else nan)


@helper
def spin(x, count, pivot, whole, norm, s) -> Any:
    """Write the rotated tile, its pivot swapped to the front and left out unless `whole`, to `s[:count]`; return it."""
    for j in range(count):
        put_float(s, j, get_float(x, j))
    swap(s, (pivot - 1) & 127)
    peak = get_float(s, 0)
    if not whole:
        put_float(s, 0, ZERO)
    rotate(s, count, norm)
    return peak


@helper
def rotate(s, count, norm) -> None:
    """Walsh-Hadamard transform of `s[:count]` in place, times `norm`."""
    half = 1
    while half < count:
        for first in range(0, count, 2 * half):
            for j in range(first, first + half):
                a, b = get_float(s, j), get_float(s, j + half)
                put_float(s, j, a + b)
                put_float(s, j + half, a - b)
        half *= 2
    for j in range(count):
        put_float(s, j, get_float(s, j) * norm)


@helper
def swap(s, position) -> None:
    """Exchange `s[0]` and `s[position]`."""
    first = get_float(s, 0)
    put_float(s, 0, get_float(s, position))
    put_float(s, position, first)


def decode(payload: Tensor, out: Tensor, *settings: Any) -> None:
    """The reference's numbers."""
    geo, accumulate = kernel_geometry(out.shape, *settings[:-1]), settings[-1]
    at = sections(payload, geo.layout)
    in_row = 0 if not geo.low else 1 if geo.allocation == "token" else geo.full

    def work(start: int, stop: int) -> None:
        nbytes = 4 * geo.channels + 5 * geo.tile + 8 * geo.flag_bytes
        scratch = torch.empty(nbytes, dtype=torch.uint8)
        _decode(
            at["exponents"], at["scales"], at["mids"], at["pivots"], at["codes"],
            geo.row_bytes, geo.saved, at["widths"], geo.flag_bytes, geo.scope_rows, geo.low, geo.low_last, in_row,
            out.data_ptr(), KINDS[out.dtype], geo.rows, geo.channels, geo.tile, geo.tiles, geo.full,
            geo.high_bits, geo.low_bits, geo.allocation == "token", geo.float16, geo.pivot, accumulate, geo.tile**-0.5,
            scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, geo.rows, out.nbytes)


@kernel
def _decode(
    exponents, scales, mids, pivots, codes_at, row_bytes, saved, widths, flag_bytes, scope_rows,
    low_count, low_last, in_row, target, kind, rows, channels, tile, tiles, full, high_bits, low_bits,
    by_token, float16, pivot, accumulate, norm, scratch, start, stop,
) -> None:  # fmt: skip
    line, spun = scratch, scratch + 4 * channels
    codes = spun + 4 * tile
    flags, step = codes + tile, ZERO
    direct = kind == FLOAT32 and not accumulate
    scope, at, intact, norm = -1, codes_at, True, np.float32(norm)
    for row in range(start, stop):
        y = target + 4 * row * channels if direct else line
        if row // scope_rows > scope:
            scope, left = row // scope_rows, rows - row // scope_rows * scope_rows
            given = low_count if left > scope_rows else low_last
            candidates = min(left, scope_rows) * in_row
            intact = read_checked_flags(widths + scope * flag_bytes, flag_bytes, candidates, given, flags)
            before = scope * low_count + count_flags(flags, row % scope_rows * in_row)
            at = codes_at + row * row_bytes - before * saved
        chosen = flags + row % scope_rows * in_row
        top = 0 if float16 else np.int64(get_byte(exponents, row)) * 16 + 15
        for t in range(tiles):
            low = in_row > 0 and t < full and get_byte(chosen, t) > 0
            if by_token:
                low = in_row > 0 and get_byte(chosen, 0) > 0
            bits, i = low_bits if low else high_bits, row * tiles + t
            to, count = y + 4 * t * tile, min(tile, channels - t * tile)
            turned = np.int64(get_byte(pivots, i)) if pivot else 0
            most = LAST_APART if float16 else 255
            damaged = turned > 0 and not ((turned - 1) & 127 < tile and t < full and turned <= most)
            turned = 0 if damaged else turned
            place, apart = spun if turned else to, not float16 and 0 < turned <= LAST_APART
            if float16:
                at = decode_run(at, count, bits, ZERO, ONE, place, codes)
                _to_numbers(place, count, from_fp16(get_half(scales, i)), from_fp16(get_half(mids, i)), damaged)
            else:
                step, offset = _step_and_offset(scales, mids, i, top, bits, pivot, apart, damaged)
                at = decode_run(at, count, bits, offset, step, place, codes)
            if turned:
                rotate(spun, tile, norm)
                if apart:
                    put_float(spun, 0, _at_distance(np.int64(get_half(mids, i)), step))
                _swap_into(to, spun, tile, turned)
        if not intact:
            for j in range(channels):
                put_float(y, j, NAN)
        if not direct:
            narrow(line, target, kind, row * channels, channels, accumulate)


@helper
def _swap_into(y, s, count, pivot) -> None:
    """Write a tile whose pivot goes from the front to its place."""
    swap(s, (pivot - 1) & 127)
    for j in range(count):
        put_float(y, j, get_float(s, j))


@helper
def _step_and_offset(scales, mids, i, top, bits, pivot, apart, damaged) -> Any:
    """A tile's step, and what is added to its codes."""
    step, cells = step_below(get_byte(scales, i), top), power_of_two(bits)
    if pivot:
        m, nan, unit = np.int64(np.int16(get_half(mids, i))), -32768, np.float32(1 / 256)
    else:
        m, nan, unit = np.int64(np.int8(get_byte(mids, i))), -128, np.float32(1 / 64)
    offset = np.float32(0 if apart else m) * (cells * unit) - (cells - ONE) * HALF
    return NAN if damaged or m == nan else step, offset


@helper
def _to_numbers(y, count, scale, zero, damaged) -> None:
    """Scale a run's codes."""
    zero = NAN if damaged else zero
    for j in range(count):
        put_float(y, j, get_float(y, j) * scale + zero)
