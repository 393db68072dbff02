"""`SubspaceQuant` on the CPU, token by token; `lowbit.codecs.basis` renews the basis.

The remainder is never written out, nor is the part along the directions, unless there are many directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.basis.reference import FARTHEST
from lowbit.codecs.subspace_quant.layout import SubspaceGeometry
from lowbit.codecs.subspace_quant.reference import NAN_STEP, ZERO_STEP
from lowbit.kernels.cpu.jit import helper, kernel, summing
from lowbit.kernels.cpu.lines import FLOAT32, KINDS, narrow, widen
from lowbit.kernels.cpu.memory import get_byte, get_float, get_half, get_int, put_byte, put_float, put_half, put_int
from lowbit.kernels.cpu.operations import (
    bits_float,
    float_bits,
    from_bf16,
    greater,
    greater32,
    key_value,
    lesser,
    lesser32,
    magnitude,
    power_of_two,
    round_signed,
    step_below,
    steps_below,
    truncate,
)
from lowbit.kernels.cpu.runs import HALF, LARGEST, ONE, SMALLEST, ZERO, are_finite, decode_run, encode_run, put_extremes
from lowbit.kernels.cpu.threads import over_rows
from lowbit.kernels.cpu.vectors import add
from lowbit.kernels.exact import octave_rounding

FAR, NAN = np.float32(FARTHEST), np.float32(np.nan)
NEAR = 1 << 18  # bytes of directions that fit a core's cache; with more, PyTorch's products are faster
STEPS, STEP = np.float32(127), np.float32(1 / 127)


def coefficients_encode(c: Tensor, unit: Tensor, payload: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's bytes."""
    at, start = geo.layout.offsets, payload.data_ptr()

    def work(first: int, last: int) -> None:
        scratch = torch.empty(8 * geo.directions, dtype=torch.uint8, device="cpu")
        _encode_coefficients(
            c.data_ptr(), unit.data_ptr(), start + at["factors"], start + at["coefficients"],
            out.data_ptr(), geo.directions, scratch.data_ptr(), first, last,
        )  # fmt: skip

    over_rows(work, geo.rows, c.nbytes)


