"""`group_int_encode` and `group_int_decode` (see `lowbit.codecs.GroupInt`): one pass, block by block of groups."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lowbit.ops.cpu.floats import FLOAT32, as_arrays, store_line, widen, zero_gaps
from lowbit.ops.cpu.jit import get, helper, kernel, put
from lowbit.ops.cpu.operations import (
    bits_float,
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
from lowbit.ops.cpu.planes import load16, pack, store16, unpack
from lowbit.ops.cpu.threads import over_rows
from lowbit.ops.cpu.tiles import (
    HALF,
    LARGEST,
    ONE,
    SMALLEST,
    ZERO,
    are_finite,
    extremes,
    quantize,
    restore,
)
from lowbit.ops.layout import Layout, ceil_div, group_int_layout

BLOCK = 4096  # elements whose parameters are computed together: 16 KB, which stays in the first cache
NAN = 0x7FC0  # as bfloat16


def group_int_encode(
    x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool, seed: int | None
) -> None:
    """The reference's bytes."""
    layout = group_int_layout(x.numel(), bits, group, symmetric)
    floats, halves, kind = as_arrays(x)
    target, at = payload.numpy(), _offsets(layout)
    zero_gaps(target, layout)

    def work(start: int, stop: int) -> None:
        _encode(
            *(floats, halves, kind, x.numel(), target, *at),
            *(bits, group, symmetric, seed is not None, (seed or 0) & (2**32 - 1), start, stop),
        )

    over_rows(work, ceil_div(x.numel(), group), x.nbytes)


def group_int_decode(
    payload: Tensor, out: Tensor, bits: int, group: int, symmetric: bool, accumulate: bool
) -> None:
    """The reference's numbers."""
    layout = group_int_layout(out.numel(), bits, group, symmetric)
    floats, halves, kind = as_arrays(out)
    source, at = payload.numpy(), _offsets(layout)

    def work(start: int, stop: int) -> None:
        _decode(
            *(source, *at, floats, halves, kind, out.numel()),
            *(bits, group, symmetric, accumulate, start, stop),
        )

    over_rows(work, ceil_div(out.numel(), group), out.nbytes)


def _offsets(layout: Layout) -> tuple[int, int, int]:
    return layout.offsets["scales"], layout.offsets["mids"], layout.offsets["codes"]


@kernel
def _encode(
    floats, halves, kind, total, payload, at_scales, at_mids, at_codes,
    bits, group, symmetric, stochastic, seed, start, stop,
):  # fmt: skip
    per_block = max(1, BLOCK // group)
    low, high = np.empty(per_block, np.int32), np.empty(per_block, np.int32)
    step, shift = np.empty(per_block, np.float32), np.empty(per_block, np.float32)
    codes = np.empty(group + 8, np.uint8)
    line = np.empty(0 if kind == FLOAT32 else per_block * group, np.float32)
    center = np.float32(2.0 ** (bits - 1) - 1 if symmetric else (2.0**bits - 1) / 2)
    top = np.float32(2) * center
    for first in range(start, stop, per_block):
        groups, begin = min(per_block, stop - first), first * group
        length = min(groups * group, total - begin)
        x, base = floats, begin
        if kind != FLOAT32:
            widen(halves, kind, begin, length, line)
            x, base = line, 0
        for g in range(groups):
            count = min(group, length - g * group)
            low[g], high[g] = extremes(x, base + g * group, count)
        at = at_scales + 2 * first, at_mids + 2 * first
        _parameters(low, high, groups, bits, symmetric, center, step, shift, payload, at)
        for g in range(groups):
            count = min(group, length - g * group)
            padded = (count + 7) & -8
            for j in range(count, padded):
                put(codes, j, 0)
            divisor = step[g] if step[g] > ZERO else ONE
            if not are_finite(low[g], high[g]):
                for j in range(count):
                    put(codes, j, 0)
            elif stochastic:
                for j in range(count):
                    i = g * group + j
                    v = get(x, base + i) / divisor + shift[g]
                    put(codes, j, code_below(v + uniform(begin + i, seed), top))
            else:
                quantize(x, base + g * group, count, divisor, shift[g], top, codes, 0)
            pack(codes, 0, padded, bits, payload, at_codes + (first + g) * (group >> 3) * bits)


@helper
def _parameters(low, high, groups, bits, symmetric, center, step, shift, payload, at):
    """Each group's scale, and what is added to x / scale; both go into the payload."""
    reach = np.float32(center / (127 * 2.0**bits))
    unit = np.float32(2.0**bits / 256)
    for g in range(groups):
        least = greater(key_value(get(low, g)), -LARGEST)
        most = lesser(key_value(get(high, g)), LARGEST)
        mid = ZERO if symmetric else most * HALF + least * HALF
        half = most * HALF - least * HALF
        extent = greater(most, -least) if symmetric else greater(half, magnitude(mid) * reach)
        scale = round_bf16(greater(extent / center, SMALLEST)) if extent > ZERO else ZERO
        divisor = scale if scale > ZERO else ONE
        m = round_signed(mid / divisor * (ONE / unit))
        m = lesser(greater(m, -32767), 32767)
        finite = are_finite(get(low, g), get(high, g))
        store16(payload, at[0] + 2 * g, float_bits(scale) >> 16 if finite else NAN)
        if not symmetric:
            store16(payload, at[1] + 2 * g, np.int64(m) if finite else 0)
        put(step, g, scale)
        put(shift, g, center - m * unit)


@kernel
def _decode(
    payload, at_scales, at_mids, at_codes, floats, halves, kind, total,
    bits, group, symmetric, accumulate, start, stop,
):  # fmt: skip
    codes, line = np.empty(group + 64, np.uint8), np.empty(group, np.float32)
    center = np.float32(2.0 ** (bits - 1) - 1 if symmetric else (2.0**bits - 1) / 2)
    unit = np.float32(2.0**bits / 256)
    for g in range(start, stop):
        begin = g * group
        count = min(group, total - begin)
        unpack(payload, at_codes + g * (group >> 3) * bits, (count + 7) & -8, bits, codes, 0)
        scale, offset = from_bf16(load16(payload, at_scales + 2 * g)), -center
        if not symmetric:
            offset += np.float32(np.int16(load16(payload, at_mids + 2 * g))) * unit
        if kind == FLOAT32 and not accumulate:
            restore(codes, 0, count, offset, scale, floats, begin)
        else:
            restore(codes, 0, count, offset, scale, line, 0)
            store_line(line, floats, halves, kind, begin, count, accumulate)
