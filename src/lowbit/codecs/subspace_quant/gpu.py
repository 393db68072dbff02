"""`SubspaceQuant` on a GPU: one launch for each function, no scratch memory, no synchronization.

A program processes whole tokens: with a lane for each token's coefficients, or for each group of the remainder.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.basis.reference import FARTHEST
from lowbit.codecs.subspace_quant import reference
from lowbit.codecs.subspace_quant.layout import SubspaceGeometry
from lowbit.codecs.subspace_quant.reference import NAN_STEP, ZERO_STEP
from lowbit.kernels.exact import LARGEST, SMALLEST, octave_rounding
from lowbit.kernels.gpu import eighths
from lowbit.kernels.gpu.lanes import lanes, row_maximum, step_of
from lowbit.kernels.gpu.launch import launch, power_of_two_from, starts, warn_once, warps_for
from lowbit.kernels.gpu.numbers import bits_of, inverse_of, number_of, of_bits, round_signed, section
from lowbit.kernels.layout import ceil_div

LARGEST_, SMALLEST_, FARTHEST_ = (tl.constexpr(v) for v in (LARGEST, SMALLEST, FARTHEST))
ZERO_STEP_, NAN_STEP_ = tl.constexpr(ZERO_STEP), tl.constexpr(NAN_STEP)
COEFFICIENTS = 4096  # that a program holds in registers
ELEMENTS, GROUPS = 16384, 256  # the same for the remainder, but at least one token
WIDEST = 1 << 17  # elements of a token, its groups rounded up: more do not fit into a program's registers
TOO_WIDE = f"tokens of {{}} elements in groups of {{}} take the slow reference path: the kernels hold up to {WIDEST}"


def coefficients_encode(c: Tensor, unit: Tensor, payload: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's bytes."""
    places = starts(geo.layout, "factors", "coefficients")
    launch(_encode_coefficients, *_row_shape(geo), c, unit, payload, out, geo.rows, *places)


