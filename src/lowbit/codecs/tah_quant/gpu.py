"""`TAHQuant` on a GPU.

A program holds whole tokens in registers, a lane for each tile, so the tensor is read once. If low bits are allocated
among a program's own tiles ("range", "tile"), encoding is one launch. Among the tokens of a sequence it is three: each
token's entropy, the choice, the codes. Decoding is always one.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.tah_quant import reference
from lowbit.codecs.tah_quant.gpu_select import (
    checked_flags,
    code_offsets,
    flag_smallest,
    load_flags,
    low_before,
    ordered,
    select_long_scope,
    store_bitmap,
)
from lowbit.codecs.tah_quant.reference import (
    APART_MOST,
    APART_SHARE,
    APART_SHIFT,
    APART_ZERO,
    LAST_APART,
    MID_LIMIT,
    MID_SHARE,
    MID_UNITS,
    NAN_MID,
    ROTATABLE,
    SCOPE_TILES,
    TAHGeometry,
    tah_geometry,
)
from lowbit.kernels.exact import LARGEST, SMALLEST
from lowbit.kernels.gpu import eighths
from lowbit.kernels.gpu.eighths import lanes, row_maximum, step_of
from lowbit.kernels.gpu.launch import ends, launch, power_of_two_from, starts, warn_once, warps_for
from lowbit.kernels.gpu.numbers import (
    bits_of,
    entropy_key,
    entropy_terms,
    inverse_of,
    magnitude_scale,
    narrowed,
    number_of,
    of_bits,
    power_of_two,
    round_signed,
    section,
    widened,
    zero_gap,
)
from lowbit.kernels.layout import ceil_div

LARGEST_, SMALLEST_, ROTATABLE_ = (tl.constexpr(v) for v in (LARGEST, SMALLEST, ROTATABLE))
SHARE_, SHIFT_, ZERO_, MOST_ = (tl.constexpr(v) for v in (APART_SHARE, APART_SHIFT, APART_ZERO, APART_MOST))
LAST_, ROUND_, NAN_FLOAT16 = (tl.constexpr(v) for v in (LAST_APART, 1 << (APART_SHIFT - 1), 0x7E00))
CHUNK = 4096
WIDEST = 1 << 17  # elements of a token: more do not fit into a program's registers
TOO_WIDE = f"tokens of {{}} elements take the slow reference path: the kernels hold up to {WIDEST}"


def encode(x: Tensor, payload: Tensor, *settings: Any) -> None:
    """Encode; the bytes equal those of `reference.encode`."""
    geo, ratio = tah_geometry(x.shape, *settings), settings[-1] or 0.0
    if geo.channels > WIDEST:
        warn_once(TOO_WIDE.format(geo.channels))
        reference.encode.definition(x, payload, *settings)
        return
    if geo.low and geo.allocation == "token":
        keys = torch.empty(geo.rows, dtype=torch.int32, device=x.device)
        launch(_measure, geo.rows, 4, {}, x, keys, channels=geo.channels, CHUNK=CHUNK)
        launch(
            select_long_scope, geo.scopes, 4, {}, keys, payload[geo.layout.offsets["widths"] :],
            geo.low, geo.flag_bytes, per_scope=geo.per_scope,
        )  # fmt: skip
    width = geo.mid_bytes
    launch(
        _encode, *_shape(geo), x, payload, ratio, geo.tile**-0.5, *_numbers(geo),
        *ends(geo.layout, "exponents", "scales", "mids", "pivots", "widths"),
        SHARE=MID_SHARE[width], LIMIT=float(MID_LIMIT[width]),
    )  # fmt: skip


def decode(payload: Tensor, out: Tensor, *settings: Any) -> None:
    """The reference's numbers."""
    geo = tah_geometry(out.shape, *settings[:-1])
    if geo.channels > WIDEST:
        warn_once(TOO_WIDE.format(geo.channels))
        reference.decode.definition(payload, out, *settings)
        return
    launch(_decode, *_shape(geo), payload, out, geo.tile**-0.5, *_numbers(geo), ACCUMULATE=settings[-1])


