"""`FeatureInt` on the CPU: row by row, in scratch memory that stays in the first caches.

All features of a row are scaled and coded as if none were an outlier, so that vector loops are not interrupted; then
the codes of the k + 1 runs between the outliers are moved together. Moves copy whole vectors: what one writes beyond
its run, the next one overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.feature_int.cpu_rows import (
    LANES,
    code_line,
    move,
    numbers,
    pack,
    scale_bf16,
    scale_float32,
    unpack,
    word,
)
from lowbit.codecs.feature_int.reference import LARGEST_BF16, NAN_BF16, center_of, feature_int_layout
from lowbit.kernels.cpu.jit import helper, kernel
from lowbit.kernels.cpu.lines import BFLOAT16, FLOAT16, FLOAT32, KINDS, narrow, sections, widen, zero_gaps
from lowbit.kernels.cpu.memory import (
    get_byte,
    get_float,
    get_half,
    get_int,
    put_byte,
    put_float,
    put_half,
)
from lowbit.kernels.cpu.operations import (
    bits_float,
    code,
    float_bits,
    from_bf16,
    greater,
    lesser,
    magnitude,
    restored,
    to_bf16,
)
from lowbit.kernels.cpu.runs import ONE, SMALLEST, ZERO
from lowbit.kernels.cpu.threads import over_rows
from lowbit.kernels.packing import planes_nbytes

MOST = np.float32(LARGEST_BF16)
INFINITE, NAN = np.float32(np.inf), np.float32(np.nan)
INFINITE_BITS = 0x7F800000


def encode(
    x: Tensor, payload: Tensor, inverse: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    share: float, by_token: bool,
) -> None:  # fmt: skip
    """The reference's bytes."""
    rows, features = x.shape
    layout = feature_int_layout(rows, features, outliers, bits, by_token)
    at = sections(payload, layout)
    zero_gaps(payload, layout)
    per_row = planes_nbytes(features - outliers, bits)

    def work(start: int, stop: int) -> None:
        scratch = _scratch(features)
        _encode(
            x.data_ptr(), KINDS[x.dtype], features, inverse.data_ptr(), offset.data_ptr(), order.data_ptr(), outliers,
            bits, per_row, np.float32(center_of(bits, by_token)), np.float32(share), by_token,
            at["gains"], at["features"], at["codes"], scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, rows, x.nbytes)


def decode(
    payload: Tensor, out: Tensor, scale: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    gain: float, accumulate: bool,
) -> None:  # fmt: skip
    """The reference's numbers."""
    _sum([payload], out, scale, offset, order, outliers, bits, gain, 1, accumulate)


def sum(
    payloads: Sequence[Tensor], out: Tensor, scales: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    gain: float, divisor: int,
) -> None:  # fmt: skip
    """The reference's numbers."""
    _sum(payloads, out, scales, offset, order, outliers, bits, gain, divisor, False)


def _sum(
    payloads: Sequence[Tensor], out: Tensor, scales: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    gain: float, divisor: int, accumulate: bool,
) -> None:  # fmt: skip
    rows, features = out.shape
    layout = feature_int_layout(rows, features, outliers, bits, not gain)
    starts = np.array([payload.data_ptr() for payload in payloads])
    per_row = planes_nbytes(features - outliers, bits)

    def work(start: int, stop: int) -> None:
        scratch = _scratch(features)
        _decode(
            starts.ctypes.data, len(payloads), *(layout.offsets[name] for name in ("gains", "features", "codes")),
            scales.data_ptr(), offset.data_ptr(), order.data_ptr(), outliers,
            bits, per_row, np.float32(center_of(bits, not gain)), np.float32(gain), out.data_ptr(), KINDS[out.dtype],
            features, divisor, accumulate, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, rows, out.nbytes * len(payloads))


def _scratch(features: int) -> Tensor:
    """Allocate a line of float32 numbers, and two rows of codes, each with room for another vector."""
    return torch.empty(4 * features + 2 * (features + 2 * LANES), dtype=torch.uint8)


@helper
def _bf16_of(x, kind, j):
    """Bits of a number as bfloat16: saturated, and with a single NaN."""
    if kind == BFLOAT16:
        bits = get_half(x, j)
        return bits if (bits & 0x7FFF) <= 0x7F80 else NAN_BF16
    value = get_float(x, j)
    if value < INFINITE and value > -INFINITE:
        value = lesser(greater(value, -MOST), MOST)
    return to_bf16(value)


