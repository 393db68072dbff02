"""`group_int_encode` and `group_int_decode` (see `lowbit.codecs.GroupInt`): one pass, block by block of groups."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.ops.cpu.jit import helper, kernel
from lowbit.ops.cpu.lines import FLOAT32, KINDS, narrow, sections, widen, zero_gaps
from lowbit.ops.cpu.memory import (
    get_float,
    get_half,
    get_int,
    put_byte,
    put_float,
    put_half,
    put_int,
)
from lowbit.ops.cpu.operations import (
    code_below,
    float_bits,
    from_bf16,
    greater,
    key_value,
    lesser,
    magnitude,
    round_bf16,
    round_signed,
    uniform,
)
from lowbit.ops.cpu.threads import over_rows
from lowbit.ops.cpu.tiles import (
    HALF,
    LARGEST,
    ONE,
    SMALLEST,
    ZERO,
    are_finite,
    decode_run,
    encode_run,
    extremes,
    pack,
)
from lowbit.ops.layout import ceil_div, group_int_layout
from lowbit.ops.reference import NAN_SCALE

BLOCK = 4096  # elements whose parameters are computed together: they stay in the first cache


def group_int_encode(
    x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool, seed: int | None
) -> None:
    """The reference's bytes."""
    layout = group_int_layout(x.numel(), bits, group, symmetric)
    at = sections(payload, layout)
    zero_gaps(payload, layout)
    per_block = max(1, BLOCK // group)

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(per_block * (16 + 4 * group) + group, dtype=torch.uint8)
        _encode(
            x.data_ptr(), KINDS[x.dtype], x.numel(), at["scales"], at["mids"], at["codes"],
            bits, group, symmetric, seed is not None, (seed or 0) % 2**32,
            per_block, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(x.numel(), group), x.nbytes)


def group_int_decode(
    payload: Tensor, out: Tensor, bits: int, group: int, symmetric: bool, accumulate: bool
) -> None:
    """The reference's numbers."""
    at = sections(payload, group_int_layout(out.numel(), bits, group, symmetric))

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(5 * group, dtype=torch.uint8)
        _decode(
            at["scales"], at["mids"], at["codes"], out.data_ptr(), KINDS[out.dtype], out.numel(),
            bits, group, symmetric, accumulate, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(out.numel(), group), out.nbytes)


@kernel
def _encode(
    source, kind, total, scales, mids, planes,
    bits, group, symmetric, stochastic, seed, per_block, scratch, start, stop,
) -> None:  # fmt: skip
    low, high = scratch, scratch + 4 * per_block
    step, shift = high + 4 * per_block, high + 8 * per_block
    line = high + 12 * per_block
    codes = line + 4 * per_block * group
    center = np.float32(2.0 ** (bits - 1) - 1 if symmetric else (2.0**bits - 1) / 2)
    top = np.float32(2) * center
    for first in range(start, stop, per_block):
        groups, begin = min(per_block, stop - first), first * group
        length = min(groups * group, total - begin)
        x = source + 4 * begin
        if kind != FLOAT32:
            widen(source, kind, begin, length, line)
            x = line
        for g in range(groups):
            count = min(group, length - g * group)
            least, most = extremes(x + 4 * g * group, count)
            put_int(low, g, least)
            put_int(high, g, most)
        _parameters(
            low, high, groups, bits, symmetric, center, step, shift,
            scales + 2 * first, mids + 2 * first,
        )  # fmt: skip
        for g in range(groups):
            count = min(group, length - g * group)
            at, to = x + 4 * g * group, planes + (first + g) * (group >> 3) * bits
            divisor, added = get_float(step, g), get_float(shift, g)
            limit = top if are_finite(get_int(low, g), get_int(high, g)) else ZERO
            if stochastic:
                for j in range(count):
                    v = get_float(at, j) / divisor + added
                    v += uniform(begin + g * group + j, seed)
                    put_byte(codes, j, code_below(v, limit))
                pack(codes, count, bits, to)
            else:
                encode_run(at, count, divisor, added, limit, bits, to, codes)


@helper
def _parameters(low, high, groups, bits, symmetric, center, step, shift, scales, mids):
    """Each group's scale and middle, as they are divided by and as they travel."""
    reach = np.float32(center / (127 * 2.0**bits))
    unit = np.float32(2.0**bits / 256)
    for g in range(groups):
        least = greater(key_value(get_int(low, g)), -LARGEST)
        most = lesser(key_value(get_int(high, g)), LARGEST)
        mid = ZERO if symmetric else most * HALF + least * HALF
        half = most * HALF - least * HALF
        extent = greater(most, -least) if symmetric else greater(half, magnitude(mid) * reach)
        scale = round_bf16(greater(extent / center, SMALLEST)) if extent > ZERO else ZERO
        divisor = scale if scale > ZERO else ONE
        m = round_signed(mid / divisor * (ONE / unit))
        m = lesser(greater(m, -32767), 32767)
        finite = are_finite(get_int(low, g), get_int(high, g))
        put_half(scales, g, float_bits(scale) >> 16 if finite else NAN_SCALE)
        if not symmetric:
            put_half(mids, g, np.int64(m) if finite else 0)
        put_float(step, g, divisor)
        put_float(shift, g, center - m * unit)


@kernel
def _decode(
    scales, mids, planes, target, kind, total,
    bits, group, symmetric, accumulate, scratch, start, stop,
) -> None:  # fmt: skip
    line, codes = scratch, scratch + 4 * group
    center = np.float32(2.0 ** (bits - 1) - 1 if symmetric else (2.0**bits - 1) / 2)
    unit = np.float32(2.0**bits / 256)
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
