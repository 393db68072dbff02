"""`FeatureInt4` on a GPU: one launch each, no scratch, nothing waited for.

A program takes some rows and, of each, some bytes of codes or some outliers. The features that a byte holds are looked
up in `order`: neighbours there are neighbours in a row, but for the outliers in between.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.feature_int4.reference import BEYOND, LARGEST_BF16, LIMIT, NAN_BF16, NAN_CODE, feature_int4_layout
from lowbit.kernels.gpu.launch import ends, launch, starts
from lowbit.kernels.gpu.numbers import SIGNED, bits_of, narrowed, of_bits, round_bf16, section, widened, zero_gap
from lowbit.kernels.layout import ceil_div

BEYOND_, MOST, LIMIT_ = tl.constexpr(BEYOND), tl.constexpr(LARGEST_BF16), tl.constexpr(LIMIT)
NAN_BF16_, NAN_CODE_ = tl.constexpr(NAN_BF16), tl.constexpr(NAN_CODE)
ROWS, WIDTH, WARPS = 8, 256, 4  # of a program: 2048 bytes of codes, 4096 elements


def encode(x: Tensor, payload: Tensor, inverse: Tensor, order: Tensor, outliers: int, clipped: Tensor | None) -> None:
    """The reference's bytes."""
    rows, features = x.shape
    layout = feature_int4_layout(rows, features, outliers)
    launch(
        _encode, *_shape(rows, features, outliers), x, payload, inverse, order,
        payload if clipped is None else clipped, rows, features, outliers,
        *starts(layout, "codes"), *ends(layout, "features"), COUNT=clipped is not None,
    )  # fmt: skip


def decode(payload: Tensor, out: Tensor, scale: Tensor, order: Tensor, outliers: int, accumulate: bool) -> None:
    """The reference's numbers."""
    _sum((payload,), out, scale, order, outliers, 1, accumulate)


def sum(payloads: Sequence[Tensor], out: Tensor, scales: Tensor, order: Tensor, outliers: int, divisor: int) -> None:
    """The reference's numbers."""
    _sum(tuple(payloads), out, scales, order, outliers, divisor, False)


def _sum(
    payloads: tuple[Tensor, ...], out: Tensor, scales: Tensor, order: Tensor, outliers: int,
    divisor: int, accumulate: bool,
) -> None:  # fmt: skip
    rows, features = out.shape
    layout = feature_int4_layout(rows, features, outliers)
    launch(
        _decode, *_shape(rows, features, outliers), out, payloads, scales, order,
        rows, features, outliers, divisor, *starts(layout, "codes"),
        RANKS=len(payloads), DIVIDE=divisor > 1, ACCUMULATE=accumulate,
    )  # fmt: skip