def _shape(geo: TAHGeometry) -> tuple[int, int, dict[str, Any]]:
    """Programs, warps, and the shape of a program's tensors, with the settings."""
    mode = geo.allocation if geo.low else "none"
    # Independent of the number of tokens, so that a shorter message needs no other kernels.
    rows = {"tile": 1, "range": SCOPE_TILES // max(1, geo.full)}.get(mode, SCOPE_TILES // geo.tiles)
    rows = max(1, rows)
    lanes, width = power_of_two_from(rows * geo.tiles), geo.tile // 8
    shape = {
        "C": geo.channels, "TILE": geo.tile, "T": geo.tiles, "ROWS": rows, "NT": lanes,
        "RP": power_of_two_from(rows), "WIDTH": width, "HIGH": geo.high_bits, "LOW": geo.low_bits,
        "MODE": mode, "FLOAT16": geo.float16, "PIVOT": geo.pivot, "MID_WIDTH": geo.mid_bytes,
        "UNITS": float(MID_UNITS[geo.mid_bytes]), "NAN_MID": NAN_MID[geo.mid_bytes],
    }  # fmt: skip
    return ceil_div(geo.rows, rows), warps_for(lanes * width), shape


def _numbers(geo: TAHGeometry) -> tuple[int, ...]:
    return (
        geo.rows, geo.scope_rows, geo.per_scope, geo.per_last, geo.low, geo.low_last, geo.flag_bytes,
        *starts(geo.layout, "scales", "mids", "pivots", "widths", "codes"),
    )  # fmt: skip


NUMBERS = (
    "rows", "length", "per_scope", "per_last", "low", "low_last", "flag_bytes",
    "scales_16", "mids_16", "pivots_16", "widths_16", "codes_16",
    "exponents_end", "scales_end", "mids_end", "pivots_end", "widths_end",
)  # fmt: skip
"""Arguments that change with a message's length: kernels are compiled once for all of them."""


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    x, payload, ratio, norm,
    rows, length, per_scope, per_last, low, low_last, flag_bytes,
    scales_16, mids_16, pivots_16, widths_16, codes_16,
    exponents_end, scales_end, mids_end, pivots_end, widths_end,
    MODE: tl.constexpr, FLOAT16: tl.constexpr, PIVOT: tl.constexpr, MID_WIDTH: tl.constexpr,
    SHARE: tl.constexpr, LIMIT: tl.constexpr, UNITS: tl.constexpr, NAN_MID: tl.constexpr,
    C: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, NT: tl.constexpr,
    RP: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    RAGGED: tl.constexpr = C % TILE > 0
    first, row, t, exists, j, at, count, v, keep = lanes(rows, C, TILE, T, ROWS, NT, WIDTH)
    parts = eighths.load(x, at, v, keep, count, j, RAGGED)
    least, most, finite = eighths.extremes(parts, v, keep, count, j, RAGGED)
    index = first * T + tl.arange(0, NT)

    candidate = exists & (t < C // TILE)
    if MODE == "tile":
        key = _entropy_keys(parts, least, most, finite)
    half, peak, pivot = _half(least, most), tl.zeros((NT,), tl.float32), tl.zeros((NT,), tl.int32)
    if PIVOT:
        pivot = find_pivots(parts, finite & candidate, j, TILE // 8, ratio)
        if tl.max(pivot, axis=0) > 0:
            parts, least, most, half, pivot, peak = _turned(
                parts, pivot, least, most, half, peak, norm, j, TILE // 8, FLOAT16, WIDTH, NT
            )
    offset = peak * norm
    least, most = tl.maximum(least, -LARGEST_) + 0.0, tl.minimum(most, LARGEST_) + 0.0
    mid = most * 0.5 + least * 0.5
    extent = most - least
    if not FLOAT16:
        bound = tl.abs(mid + offset) * SHARE
        apart = (pivot > 0) & ((bound > half) | (pivot == LAST_))
        extent = tl.maximum(half, tl.where(apart, tl.abs(peak) * SHARE_, bound))
        pivot = tl.where((pivot > 0) & (apart == 0), pivot + LAST_, pivot)
    if PIVOT:
        tl.store(section(payload, pivots_16) + index, pivot.to(tl.uint8), mask=exists)

    bits = tl.full((NT,), HIGH, tl.int32)
    before = tl.full((), 0, tl.int64)
    if MODE == "range":
        key = tl.where(finite, bits_of(extent) & 0x7FFFFFFF, 0x7F800000)
    if MODE == "range" or MODE == "tile":
        last = tl.program_id(0) == tl.num_programs(0) - 1
        flags = flag_smallest(ordered(key, candidate), tl.where(last, low_last, low))
        store_bitmap(
            flags, section(payload, widths_16), tl.where(last, per_last, per_scope), flag_bytes, C, TILE, T, NT
        )
        bits = tl.where(flags > 0, LOW, HIGH)
        before = low_before(section(payload, widths_16), first, length, low, flag_bytes, False)
    if MODE == "token":
        flags = load_flags(section(payload, widths_16), first, row, t, exists, length, flag_bytes, C, TILE, True)
        bits = tl.where(flags > 0, LOW, HIGH)
        before = low_before(section(payload, widths_16), first, length, low, flag_bytes, True)

    if FLOAT16:
        parts, top = _scaled(parts, least, extent, finite, bits, payload, index, exists, scales_16, mids_16)
        inverse, shift = 1.0, 0.0
    else:
        exponent, below = _steps(extent, finite & exists, bits, row, T, ROWS, NT, RP)
        tl.store(payload + first + row, exponent.to(tl.uint8), mask=exists & (t == 0))
        tl.store(section(payload, scales_16) + index, below.to(tl.uint8), mask=exists)
        middle, inverse, shift, top = _relative(
            mid, offset, peak, apart, of_bits(step_of(below, exponent)), bits, UNITS, LIMIT
        )
        middle = tl.where(finite, middle, NAN_MID)
        if MID_WIDTH == 1:
            tl.store(section(payload, mids_16) + index, middle.to(tl.uint8), mask=exists)
        else:
            mids = (section(payload, mids_16)).to(tl.pointer_type(tl.int16))
            tl.store(mids + index, middle.to(tl.int16), mask=exists)
    codes = eighths.codes_of(parts, inverse, shift, top, v, count, j, RAGGED)
    start = code_offsets(first, bits, v, before, exists, C, TILE, T, HIGH, LOW, MODE == "token")
    eighths.store_codes(section(payload, codes_16) + start + j, codes, v, bits[:, None], keep, HIGH | LOW)
    if tl.program_id(0) == 0:
        zero_gap(payload, exponents_end, scales_16)
        zero_gap(payload, scales_end, mids_16)
        zero_gap(payload, mids_end, pivots_16)
        zero_gap(payload, pivots_end, widths_16)
        zero_gap(payload, widths_end, codes_16)


@triton.jit
def _entropy_keys(parts, least, most, finite):
    """Sort keys of tiles by entropy."""
    scale = magnitude_scale(tl.maximum(most, -least))[:, None]
    total, terms = tl.zeros(parts[0].shape, tl.int32), tl.zeros(parts[0].shape, tl.int32)
    for k in tl.static_range(8):
        some, more = entropy_terms(parts[k], scale)
        total += some
        terms += more
    return entropy_key(tl.sum(total, axis=1), tl.sum(terms, axis=1), finite)


@triton.jit
def _turned(
    parts, pivot, least, most, half, peak, norm, j, v: tl.constexpr,
    FLOAT16: tl.constexpr, WIDTH: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """Rotate tiles with a pivot, and measure them (see `reference._turned`)."""
    turned = swapped(parts, pivot, j, v)
    if not FLOAT16:
        peak = tl.sum(tl.where(j == 0, turned[0], 0.0), axis=1)
        turned = with_first(turned, 0.0, j)
    turned = rotated(turned, norm, WIDTH, NT)
    low, high, _ = eighths.extremes(turned, v, pivot[:, None] > 0, pivot[:, None], j, False)
    if not FLOAT16:
        pivot = tl.where(_half(low, high) > half * 2.0, 0, pivot)
        peak = tl.where(pivot > 0, peak, 0.0)
    least, most = tl.where(pivot > 0, low, least), tl.where(pivot > 0, high, most)
    return _with_pivot(pivot, turned, parts), least, most, _half(least, most), pivot, peak


@triton.jit
def _scaled(parts, least, extent, finite, bits, payload, index, exists, scales_16, mids_16):
    """Write scales and zeros; return elements in steps above the zero, and the largest codes (see `reference`)."""
    levels = power_of_two(bits) - 1
    scale = tl.div_rn(extent, levels)
    scales = section(payload, scales_16).to(tl.pointer_type(tl.float16))
    tl.store(scales + index, narrowed(tl.where(finite, scale, 0.0), tl.float16), mask=exists)
    zero = narrowed(least, tl.float16).to(tl.int16, bitcast=True)
    zeros = section(payload, mids_16).to(tl.pointer_type(tl.int16))
    tl.store(zeros + index, tl.where(finite, zero, NAN_FLOAT16), mask=exists)
    used = finite & (scale > 0)
    divisor, top = tl.where(used, scale, 1.0)[:, None], tl.where(used, levels, 0.0)[:, None]
    return [tl.div_rn(part - least[:, None], divisor) for part in parts], top


@triton.jit
def _relative(mid, offset, peak, apart, step, bits, UNITS: tl.constexpr, LIMIT: tl.constexpr):
    """Integer middles, and what makes elements codes: 1 / step, the addend, the largest (see `reference._quantize`)."""
    inverse, cells = inverse_of(step), power_of_two(bits)
    m = round_signed((mid + offset) * inverse * (UNITS * power_of_two(-bits)))
    m = tl.where(step > 0, tl.minimum(tl.maximum(m, -LIMIT), LIMIT), 0.0)
    shift = (cells - 1) * 0.5 - m * (cells * (1 / UNITS)) + offset * inverse
    shift = tl.where(apart, (cells - 1) * 0.5 - mid * inverse, shift)
    middle = tl.where(apart, _distance(peak, step), m.to(tl.int32))
    return middle, inverse[:, None], shift[:, None], tl.where(step > 0, cells - 1, 0.0)[:, None]


@triton.jit
def _half(least, most):
    """Half the range."""
    return tl.minimum(most, LARGEST_) * 0.5 - tl.maximum(least, -LARGEST_) * 0.5


@triton.jit
def _distance(peak, step):
    """See `reference._distance`."""
    above = (bits_of(tl.abs(peak)) + ROUND_) >> SHIFT_
    above = tl.minimum(tl.maximum(above - (bits_of(step) >> SHIFT_) + ZERO_, 1), 32767)
    return tl.where(peak < 0, above - 32768, above)


@triton.jit
def _at_distance(m, step):
    """See `reference._at_distance`."""
    above = (bits_of(step) >> SHIFT_) + (m & 0x7FFF) - ZERO_
    peak = of_bits(tl.minimum(tl.maximum(above, 0), MOST_) << SHIFT_)
    return tl.where(step == step, tl.where(m < 0, -peak, peak), float("nan"))


@triton.jit
def _steps(
    extent, finite, bits, row,
    T: tl.constexpr, ROWS: tl.constexpr, NT: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Each token's exponent, repeated for its tiles, and each tile's step below it (see `reference`)."""
    step = bits_of(tl.maximum(extent * power_of_two(1 - bits), SMALLEST_))
    octave = (step + tl.where(bits < 6, 1 << 18, (1 << 19) - 1)) >> 19
    octave = tl.where(finite & (extent > 0), octave, 0)
    exponent = row_maximum(octave, row, T, ROWS, NT, RP) >> 4
    below = tl.minimum(tl.maximum(exponent * 16 + 15 - octave, 0), 254)
    return exponent, tl.where(octave > 0, below, 255)


@triton.jit
def _measure(x, keys, channels: tl.constexpr, CHUNK: tl.constexpr):
    """Sort key of a token by entropy."""
    row = tl.program_id(0).to(tl.int64)
    x += row * channels
    i = tl.arange(0, CHUNK)
    most, nan = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in range(0, channels, CHUNK):
        part = widened(tl.load(x + start + i, mask=start + i < channels, other=0.0))
        most = tl.maximum(most, tl.abs(part))
        nan = tl.fma(part, 0.0, nan)
    scale = magnitude_scale(tl.max(most, axis=0))
    total, terms = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
    for start in range(0, channels, CHUNK):
        part = widened(tl.load(x + start + i, mask=start + i < channels, other=0.0))
        some, more = entropy_terms(part, scale)
        total += some
        terms += more
    finite = tl.sum(nan, axis=0) == 0
    tl.store(keys + row, entropy_key(tl.sum(total, axis=0), tl.sum(terms, axis=0), finite))


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    payload, out, norm,
    rows, length, per_scope, per_last, low, low_last, flag_bytes,
    scales_16, mids_16, pivots_16, widths_16, codes_16,
    MODE: tl.constexpr, FLOAT16: tl.constexpr, PIVOT: tl.constexpr, MID_WIDTH: tl.constexpr,
    UNITS: tl.constexpr, NAN_MID: tl.constexpr, ACCUMULATE: tl.constexpr,
    C: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, NT: tl.constexpr,
    RP: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    RAGGED: tl.constexpr = C % TILE > 0
    BY_TOKEN: tl.constexpr = MODE == "token"
    first, row, t, exists, j, at, count, v, keep = lanes(rows, C, TILE, T, ROWS, NT, WIDTH)
    index = first * T + tl.arange(0, NT)
    bits = tl.full((NT,), HIGH, tl.int32)
    before = tl.full((), 0, tl.int64)
    damaged = row < 0
    if MODE != "none":
        flags, before, intact = checked_flags(
            section(payload, widths_16), first, row, t, exists, length, low, low_last, flag_bytes, rows,
            C, TILE, ROWS, BY_TOKEN,
        )  # fmt: skip
        bits = tl.where(flags > 0, LOW, HIGH)
        damaged = intact == 0
    start = code_offsets(first, bits, v, before, exists, C, TILE, T, HIGH, LOW, BY_TOKEN)
    codes = eighths.load_codes(section(payload, codes_16) + start + j, v, bits[:, None], keep, HIGH | LOW)

    if PIVOT:
        pivot = tl.load(section(payload, pivots_16) + index, mask=exists, other=0).to(tl.int32)
        valid = (((pivot - 1) & 127) < TILE) & (t < C // TILE)
        if FLOAT16:
            valid &= pivot <= LAST_
        damaged |= (pivot > 0) & (valid == 0)
        pivot = tl.where(valid, pivot, 0)
    if FLOAT16:
        scales = section(payload, scales_16).to(tl.pointer_type(tl.float16))
        zeros = section(payload, mids_16).to(tl.pointer_type(tl.float16))
        scale = tl.load(scales + index, mask=exists, other=0.0).to(tl.float32)[:, None]
        zero = tl.load(zeros + index, mask=exists, other=0.0).to(tl.float32)
        zero = tl.where(damaged, float("nan"), zero)[:, None]
        y = [number_of(code) * scale + zero for code in codes]
    else:
        exponent = tl.load(payload + first + row, mask=exists, other=0).to(tl.int32)
        below = tl.load(section(payload, scales_16) + index, mask=exists, other=0).to(tl.int32)
        if MID_WIDTH == 1:
            mids = (section(payload, mids_16)).to(tl.pointer_type(tl.int8))
        else:
            mids = (section(payload, mids_16)).to(tl.pointer_type(tl.int16))
        m = tl.load(mids + index, mask=exists, other=0).to(tl.int32)
        damaged |= m == NAN_MID
        step = of_bits(tl.where(damaged, 0x7FC00000, step_of(below, exponent)))
        cells = power_of_two(bits)
        middle = m
        if PIVOT:
            apart = (pivot > 0) & (pivot <= LAST_)
            middle = tl.where(apart, 0, m)
        offset = middle.to(tl.float32) * (cells * (1 / UNITS)) - (cells - 1) * 0.5
        y = [(number_of(code) + offset[:, None]) * step[:, None] for code in codes]
    if PIVOT:  # noqa: SIM102, because the other condition is not known at compile time
        if tl.max(pivot, axis=0) > 0:
            turned = rotated(y, norm, WIDTH, NT)
            if not FLOAT16:
                turned = with_first(turned, tl.where(apart[:, None], _at_distance(m, step)[:, None], turned[0]), j)
            y = _with_pivot(pivot, swapped(turned, pivot, j, TILE // 8), y)
    eighths.store_numbers(y, out, at, v, keep, count, j, RAGGED, ACCUMULATE)


@triton.jit
def find_pivots(parts, finite, j, v: tl.constexpr, ratio):
    """1 + position of each tile's pivot, or 0 (see `reference.find_pivots`)."""
    most = tl.zeros(parts[0].shape, tl.float32)
    for k in tl.static_range(8):
        most = tl.maximum(most, tl.abs(parts[k]))
    first = tl.max(most, axis=1)
    second = tl.zeros(parts[0].shape, tl.float32)
    equal = tl.zeros(parts[0].shape, tl.int32)
    position = tl.zeros(parts[0].shape, tl.int32)
    for k in tl.static_range(8):
        a = tl.abs(parts[k])
        top = a == first[:, None]
        second = tl.maximum(second, tl.where(top, 0.0, a))
        equal += top.to(tl.int32)
        position += tl.where(top, k * v + j, 0)
    only = tl.sum(equal, axis=1) == 1
    other = tl.max(second, axis=1)
    is_pivot = only & (first >= other * ratio) & (first < ROTATABLE_) & finite
    return tl.where(is_pivot, tl.sum(position, axis=1) + 1, 0)


@triton.jit
def swapped(parts, pivot, j, v: tl.constexpr):
    """Exchange each tile's first element and the one at its pivot; tiles without a pivot do not change."""
    position = tl.where(pivot > 0, (pivot - 1) & 127, 0)[:, None]
    bits = tl.zeros(parts[0].shape, tl.int32)
    for k in tl.static_range(8):
        bits |= tl.where(k * v + j == position, bits_of(parts[k]), 0)
    at_pivot = tl.sum(bits, axis=1).to(tl.float32, bitcast=True)[:, None]
    first = tl.sum(tl.where(j == 0, bits_of(parts[0]), 0), axis=1).to(tl.float32, bitcast=True)
    first = first[:, None]
    out = ()
    for k in tl.static_range(8):
        x = tl.where(k * v + j == position, first, parts[k])
        out = out + (tl.where(k * v + j == 0, at_pivot, x),)
    return out


@triton.jit
def with_first(parts, first, j):
    """Replace each tile's first element."""
    out = (tl.where(j == 0, first, parts[0]),)
    for k in tl.static_range(1, 8):
        out = out + (parts[k],)
    return out


@triton.jit
def _butterfly(x, HALF: tl.constexpr, WIDTH: tl.constexpr, NT: tl.constexpr):
    """One step of the transform among an eighth's elements."""
    pairs = tl.permute(tl.reshape(x, (NT, WIDTH // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (NT, WIDTH))


@triton.jit
def rotated(parts, norm, WIDTH: tl.constexpr, NT: tl.constexpr):
    """Normalised Walsh-Hadamard transform, in the reference's order of steps."""
    if WIDTH > 1:
        parts = [_butterfly(x, 1, WIDTH, NT) for x in parts]
    if WIDTH > 2:
        parts = [_butterfly(x, 2, WIDTH, NT) for x in parts]
    if WIDTH > 4:
        parts = [_butterfly(x, 4, WIDTH, NT) for x in parts]
    if WIDTH > 8:
        parts = [_butterfly(x, 8, WIDTH, NT) for x in parts]
    return [x * norm for x in _across(_across(_across(parts, 1), 2), 4)]


@triton.jit
def _across(parts, STEP: tl.constexpr):
    """One step among the eighths."""
    out = ()
    for k in tl.static_range(8):
        if k & STEP == 0:
            out = out + (parts[k] + parts[k + STEP],)
        else:
            out = out + (parts[k - STEP] - parts[k],)
    return out


@triton.jit
def _with_pivot(pivot, parts, others):
    """Eighths of tiles with a pivot from `parts`, of the others from `others`."""
    out = ()
    for k in tl.static_range(8):
        out = out + (tl.where(pivot[:, None] > 0, parts[k], others[k]),)
    return out
