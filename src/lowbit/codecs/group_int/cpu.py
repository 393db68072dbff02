"""`GroupInt` on the CPU: one pass, block by block of groups."""

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.group_int.reference import NAN_SCALE, group_int_layout
from lowbit.kernels.cpu.jit import helper, kernel, over_rows
from lowbit.kernels.cpu.lines import FLOAT32, KINDS, narrow, sections, widen, zero_gaps
from lowbit.kernels.cpu.memory import get_float, get_half, get_int, put_byte, put_float, put_half, put_int
from lowbit.kernels.cpu.operations import (
    HALF,
    ONE,
    ZERO,
    code_below,
    float_bits,
    from_bf16,
    greater,
    key_value,
    lesser,
    magnitude,
    power_of_two,
    round_bf16,
    round_signed,
    truncate,
    uniform,
)
from lowbit.kernels.cpu.runs import (
    LARGEST,
    SMALLEST,
    are_finite,
    decode_run,
    encode_run,
    pack,
    put_extremes,
)
from lowbit.kernels.layout import ceil_div

BLOCK = 4096  # elements whose parameters are computed together: few enough to stay in the first cache


def encode(x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool, seed: int | None) -> None:
    """Encode; the bytes equal those of `reference.encode`."""
    layout = group_int_layout(x.numel(), bits, group, symmetric)
    at = sections(payload, layout)
    zero_gaps(payload, layout)
    per_block = max(1, BLOCK // group)

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(per_block * (24 + 4 * group) + group, dtype=torch.uint8)
        encode_groups(
            x.data_ptr(), KINDS[x.dtype], x.numel(), at["scales"], at["mids"], at["codes"],
            bits, group, symmetric, seed is not None, (seed or 0) % 2**32,
            per_block, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(x.numel(), group), x.nbytes)


def decode(payload: Tensor, out: Tensor, bits: int, group: int, symmetric: bool, accumulate: bool) -> None:
    """The reference's numbers."""
    at = sections(payload, group_int_layout(out.numel(), bits, group, symmetric))

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(5 * group, dtype=torch.uint8)
        decode_groups(
            at["scales"], at["mids"], at["codes"], out.data_ptr(), KINDS[out.dtype], out.numel(),
            bits, group, symmetric, accumulate, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(out.numel(), group), out.nbytes)


@kernel
def encode_groups(
    source, kind, total, scales, mids, planes,
    bits, group, symmetric, stochastic, seed, per_block, scratch, start, stop,
) -> None:  # fmt: skip
    """Encode the groups from `start` to `stop`, `per_block` at a time, of the `total` elements from `source` on."""
    low, high, middle = scratch, scratch + 4 * per_block, scratch + 8 * per_block
    inverse, shift, top = middle + 4 * per_block, middle + 8 * per_block, middle + 12 * per_block
    line = top + 4 * per_block
    codes = line + 4 * per_block * group
    for first in range(start, stop, per_block):
        groups, begin = min(per_block, stop - first), first * group
        length = min(groups * group, total - begin)
        x = source + 4 * begin
        if kind != FLOAT32:
            widen(source, kind, begin, length, line)
            x = line
        for g in range(groups):
            count = min(group, length - g * group)
            put_extremes(x + 4 * g * group, count, low + 4 * g, high + 4 * g)
        _parameters(low, high, groups, bits, symmetric, inverse, shift, top, scales + 2 * first, middle)
        if not symmetric:
            for g in range(groups):
                put_half(mids, first + g, get_int(middle, g))
        for g in range(groups):
            count = min(group, length - g * group)
            at, to = x + 4 * g * group, planes + (first + g) * (group >> 3) * bits
            factor, added, limit = get_float(inverse, g), get_float(shift, g), get_float(top, g)
            if stochastic:
                for j in range(count):
                    v = get_float(at, j) * factor + added
                    v += uniform(begin + g * group + j, seed)
                    put_byte(codes, j, code_below(v, limit))
                for j in range(count, (count + 7) & -8):
                    put_byte(codes, j, 0)
                pack(codes, (count + 7) & -8, bits, to)
            else:
                encode_run(at, count, factor, added, limit, bits, to, codes)


@helper
def _parameters(low, high, groups, bits, symmetric, inverse, shift, top, scales, middle):
    """Compute each group's scale as it is sent, its inverse, middle, the addend to x / scale, and the largest code."""
    cells, center = power_of_two(bits), power_of_two(bits - 1) - (ONE if symmetric else HALF)
    share, reach = ONE / center, center / (np.float32(127) * cells)
    unit, units = cells / np.float32(256), np.float32(256) / cells
    for g in range(groups):
        least = greater(key_value(get_int(low, g)), -LARGEST)
        most = lesser(key_value(get_int(high, g)), LARGEST)
        mid = ZERO if symmetric else most * HALF + least * HALF
        half = most * HALF - least * HALF
        extent = greater(most, -least) if symmetric else greater(half, magnitude(mid) * reach)
        scale = round_bf16(greater(extent * share, SMALLEST))
        scale = scale if extent > ZERO else ZERO
        factor = ONE / (scale if scale > ZERO else ONE)
        m = lesser(greater(round_signed(mid * factor * units), -32767), 32767)
        finite = are_finite(get_int(low, g), get_int(high, g))
        put_half(scales, g, float_bits(scale) >> 16 if finite else NAN_SCALE)
        put_int(middle, g, truncate(m) if finite else 0)
        put_float(inverse, g, factor)
        put_float(shift, g, center - m * unit)
        put_float(top, g, center + center if finite else ZERO)


@kernel
def decode_groups(
    scales, mids, planes, target, kind, total,
    bits, group, symmetric, accumulate, scratch, start, stop,
) -> None:  # fmt: skip
    """Decode the groups from `start` to `stop`."""
    line, codes = scratch, scratch + 4 * group
    center, unit = power_of_two(bits - 1) - (ONE if symmetric else HALF), power_of_two(bits - 8)
    for g in range(start, stop):
        begin, at = g * group, planes + g * (group >> 3) * bits
        count = min(group, total - begin)
        scale, offset = from_bf16(get_half(scales, g)), -center
        if not symmetric:
            offset += np.float32(np.int16(get_half(mids, g))) * unit
        if kind == FLOAT32 and not accumulate:
            decode_run(at, count, bits, offset, scale, target + 4 * begin, codes)
        else:
            decode_run(at, count, bits, offset, scale, line, codes)
            narrow(line, target, kind, begin, count, accumulate)
