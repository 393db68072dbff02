"""`FeatureInt` on a GPU: one launch each, no scratch memory, no synchronization.

When encoding, a program processes some whole rows: it reads them once for their gains, and again, from the cache, for
their codes. When decoding, it processes some elements of some rows. The feature of an element is looked up in `order`:
neighbours in it are neighbours in a row, except for outliers in between.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.feature_int.reference import LARGEST_BF16, NAN_BF16, feature_int_layout
from lowbit.kernels.exact import SMALLEST
from lowbit.kernels.gpu.launch import ends, launch, starts
from lowbit.kernels.gpu.numbers import (
    bits_of,
    code_of,
    inverse_of,
    narrowed,
    number_of,
    of_bits,
    round_bf16,
    section,
    widened,
    zero_gap,
)
from lowbit.kernels.layout import ceil_div

MOST, NAN_BF16_, SMALLEST_ = tl.constexpr(LARGEST_BF16), tl.constexpr(NAN_BF16), tl.constexpr(SMALLEST)
INFINITE_BITS = tl.constexpr(0x7F800000)
ENCODE = {"ROWS": 2, "WIDTH": 1024}  # elements that a program has in registers at a time
DECODE = {"ROWS": 8, "WIDTH": 256}
WARPS = 4


def encode(
    x: Tensor, payload: Tensor, inverse: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    share: float, by_token: bool,
) -> None:  # fmt: skip
    """Encode; the bytes equal those of `reference.encode`."""
    rows, features = x.shape
    layout = feature_int_layout(rows, features, outliers, bits, by_token)
    launch(
        _encode, ceil_div(rows, ENCODE["ROWS"]), WARPS, ENCODE, x, payload, inverse, offset, order,
        rows, features, outliers, share, *starts(layout, "features", "codes"), *ends(layout, "gains", "features"),
        BITS=bits, BY_TOKEN=by_token,
    )  # fmt: skip


def decode(
    payloads: Sequence[Tensor], out: Tensor, scales: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    gain: float, divisor: int, accumulate: bool,
) -> None:  # fmt: skip
    """The reference's numbers."""
    rows, features = out.shape
    layout = feature_int_layout(rows, features, outliers, bits, not gain)
    columns = ceil_div(features - outliers, DECODE["WIDTH"]) + ceil_div(outliers, DECODE["WIDTH"])
    launch(
        _decode, ceil_div(rows, DECODE["ROWS"]) * columns, WARPS, DECODE, out, tuple(payloads), scales, offset, order,
        rows, features, outliers, gain, divisor, *starts(layout, "features", "codes"),
        BITS=bits, BY_TOKEN=not gain, RANKS=len(payloads), DIVIDE=divisor > 1, ACCUMULATE=accumulate,
    )  # fmt: skip


@triton.jit
def _scaled(x, inverse, offset, row, feature, features, keep, exists):
    """Scale numbers to units of their ranges; 0 for those that do not exist."""
    y = widened(tl.load(x + row * features + feature, mask=keep, other=0.0))
    y = y - tl.load(offset + feature, mask=exists, other=0.0)
    return y * tl.load(inverse + feature, mask=exists, other=0.0)