def _shape(rows: int, features: int, outliers: int) -> tuple[int, int, dict[str, int]]:
    """Programs, warps, and the shape of a program's tensors."""
    columns = ceil_div((features - outliers + 1) // 2, WIDTH) + ceil_div(outliers, WIDTH)
    return ceil_div(rows, ROWS) * columns, WARPS, {"ROWS": ROWS, "WIDTH": WIDTH}


@triton.jit
def _place(rows, features, outliers, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's rows (ROWS, 1); which bytes or, if negative, outliers it takes; a row's bytes and its rest."""
    rest = features - outliers
    half = (rest + 1) // 2
    of_codes, of_outliers = tl.cdiv(half, WIDTH), tl.cdiv(outliers, WIDTH)
    columns = of_codes + of_outliers
    row = (tl.program_id(0) // columns).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % columns
    return row, tl.where(column < of_codes, column, of_codes - 1 - column), half, rest


@triton.jit
def _coded(x, inverse, row, feature, features, keep, exists):
    """Codes of the features (1, WIDTH) of some rows as bits, and which of them are beyond."""
    y = widened(tl.load(x + row * features + feature, mask=keep, other=0.0))
    v = y * tl.load(inverse + feature, mask=exists, other=0.0)
    beyond = keep & ((tl.abs(v) < BEYOND_) == 0)
    v = tl.minimum(tl.maximum(v, -LIMIT_ * 1.0), LIMIT_ * 1.0)
    finite = (bits_of(y) & 0x7FFFFFFF) < 0x7F800000
    v = tl.where(finite, v, NAN_CODE_ * 1.0)
    return bits_of(v + SIGNED) & 15, beyond


@triton.jit(do_not_specialize=["rows", "codes_16", "features_end"])
def _encode(
    x, payload, inverse, order, clipped, rows, features, outliers, codes_16, features_end,
    COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column, half, rest = _place(rows, features, outliers, ROWS, WIDTH)
    lane = tl.arange(0, WIDTH)[None, :]
    if column >= 0:
        j = column * WIDTH + lane
        first, second = j < half, j + half < rest
        low = tl.load(order + j, mask=first, other=0)
        high = tl.load(order + j + half, mask=second, other=0)
        keep = (row < rows) & first
        a, over = _coded(x, inverse, row, low, features, keep, first)
        b, over_too = _coded(x, inverse, row, high, features, keep & second, second)
        b = tl.where(second, b, 0)
        to = section(payload, codes_16) + row * half + j
        tl.store(to, (a | (b << 4)).to(tl.uint8), mask=keep)
        count = tl.sum(over.to(tl.int64)) + tl.sum(over_too.to(tl.int64))
    else:
        j = (-1 - column) * WIDTH + lane
        exists = j < outliers
        feature = tl.load(order + rest + j, mask=exists, other=0)
        keep = (row < rows) & exists
        y = widened(tl.load(x + row * features + feature, mask=keep, other=0.0))
        finite = (bits_of(y) & 0x7FFFFFFF) < 0x7F800000
        y = tl.where(finite, tl.minimum(tl.maximum(y, -MOST), MOST), y)
        bits = tl.where(y == y, bits_of(round_bf16(y)) >> 16, NAN_BF16_)
        place = payload.to(tl.pointer_type(tl.int16)) + row * outliers + j
        tl.store(place, bits.to(tl.int16), mask=keep)
        count = tl.sum((keep & (finite == 0)).to(tl.int64))
    if COUNT:
        tl.atomic_add(clipped, count)
    if tl.program_id(0) == 0:
        zero_gap(payload, features_end, codes_16)


@triton.jit
def _number(bits, scale):
    """What a code's four bits stand for."""
    code = (bits ^ 8) - 8
    value = code.to(tl.float32) * scale
    return tl.where(code == NAN_CODE_, float("nan"), value)


@triton.jit
def _give(value, out, row, feature, features, keep, divisor, DIVIDE: tl.constexpr, ACCUMULATE: tl.constexpr):
    if DIVIDE:
        value = tl.div_rn(value, tl.full(value.shape, 1.0, tl.float32) * divisor)
    to = out + row * features + feature
    if ACCUMULATE:
        value = widened(tl.load(to, mask=keep, other=0.0)) + value
    tl.store(to, narrowed(value, out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows", "divisor", "codes_16"])
def _decode(
    out, payloads, scales, order, rows, features, outliers, divisor, codes_16,
    RANKS: tl.constexpr, DIVIDE: tl.constexpr, ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column, half, rest = _place(rows, features, outliers, ROWS, WIDTH)
    lane = tl.arange(0, WIDTH)[None, :]
    if column >= 0:
        j = column * WIDTH + lane
        first, second = j < half, j + half < rest
        low = tl.load(order + j, mask=first, other=0)
        high = tl.load(order + j + half, mask=second, other=0)
        keep = (row < rows) & first
        at = row * half + j
        both = tl.load(section(payloads[0], codes_16) + at, mask=keep, other=0).to(tl.int32)
        y = _number(both & 15, tl.load(scales + low, mask=first, other=0.0))
        z = _number(both >> 4, tl.load(scales + high, mask=second, other=0.0))
        for r in tl.static_range(1, RANKS):
            both = tl.load(section(payloads[r], codes_16) + at, mask=keep, other=0).to(tl.int32)
            mine = scales + r * features
            y += _number(both & 15, tl.load(mine + low, mask=first, other=0.0))
            z += _number(both >> 4, tl.load(mine + high, mask=second, other=0.0))
        _give(y, out, row, low, features, keep, divisor, DIVIDE, ACCUMULATE)
        _give(z, out, row, high, features, keep & second, divisor, DIVIDE, ACCUMULATE)
    else:
        j = (-1 - column) * WIDTH + lane
        exists = j < outliers
        feature = tl.load(order + rest + j, mask=exists, other=0)
        keep = (row < rows) & exists
        at = row * outliers + j
        bits = tl.load(payloads[0].to(tl.pointer_type(tl.int16)) + at, mask=keep, other=0)
        y = of_bits(bits.to(tl.int32) << 16)
        for r in tl.static_range(1, RANKS):
            bits = tl.load(payloads[r].to(tl.pointer_type(tl.int16)) + at, mask=keep, other=0)
            y += of_bits(bits.to(tl.int32) << 16)
        _give(y, out, row, feature, features, keep, divisor, DIVIDE, ACCUMULATE)
