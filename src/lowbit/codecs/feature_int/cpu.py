"""`FeatureInt` on the CPU: row by row, in scratch memory that stays in the first caches.

All features of a row are scaled and coded as if none were an outlier, so that vector loops are not interrupted; then
the codes of the k + 1 runs between the outliers are moved together. Moves copy whole words: what one writes beyond its
run, the next one overwrites.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.feature_int.reference import LARGEST_BF16, NAN_BF16, center_of, feature_int_layout
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
    put_word,
)
from lowbit.kernels.cpu.operations import (
    ONE,
    ZERO,
    bits_float,
    code,
    float_bits,
    from_bf16,
    greater,
    greater32,
    lesser,
    magnitude,
    restored,
    to_bf16,
)
from lowbit.kernels.cpu.runs import SMALLEST, pack, unpack
from lowbit.kernels.layout import planes_nbytes

MOST = np.float32(LARGEST_BF16)
INFINITE, NAN = np.float32(np.inf), np.float32(np.nan)
INFINITE_BITS = 0x7F800000


def encode(
    x: Tensor, payload: Tensor, inverse: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    share: float, by_token: bool,
) -> None:  # fmt: skip
    """Encode; the bytes equal those of `reference.encode`."""
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
    payloads: Sequence[Tensor], out: Tensor, scales: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    gain: float, divisor: int, accumulate: bool,
) -> None:  # fmt: skip
    """The reference's numbers."""
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
    """Allocate two lines of float32 numbers, and two rows of codes, each with room for 15 more."""
    return torch.empty(8 * features + 2 * (features + 15), dtype=torch.uint8)


@helper
def move(source, to, count) -> None:
    """Copy `count` bytes and up to 7 more."""
    for j in range(0, count, 8):
        put_word(to + j, 0, get_word(source + j, 0))


@helper
def _bf16_of(value):
    """Bits of a number as bfloat16: saturated, and with a single NaN."""
    if value < INFINITE and value > -INFINITE:
        value = lesser(greater(value, -MOST), MOST)
    return to_bf16(value)


@kernel
def _encode(
    source, kind, features, inverse, offset, order, outliers, bits, per_row, center, share, by_token,
    to_gains, to_features, to_codes, scratch, start, stop,
) -> None:  # fmt: skip
    line, wide, codes = scratch, scratch + 4 * features, scratch + 8 * features
    kept = codes + features + 15
    chosen, rest = order + 4 * (features - outliers), features - outliers
    top = center + center
    for n in range(start, stop):
        x = source + 4 * n * features
        if kind != FLOAT32:
            widen(source, kind, n * features, features, wide)
            x = wide
        for i in range(outliers):
            put_half(to_features, n * outliers + i, _bf16_of(get_float(x, np.int64(get_int(chosen, i)))))
        most = np.int32(0)
        for j in range(features):
            value = (get_float(x, j) - get_float(offset, j)) * get_float(inverse, j)
            put_float(line, j, value)
            most = greater32(most, float_bits(magnitude(value)))
        if most >= INFINITE_BITS:  # possibly of an outlier, which does not count
            begin, most = 0, np.int32(0)
            for i in range(outliers + 1):
                end = np.int64(get_int(chosen, i)) if i < outliers else features
                for j in range(begin, end):
                    most = greater32(most, float_bits(magnitude(get_float(line, j))))
                begin = end + 1
        finite, factor = most < INFINITE_BITS, ONE / share
        if by_token:
            largest = bits_float(most)
            gain = to_bf16(greater(largest * share, SMALLEST)) if largest > ZERO else np.uint16(0)
            put_half(to_gains, n, gain if finite else NAN_BF16)
            factor = ONE / from_bf16(gain) if finite and gain > 0 else ONE
        for j in range(features):
            put_byte(codes, j, code(get_float(line, j) * factor + center, top))
        if not by_token and not finite:
            for j in range(features):
                put_byte(codes, j, (1 << bits) - 1)
        begin = 0
        for i in range(outliers + 1):
            end = np.int64(get_int(chosen, i)) if i < outliers else features
            move(codes + begin, kept + begin - i, end - begin)
            begin = end + 1
        for j in range(rest, rest + 7):
            put_byte(kept, j, 0)
        pack(kept, rest, bits, to_codes + n * per_row)


@kernel
def _decode(
    payloads, ranks, at_gains, at_features, at_codes, scales, offset, order, outliers, bits, per_row, center, static,
    target, kind, features, divisor, accumulate, scratch, start, stop,
) -> None:  # fmt: skip
    spare, codes = scratch, scratch + 4 * features
    kept = codes + features + 15
    chosen, rest = order + 4 * (features - outliers), features - outliers
    parts = np.float32(divisor)
    for n in range(start, stop):
        line = spare
        if kind == FLOAT32 and not accumulate:
            line = target + 4 * n * features
        for r in range(ranks):
            payload, scale = np.int64(get_word(payloads, r)), scales + 4 * r * features
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
            if r == 0:
                for j in range(features):
                    put_float(line, j, restored(get_byte(codes, j), -center, gain) * get_float(scale, j))
            else:
                for j in range(features):
                    value = restored(get_byte(codes, j), -center, gain) * get_float(scale, j)
                    put_float(line, j, get_float(line, j) + value)
        for j in range(features):
            put_float(line, j, get_float(line, j) + get_float(offset, j))
        for i in range(outliers):
            at = n * outliers + i
            value = from_bf16(get_half(np.int64(get_word(payloads, 0)) + at_features, at))
            for r in range(1, ranks):
                value += from_bf16(get_half(np.int64(get_word(payloads, r)) + at_features, at))
            put_float(line, np.int64(get_int(chosen, i)), value)
        if divisor > 1:
            for j in range(features):
                put_float(line, j, get_float(line, j) / parts)
        if line == spare:
            narrow(line, target, kind, n * features, features, accumulate)