@triton.jit
def _store_plane(
    x, to, inverse, offset, order, row, rows, features, rest, factor, finite, lane,
    DONE: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, BY_TOKEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the plane of P bits that has DONE bits of a code below it; return the start of the next plane."""
    width = (rest * P + 7) // 8
    center: tl.constexpr = 2.0 ** (BITS - 1) - (0.5 if BY_TOKEN else 1.0)
    for first in range(0, width, WIDTH):
        j = first + lane
        byte = tl.zeros(row.shape, tl.int32) + tl.zeros(lane.shape, tl.int32)
        for s in tl.static_range(8 // P):
            exists = (j < width) & (j + s * width < rest)
            feature = tl.load(order + j + s * width, mask=exists, other=0)
            keep = (row < rows) & exists
            v = _scaled(x, inverse, offset, row, feature, features, keep, exists)
            code = code_of(v, factor, center, 2 * center)
            if not BY_TOKEN:
                code = tl.where(finite, code, 2**BITS - 1)
            byte |= tl.where(exists, ((code >> DONE) & ((1 << P) - 1)) << (P * s), 0)
        tl.store(to + j, byte.to(tl.uint8), mask=(row < rows) & (j < width))
    return to + width


@triton.jit(
    do_not_specialize=["rows", "share", "features_16", "codes_16", "gains_end", "features_end"],
)
def _encode(
    x, payload, inverse, offset, order, rows, features, outliers, share,
    features_16, codes_16, gains_end, features_end,
    BITS: tl.constexpr, BY_TOKEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    rest = features - outliers
    most = tl.zeros((ROWS, WIDTH), tl.int32)
    for first in range(0, rest, WIDTH):
        exists = first + lane < rest
        feature = tl.load(order + first + lane, mask=exists, other=0)
        v = _scaled(x, inverse, offset, row, feature, features, (row < rows) & exists, exists)
        most = tl.maximum(most, bits_of(v) & 0x7FFFFFFF)
    top = tl.max(most, axis=1)[:, None]
    finite = top < INFINITE_BITS
    gain = tl.full(top.shape, 1.0, tl.float32) * share
    if BY_TOKEN:
        largest = of_bits(top)
        gain = tl.where(largest > 0, round_bf16(tl.maximum(largest * share, SMALLEST_)), 0.0)
        gains = payload.to(tl.pointer_type(tl.int16))
        tl.store(gains + row, tl.where(finite, bits_of(gain) >> 16, NAN_BF16_).to(tl.int16), mask=row < rows)
        gain = tl.where(finite, gain, 0.0)
    factor = inverse_of(gain)

    size = 0
    for p in tl.static_range(4):
        if BITS & (8 >> p):
            size += (rest * (8 >> p) + 7) // 8
    to = section(payload, codes_16) + row * size
    for p in tl.static_range(4):
        if BITS & (8 >> p):
            to = _store_plane(
                x, to, inverse, offset, order, row, rows, features, rest, factor, finite, lane,
                BITS & (0xF0 >> p), 8 >> p, BITS, BY_TOKEN, WIDTH,
            )  # fmt: skip

    for first in range(0, outliers, WIDTH):
        exists = first + lane < outliers
        keep = (row < rows) & exists
        feature = tl.load(order + rest + first + lane, mask=exists, other=0)
        y = widened(tl.load(x + row * features + feature, mask=keep, other=0.0))
        small = (bits_of(y) & 0x7FFFFFFF) < INFINITE_BITS
        y = tl.where(small, tl.minimum(tl.maximum(y, -MOST), MOST), y)
        bits = tl.where(y == y, bits_of(round_bf16(y)) >> 16, NAN_BF16_)
        place = section(payload, features_16).to(tl.pointer_type(tl.int16)) + row * outliers + first + lane
        tl.store(place, bits.to(tl.int16), mask=keep)
    if tl.program_id(0) == 0:
        zero_gap(payload, gains_end, features_16)
        zero_gap(payload, features_end, codes_16)


@triton.jit
def _code(at, e, rest, keep, BITS: tl.constexpr):
    """The codes of elements `e` of the rows that begin at `at`."""
    code = tl.zeros(keep.shape, tl.int32)
    for p in tl.static_range(4):
        if BITS & (8 >> p):
            width = (rest * (8 >> p) + 7) // 8
            byte = tl.load(at + e % width, mask=keep, other=0).to(tl.int32)
            field = (byte >> ((8 >> p) * (e // width))) & ((1 << (8 >> p)) - 1)
            code, at = code | (field << (BITS & (0xF0 >> p))), at + width
    return code


@triton.jit
def _number(
    payload, codes_16, row, e, rest, keep, there, scale, static, BITS: tl.constexpr, BY_TOKEN: tl.constexpr
):  # fmt: skip
    """Decode the codes of elements `e` of a row, without offsets."""
    size = 0
    for p in tl.static_range(4):
        if BITS & (8 >> p):
            size += (rest * (8 >> p) + 7) // 8
    at = section(payload, codes_16) + row * size
    code = _code(at, e, rest, keep, BITS)
    if BY_TOKEN:
        gain = of_bits(tl.load(payload.to(tl.pointer_type(tl.int16)) + row, mask=there, other=0).to(tl.int32) << 16)
    else:
        first = _code(at, row * 0, rest, there, BITS)
        gain = tl.where(first == 2**BITS - 1, float("nan"), static)
    return ((number_of(code) - (2.0 ** (BITS - 1) - (0.5 if BY_TOKEN else 1.0))) * gain) * scale


@triton.jit
def _give(value, out, row, feature, features, keep, divisor, DIVIDE: tl.constexpr, ACCUMULATE: tl.constexpr):
    if DIVIDE:
        value = tl.div_rn(value, tl.full(value.shape, 1.0, tl.float32) * divisor)
    to = out + row * features + feature
    if ACCUMULATE:
        value = widened(tl.load(to, mask=keep, other=0.0)) + value
    tl.store(to, narrowed(value, out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows", "static", "divisor", "features_16", "codes_16"])
def _decode(
    out, payloads, scales, offset, order, rows, features, outliers, static, divisor, features_16, codes_16,
    BITS: tl.constexpr, BY_TOKEN: tl.constexpr, RANKS: tl.constexpr, DIVIDE: tl.constexpr, ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rest = features - outliers
    of_codes = tl.cdiv(rest, WIDTH)
    columns = of_codes + tl.cdiv(outliers, WIDTH)
    row = (tl.program_id(0) // columns).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column, lane, there = tl.program_id(0) % columns, tl.arange(0, WIDTH)[None, :], row < rows
    if column < of_codes:
        e = column * WIDTH + lane
        exists = e < rest
        keep = there & exists
        feature = tl.load(order + e, mask=exists, other=0)
        scale = tl.load(scales + feature, mask=exists, other=0.0)
        y = _number(payloads[0], codes_16, row, e, rest, keep, there, scale, static, BITS, BY_TOKEN)
        for r in tl.static_range(1, RANKS):
            scale = tl.load(scales + r * features + feature, mask=exists, other=0.0)
            y += _number(payloads[r], codes_16, row, e, rest, keep, there, scale, static, BITS, BY_TOKEN)
        y += tl.load(offset + feature, mask=exists, other=0.0)
        _give(y, out, row, feature, features, keep, divisor, DIVIDE, ACCUMULATE)
    else:
        j = (column - of_codes) * WIDTH + lane
        exists = j < outliers
        feature = tl.load(order + rest + j, mask=exists, other=0)
        keep = there & exists
        at = row * outliers + j
        bits = tl.load(section(payloads[0], features_16).to(tl.pointer_type(tl.int16)) + at, mask=keep, other=0)
        y = of_bits(bits.to(tl.int32) << 16)
        for r in tl.static_range(1, RANKS):
            bits = tl.load(section(payloads[r], features_16).to(tl.pointer_type(tl.int16)) + at, mask=keep, other=0)
            y += of_bits(bits.to(tl.int32) << 16)
        _give(y, out, row, feature, features, keep, divisor, DIVIDE, ACCUMULATE)