@helper
def _most_between(line, chosen, outliers, features):
    """Bits of the largest magnitude without the outliers."""
    begin, most = 0, np.int64(0)
    for i in range(outliers + 1):
        end = np.int64(get_int(chosen, i)) if i < outliers else features
        for j in range(begin, end):
            most = max(most, np.int64(float_bits(magnitude(get_float(line, j)))))
        begin = end + 1
    return most


@kernel
def _encode(
    source, kind, features, inverse, offset, order, outliers, bits, per_row, center, share, by_token,
    to_gains, to_features, to_codes, scratch, start, stop,
) -> None:  # fmt: skip
    line, codes = scratch, scratch + 4 * features
    kept = codes + features + 2 * LANES
    chosen, rest = order + 4 * (features - outliers), features - outliers
    whole, top = features // LANES * LANES, center + center
    for n in range(start, stop):
        size = 2 if kind == BFLOAT16 else 4
        x = source + size * n * features
        if kind == FLOAT16:
            widen(source, kind, n * features, features, line)
            x = line
        for i in range(outliers):  # before scaled numbers overwrite float16 ones
            put_half(to_features, n * outliers + i, _bf16_of(x, kind, np.int64(get_int(chosen, i))))
        if kind == BFLOAT16:
            most = scale_bf16(x, offset, inverse, whole, line)
        else:
            most = scale_float32(x, offset, inverse, whole, line)
        for j in range(whole, features):
            value = from_bf16(get_half(x, j)) if kind == BFLOAT16 else get_float(x, j)
            value = (value - get_float(offset, j)) * get_float(inverse, j)
            put_float(line, j, value)
            most = max(most, np.int64(float_bits(magnitude(value))))
        if most >= INFINITE_BITS:  # possibly of an outlier, which does not count
            most = _most_between(line, chosen, outliers, features)
        finite, factor = most < INFINITE_BITS, ONE / share
        if by_token:
            largest = bits_float(most)
            gain = to_bf16(greater(largest * share, SMALLEST)) if largest > ZERO else np.uint16(0)
            put_half(to_gains, n, gain if finite else NAN_BF16)
            factor = ONE / from_bf16(gain) if finite and gain > 0 else ONE
        code_line(line, factor, center, top, whole, codes, x + size * features, size)
        for j in range(whole, features):
            put_byte(codes, j, code(get_float(line, j) * factor + center, top))
        if not by_token and not finite:
            for j in range(features):
                put_byte(codes, j, (1 << bits) - 1)
        begin = 0
        for i in range(outliers + 1):
            end = np.int64(get_int(chosen, i)) if i < outliers else features
            move(codes + begin, kept + begin - i, end - begin)
            begin = end + 1
        pack(kept, rest, bits, to_codes + n * per_row)


@kernel
def _decode(
    payloads, ranks, at_gains, at_features, at_codes, scales, offset, order, outliers, bits, per_row, center, static,
    target, kind, features, divisor, accumulate, scratch, start, stop,
) -> None:  # fmt: skip
    spare, codes = scratch, scratch + 4 * features
    kept = codes + features + 2 * LANES
    chosen, rest = order + 4 * (features - outliers), features - outliers
    whole, parts = features // LANES * LANES, np.float32(divisor)
    for n in range(start, stop):
        line = spare
        if kind == FLOAT32 and not accumulate:
            line = target + 4 * n * features
        for r in range(ranks):
            payload, scale, last = word(payloads, r), scales + 4 * r * features, r == ranks - 1
            unpack(payload + at_codes + n * per_row, rest, bits, kept)
            begin = 0
            for i in range(outliers + 1):
                end = np.int64(get_int(chosen, i)) if i < outliers else features
                move(kept + begin - i, codes + begin, end - begin)
                begin = end + 1
            if static == ZERO:
                gain = from_bf16(get_half(payload + at_gains, n))
            else:
                gain = static if get_byte(kept, 0) < (1 << bits) - 1 else NAN
            numbers(codes, center, gain, scale, offset, whole, line, r == 0, last)
            for j in range(whole, features):
                value = restored(get_byte(codes, j), -center, gain) * get_float(scale, j)
                value = value if r == 0 else get_float(line, j) + value
                put_float(line, j, value + get_float(offset, j) if last else value)
        for i in range(outliers):
            at = n * outliers + i
            value = from_bf16(get_half(word(payloads, 0) + at_features, at))
            for r in range(1, ranks):
                value += from_bf16(get_half(word(payloads, r) + at_features, at))
            put_float(line, np.int64(get_int(chosen, i)), value)
        if divisor > 1:
            for j in range(features):
                put_float(line, j, get_float(line, j) / parts)
        if line == spare:
            narrow(line, target, kind, n * features, features, accumulate)