def coefficients_decode(payload: Tensor, unit: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's numbers."""
    places = starts(geo.layout, "factors", "coefficients")
    launch(_decode_coefficients, *_row_shape(geo), payload, unit, out, geo.rows, *places)


def rest_encode(x: Tensor, c: Tensor, directions: Tensor, payload: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's bytes, but for the last bits of sums."""
    shape = _group_shape(geo)
    if shape is None:
        warn_once(TOO_WIDE.format(geo.channels, geo.group))
        reference.rest_encode(x, c, directions, payload, geo)
        return
    launch(
        _encode_rest, *shape, x, c @ directions, payload, geo.rows, *starts(geo.layout, "exponents", "steps", "codes"),
        BITS=geo.bits, ROUNDING=octave_rounding(geo.bits),
    )  # fmt: skip


def rest_decode(payload: Tensor, c: Tensor, directions: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's numbers, but for the last bits of sums."""
    shape = _group_shape(geo)
    if shape is None:
        warn_once(TOO_WIDE.format(geo.channels, geo.group))
        reference.rest_decode(payload, c, directions, out, geo)
        return
    # Add the remainder in place if possible, so that no other memory of this size is needed.
    base = torch.mm(c, directions, out=out if out.dtype == torch.float32 else None)
    places = starts(geo.layout, "exponents", "steps", "codes")
    launch(_decode_rest, *shape, payload, base, out, geo.rows, *places, BITS=geo.bits)


def _row_shape(geo: SubspaceGeometry) -> tuple[int, int, dict[str, int]]:
    """Programs, warps, and the shape of a program's tensors."""
    width = power_of_two_from(geo.directions)
    at_once = max(1, COEFFICIENTS // width)
    shape = {"K": geo.directions, "ROWS": at_once, "WIDTH": width}
    return ceil_div(geo.rows, at_once), warps_for(at_once * width // 2), shape


def _group_shape(geo: SubspaceGeometry) -> tuple[int, int, dict[str, int]] | None:
    """Programs, warps and shape of a program for the remainder; None if a token does not fit into one."""
    width = power_of_two_from(geo.group // 8)
    # Independent of the number of tokens, so that a shorter message needs no other kernels.
    rows = max(1, min(GROUPS, ELEMENTS // (8 * width)) // geo.groups)
    lanes = power_of_two_from(rows * geo.groups)
    if 8 * lanes * width > WIDEST:
        return None
    shape = {
        "C": geo.channels, "GROUP": geo.group, "G": geo.groups, "ROW_BYTES": geo.row_bytes,
        "ROWS": rows, "LANES": lanes, "RP": power_of_two_from(rows), "WIDTH": width,
    }  # fmt: skip
    return ceil_div(geo.rows, rows), warps_for(lanes * width), shape


@triton.jit
def _place(rows, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's rows (ROWS,), and their coefficients' indices (1, WIDTH), offsets, and mask of those that exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)[None, :]
    return row, k, row[:, None] * K + k, (row < rows)[:, None] & (k < K)


@triton.jit(do_not_specialize=["rows", "factors_16", "coefficients_16"])
def _encode_coefficients(
    c, unit, payload, out, rows, factors_16, coefficients_16,
    K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, k, at, keep = _place(rows, K, ROWS, WIDTH)
    value = tl.load(c + at, mask=keep, other=0.0)
    size = tl.load(unit + k, mask=k < K, other=0.0)
    far = tl.max(((tl.abs(value) <= FARTHEST_) == 0).to(tl.int32), axis=1)  # NaN, too
    value = tl.where((far == 0)[:, None] & (size > 0), value * inverse_of(size), 0.0)
    most = tl.max(tl.abs(value), axis=1)
    coded = (most >= SMALLEST_) & (most <= FARTHEST_)
    above = (bits_of(most) + 0xFFFF) & -0x10000
    factor = of_bits(tl.where(coded, above, 0))
    value = tl.where(coded[:, None], value, 0.0)
    q = round_signed(value * (inverse_of(factor) * 127.0)[:, None])
    q = tl.minimum(tl.maximum(q, -127.0), 127.0)

    factors = section(payload, factors_16).to(tl.pointer_type(tl.int16))
    tl.store(factors + row, (bits_of(factor) >> 16).to(tl.int16), mask=row < rows)
    codes = section(payload, coefficients_16)
    tl.store(codes + at, q.to(tl.int32).to(tl.uint8), mask=keep)
    tl.store(out + at, q * (factor * (1 / 127))[:, None] * size, mask=keep)


@triton.jit(do_not_specialize=["rows", "factors_16", "coefficients_16"])
def _decode_coefficients(
    payload, unit, out, rows, factors_16, coefficients_16,
    K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, k, at, keep = _place(rows, K, ROWS, WIDTH)
    factors = section(payload, factors_16).to(tl.pointer_type(tl.int16))
    factor = of_bits(tl.load(factors + row, mask=row < rows, other=0).to(tl.int32) << 16)
    size = tl.load(unit + k, mask=k < K, other=0.0)
    codes = section(payload, coefficients_16).to(tl.pointer_type(tl.int8))
    q = tl.load(codes + at, mask=keep, other=0).to(tl.float32)
    tl.store(out + at, q * (factor * (1 / 127))[:, None] * size, mask=keep)


@triton.jit
def _codes_start(
    first, row, t, C: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, ROW_BYTES: tl.constexpr,
    BITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Start of each group's codes in their section: (LANES, 1) int64."""
    size: tl.constexpr = GROUP // 8 * BITS
    if C % GROUP > 0:
        return ((first + row) * ROW_BYTES + t * size)[:, None]
    else:  # in a form that shows the compiler their alignment
        return ((first * G + tl.arange(0, LANES)) * size)[:, None]


@triton.jit(do_not_specialize=["rows", "exponents_16", "steps_16", "codes_16"])
def _encode_rest(
    x, base, payload, rows, exponents_16, steps_16, codes_16,
    BITS: tl.constexpr, ROUNDING: tl.constexpr,
    C: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, ROW_BYTES: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, RP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    RAGGED: tl.constexpr = C % GROUP > 0
    first, row, t, exists, j, at, count, v, keep = lanes(rows, C, GROUP, G, ROWS, LANES, WIDTH)
    tokens = eighths.load(x, at, v, keep, count, j, RAGGED)
    bases = eighths.load(base, at, v, keep, count, j, RAGGED)
    parts = ()
    for k in tl.static_range(8):
        parts = parts + (tokens[k] - bases[k],)
    low, high, finite = eighths.extremes(parts, v, keep, count, j, RAGGED)
    extent = tl.maximum(tl.minimum(high, LARGEST_), -tl.maximum(low, -LARGEST_))
    octave = (bits_of(tl.maximum(extent * 2.0 ** (1 - BITS), SMALLEST_)) + ROUNDING) >> 19
    octave = tl.where(finite & exists & (extent > 0), octave, 0)
    exponent = row_maximum(octave, row, G, ROWS, LANES, RP) >> 4
    below = tl.minimum(tl.maximum(exponent * 16 + 15 - octave, 0), NAN_STEP_ - 1)
    below = tl.where(octave > 0, below, ZERO_STEP_)
    inverse = inverse_of(of_bits(step_of(below, exponent)))
    top = tl.where(octave > 0, 2.0**BITS - 1, 0.0)

    tl.store(section(payload, exponents_16) + first + row, exponent.to(tl.uint8), mask=exists & (t == 0))
    steps = section(payload, steps_16) + first * G + tl.arange(0, LANES)
    tl.store(steps, tl.where(finite, below, NAN_STEP_).to(tl.uint8), mask=exists)
    codes = eighths.codes_of(parts, inverse[:, None], (2.0**BITS - 1) / 2, top[:, None], v, count, j, RAGGED)
    start = _codes_start(first, row, t, C, GROUP, G, ROW_BYTES, BITS, LANES)
    to = section(payload, codes_16) + start + j
    eighths.store_codes(to, codes, v, tl.full((1, 1), BITS, tl.int32), keep, BITS)


@triton.jit(do_not_specialize=["rows", "exponents_16", "steps_16", "codes_16"])
def _decode_rest(
    payload, base, out, rows, exponents_16, steps_16, codes_16,
    BITS: tl.constexpr,
    C: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, ROW_BYTES: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, RP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    RAGGED: tl.constexpr = C % GROUP > 0
    first, row, t, exists, j, at, count, v, keep = lanes(rows, C, GROUP, G, ROWS, LANES, WIDTH)
    exponents = section(payload, exponents_16) + first + row
    exponent = tl.load(exponents, mask=exists, other=0).to(tl.int32)
    steps = section(payload, steps_16) + first * G + tl.arange(0, LANES)
    below = tl.load(steps, mask=exists, other=0).to(tl.int32)
    step = of_bits(tl.where(below == NAN_STEP_, 0x7FC00000, step_of(below, exponent)))
    start = _codes_start(first, row, t, C, GROUP, G, ROW_BYTES, BITS, LANES)
    at_codes = section(payload, codes_16) + start + j
    codes = eighths.load_codes(at_codes, v, tl.full((1, 1), BITS, tl.int32), keep, BITS)
    bases = eighths.load(base, at, v, keep, count, j, RAGGED)
    y = ()
    for k in tl.static_range(8):
        y = y + (bases[k] + (number_of(codes[k]) - (2.0**BITS - 1) / 2) * step[:, None],)
    eighths.store_numbers(y, out, at, v, keep, count, j, RAGGED, False)
