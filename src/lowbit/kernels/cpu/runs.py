"""Encode and decode a run of elements that share one scale: a group, or a tile.

Arguments are addresses: `x`, `y`, `s` of float32 numbers, `codes` of scratch with a byte for each element of a run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.kernels import exact
from lowbit.kernels.cpu.jit import helper
from lowbit.kernels.cpu.memory import get_byte, get_float, put_byte, put_float, put_int
from lowbit.kernels.cpu.operations import code, greater32, lesser32, order_key, restored
from lowbit.kernels.cpu.words import decode_words, encode_64, encode_words, extremes_64

LARGEST, SMALLEST = np.float32(exact.LARGEST), np.float32(exact.SMALLEST)
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
KEY_INFINITY, KEY_MINUS_INFINITY = 0x7F800000, 0x807FFFFF - 2**32


@helper
def put_extremes(x, count, low, high) -> None:
    """Write the order keys of the smallest and the largest element to the addresses `low` and `high`."""
    if count == 64:
        extremes_64(x, low, high)
        return
    least, most = np.int32(2**31 - 1), np.int32(-(2**31))
    for j in range(count):
        key = order_key(get_float(x, j))
        least = lesser32(least, key)
        most = greater32(most, key)
    put_int(low, 0, least)
    put_int(high, 0, most)


@helper
def are_finite(low, high) -> Any:
    """Whether a run with these extremes holds neither NaN nor Inf."""
    return low > KEY_MINUS_INFINITY and high < KEY_INFINITY


@helper
def encode_run(x, count, inverse, shift, top, bits, to, codes) -> Any:
    """Write codes x * inverse + shift, rounded and clamped to [0, top], as bit planes to `to`; returns their end.

    `count` is rounded up to a multiple of 8 with codes of 0.
    """
    padded = (count + 7) & -8
    part = (padded * (bits & -bits)) >> 3
    if count == 64:
        encode_64(x, inverse, shift, top, bits, to)
        return to + 8 * bits
    if part & 7 == 0 and count == padded:
        for i in range(0, part, 8):
            encode_words(x + 4 * i, part, inverse, shift, top, bits, to + i)
        return to + (padded >> 3) * bits
    for j in range(count):
        put_byte(codes, j, code(get_float(x, j) * inverse + shift, top))
    return pack(codes, count, bits, to)


@helper
def decode_run(start, count, bits, offset, step, y, codes) -> Any:
    """Decode the codes at `start` to y = (code + offset) * step; returns the codes' end."""
    padded = (count + 7) & -8
    part = (padded * (bits & -bits)) >> 3
    if part & 7 == 0 and count == padded:
        for i in range(0, part, 8):
            decode_words(start + i, part, bits, offset, step, y + 4 * i)
    else:
        unpack(start, padded, bits, codes)
        for j in range(count):
            put_float(y, j, restored(get_byte(codes, j), offset, step))
    return start + (padded >> 3) * bits


@helper
def pack(codes, count, bits, to) -> Any:
    """Pack any number of codes into bit planes, byte by byte (see `encode_run`)."""
    padded, done, width = (count + 7) & -8, 0, 8
    for j in range(count, padded):
        put_byte(codes, j, 0)
    while width:
        if bits & width:
            size = (padded >> 3) * width
            for byte in range(size):
                value, shift = 0, 0
                for j in range(byte, padded, size):
                    value |= ((get_byte(codes, j) >> done) & ((1 << width) - 1)) << shift
                    shift += width
                put_byte(to, 0, value)
                to += 1
            done += width
        width >>= 1
    return to


@helper
def unpack(start, padded, bits, codes) -> None:
    """Inverse of `pack`: write a byte per code; `padded` is their number, rounded up to a multiple of 8."""
    done, width = 0, 8
    while width:
        if bits & width:
            size = (padded >> 3) * width
            for byte in range(size):
                value = np.int64(get_byte(start, 0))
                for j in range(byte, padded, size):
                    field = (value & ((1 << width) - 1)) << done
                    put_byte(codes, j, field | get_byte(codes, j) if done else field)
                    value >>= width
                start += 1
            done += width
        width >>= 1