def coefficients_decode(payload: Tensor, unit: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's numbers."""
    at, start = geo.layout.offsets, payload.data_ptr()

    def work(first: int, last: int) -> None:
        _decode_coefficients(
            start + at["factors"], start + at["coefficients"], unit.data_ptr(), out.data_ptr(),
            geo.directions, first, last,
        )  # fmt: skip

    over_rows(work, geo.rows, out.nbytes)


def rest_encode(x: Tensor, c: Tensor, directions: Tensor, payload: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's bytes, but for the last bits of sums."""
    at, start = geo.layout.offsets, payload.data_ptr()
    base = None if directions.nbytes <= NEAR else c @ directions

    def work(first: int, last: int) -> None:
        scratch = torch.empty(8 * geo.channels + 8 * geo.groups + geo.group, dtype=torch.uint8, device="cpu")
        _encode_rest(
            x.data_ptr(), KINDS[x.dtype], c.data_ptr(), directions.data_ptr(), geo.directions, _address(base),
            start + at["exponents"], start + at["steps"], start + at["codes"], geo.channels, geo.group, geo.groups,
            geo.row_bytes, geo.bits, octave_rounding(geo.bits), scratch.data_ptr(), first, last,
        )  # fmt: skip

    over_rows(work, geo.rows, x.nbytes)


def rest_decode(payload: Tensor, c: Tensor, directions: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """The reference's numbers, but for the last bits of sums."""
    at, start = geo.layout.offsets, payload.data_ptr()
    into = out if out.dtype == torch.float32 else None
    base = None if directions.nbytes <= NEAR else torch.mm(c, directions, out=into)

    def work(first: int, last: int) -> None:
        scratch = torch.empty(8 * geo.channels + geo.group, dtype=torch.uint8, device="cpu")
        _decode_rest(
            start + at["exponents"], start + at["steps"], start + at["codes"],
            c.data_ptr(), directions.data_ptr(), geo.directions, _address(base), out.data_ptr(), KINDS[out.dtype],
            geo.channels, geo.group, geo.groups, geo.row_bytes, geo.bits, scratch.data_ptr(), first, last,
        )  # fmt: skip

    over_rows(work, geo.rows, out.nbytes)


def _address(base: Tensor | None) -> int:
    """Address of precomputed sums; 0 if the kernel computes them."""
    return 0 if base is None else base.data_ptr()


@kernel
def _encode_coefficients(c, unit, factors, codes, out, rank, line, start, stop) -> None:
    each = line + 4 * rank  # one over a direction's unit
    for k in range(rank):
        size = get_float(unit, k)
        put_float(each, k, ONE / size if size > ZERO else ZERO)
    for row in range(start, stop):
        first = row * rank
        most, usable = ZERO, True
        for k in range(rank):
            value, factor = get_float(c, first + k), get_float(each, k)
            usable = usable and magnitude(value) <= FAR
            value = value * factor if factor > ZERO else ZERO
            put_float(line, k, value)
            most = greater(magnitude(value), most)
        factor = ZERO
        if usable and SMALLEST <= most <= FAR:
            factor = bits_float((float_bits(most) + 0xFFFF) & -0x10000)
        put_half(factors, row, float_bits(factor) >> 16)
        inverse = STEPS * (ONE / (factor if factor > ZERO else ONE))
        for k in range(rank):
            value = get_float(line, k) if factor > ZERO else ZERO
            q = lesser(greater(round_signed(value * inverse), -STEPS), STEPS)
            put_byte(codes, first + k, truncate(q))
            put_float(out, first + k, q * (factor * STEP) * get_float(unit, k))


@kernel
def _decode_coefficients(factors, codes, unit, out, rank, start, stop) -> None:
    for row in range(start, stop):
        first, step = row * rank, from_bf16(get_half(factors, row)) * STEP
        for k in range(rank):
            q = np.float32(np.int8(get_byte(codes, first + k)))
            put_float(out, first + k, q * step * get_float(unit, k))


@kernel
def _encode_rest(
    source, kind, c, directions, rank, base, exponents, steps, planes,
    channels, group, groups, row_bytes, bits, rounding, scratch, start, stop,
) -> None:  # fmt: skip
    line, sums = scratch, scratch + 4 * channels
    low, high = sums + 4 * channels, sums + 4 * channels + 4 * groups
    codes = high + 4 * groups
    last = power_of_two(bits) - ONE
    for row in range(start, stop):
        first = row * channels
        if base:
            sums = base + 4 * first
        else:
            _combine(c + 4 * row * rank, directions, rank, channels, sums)
        if kind == FLOAT32:
            for j in range(channels):
                put_float(line, j, get_float(source, first + j) - get_float(sums, j))
        else:
            widen(source, kind, first, channels, line)
            for j in range(channels):
                put_float(line, j, get_float(line, j) - get_float(sums, j))
        for g in range(groups):
            count = min(group, channels - g * group)
            put_extremes(line + 4 * g * group, count, low + 4 * g, high + 4 * g)
        top = _put_octaves(low, high, groups, bits, rounding)
        put_byte(exponents, row, top >> 4)
        top |= 15
        to = planes + row * row_bytes
        for g in range(groups):
            octave, at = get_int(low, g), row * groups + g
            below = np.int64(steps_below(lesser32(octave, greater32(octave, 0)), top))
            below = ZERO_STEP if octave == 0 else min(below, NAN_STEP - 1)
            put_byte(steps, at, below if octave >= 0 else NAN_STEP)
            step = step_below(below, top) if octave > 0 else ZERO
            inverse = ONE / (step if octave > 0 else ONE)
            count = min(group, channels - g * group)
            limit = last if octave > 0 else ZERO
            to = encode_run(line + 4 * g * group, count, inverse, last * HALF, limit, bits, to, codes)


@summing
def _combine(c, directions, rank, channels, sums) -> None:
    """Compute a token's sum of directions, four at a time, so that sums are read less often."""
    whole, each = rank & -4, 4 * channels
    for j in range(channels):
        put_float(sums, j, ZERO)
    for k in range(0, whole, 4):
        v = directions + k * each
        a, b, d, e = get_float(c, k), get_float(c, k + 1), get_float(c, k + 2), get_float(c, k + 3)
        for j in range(channels):
            put_float(
                sums, j, get_float(sums, j)
                + a * get_float(v, j) + b * get_float(v + each, j)
                + d * get_float(v + 2 * each, j) + e * get_float(v + 3 * each, j),
            )  # fmt: skip
    for k in range(whole, rank):
        add(sums, directions + k * each, get_float(c, k), channels)


@helper
def _put_octaves(low, high, groups, bits, rounding) -> Any:
    """Replace groups' minimum keys by steps in sixteenths of an octave (0: zeros, -1: not finite); return the most."""
    most = np.int32(0)
    share = power_of_two(1 - bits)
    for g in range(groups):
        a, b = get_int(low, g), get_int(high, g)
        extent = greater(lesser(key_value(b), LARGEST), -greater(key_value(a), -LARGEST))
        n = np.int32((float_bits(greater(extent * share, SMALLEST)) + rounding) >> 19)
        n = n if extent > ZERO else np.int32(0)
        n = n if are_finite(a, b) else np.int32(-1)
        put_int(low, g, n)
        most = greater32(most, n)
    return np.int64(most)


@kernel
def _decode_rest(
    exponents, steps, planes, c, directions, rank, base, target, kind,
    channels, group, groups, row_bytes, bits, scratch, start, stop,
) -> None:  # fmt: skip
    line, sums = scratch, scratch + 4 * channels
    codes = sums + 4 * channels
    offset = -(power_of_two(bits) - ONE) * HALF
    for row in range(start, stop):
        first, at = row * channels, planes + row * row_bytes
        top = np.int64(get_byte(exponents, row)) * 16 + 15
        for g in range(groups):
            below, count = get_byte(steps, row * groups + g), min(group, channels - g * group)
            step = NAN if below == NAN_STEP else step_below(below, top)
            at = decode_run(at, count, bits, offset, step, line + 4 * g * group, codes)
        if base:
            sums = base + 4 * first
        else:
            _combine(c + 4 * row * rank, directions, rank, channels, sums)
        for j in range(channels):
            put_float(line, j, get_float(sums, j) + get_float(line, j))
        narrow(line, target, kind, first, channels, False)
