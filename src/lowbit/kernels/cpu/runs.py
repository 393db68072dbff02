"""Encode and decode a run of elements that share one scale: a group, or a tile; pack and unpack codes of any meaning.

Codes lie in bit planes (see `lowbit.kernels.layout`): all codes of a part of a plane lie at one shift, so that loops
over neighbours are vectorised. Arguments are addresses: `x`, `y` of float32 numbers, `codes` of scratch with a byte for
each element, rounded up to a multiple of 8.
"""

from typing import Any

import numpy as np

from lowbit.kernels import exact
from lowbit.kernels.cpu.jit import helper
from lowbit.kernels.cpu.memory import get_byte, get_float, put_byte, put_float, put_int
from lowbit.kernels.cpu.operations import code, greater32, lesser32, order_key, restored

LARGEST, SMALLEST = np.float32(exact.LARGEST), np.float32(exact.SMALLEST)
KEY_INFINITY, KEY_MINUS_INFINITY = 0x7F800000, 0x807FFFFF - 2**32
USUAL = 64  # elements of most runs: loops of a length that the compiler knows have no preamble


@helper
def put_extremes(x, count, low, high) -> None:
    """Write the order keys of the smallest and the largest element to the addresses `low` and `high`."""
    if count == USUAL:
        _put_extremes(x, USUAL, low, high)
    else:
        _put_extremes(x, count, low, high)


@helper
def _put_extremes(x, count, low, high) -> None:
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
    if count == USUAL:
        return _encode_run(x, USUAL, inverse, shift, top, bits, to, codes)
    return _encode_run(x, count, inverse, shift, top, bits, to, codes)


@helper
def _encode_run(x, count, inverse, shift, top, bits, to, codes) -> Any:
    for j in range(count):
        put_byte(codes, j, code(get_float(x, j) * inverse + shift, top))
    padded = (count + 7) & -8
    for j in range(count, padded):
        put_byte(codes, j, 0)
    return pack(codes, padded, bits, to)


@helper
def decode_run(start, count, bits, offset, step, y, codes) -> Any:
    """Decode the codes at `start` to y = (code + offset) * step; returns the codes' end."""
    if count == USUAL:
        return _decode_run(start, USUAL, bits, offset, step, y, codes)
    return _decode_run(start, count, bits, offset, step, y, codes)


@helper
def _decode_run(start, count, bits, offset, step, y, codes) -> Any:
    end = unpack(start, (count + 7) & -8, bits, codes)
    for j in range(count):
        put_float(y, j, restored(get_byte(codes, j), offset, step))
    return end


@helper
def pack(codes, count, bits, to) -> Any:
    """Pack `count` codes, and up to 7 of 0 that must follow, into bit planes of whole bytes; returns their end."""
    done = 0
    if bits & 8:
        for j in range(count):
            put_byte(to, j, get_byte(codes, j))
        to += count
    if bits & 4:
        n = (count + 1) >> 1
        for j in range(n):
            put_byte(to, j, get_byte(codes, j) & 15 | get_byte(codes, n + j) << 4)
        to, done = to + n, 4
    if bits & 2:
        n = (count + 3) >> 2
        for j in range(n):
            low = _part(codes, j, done, 3) | _part(codes, n + j, done, 3) << 2
            put_byte(to, j, low | _part(codes, 2 * n + j, done, 3) << 4 | _part(codes, 3 * n + j, done, 3) << 6)
        to, done = to + n, done + 2
    if bits & 1:
        n = (count + 7) >> 3
        for j in range(n):
            value = 0
            for s in range(8):
                value |= _part(codes, s * n + j, done, 1) << s
            put_byte(to, j, value)
        to += n
    return to


@helper
def _part(codes, j, done, mask) -> Any:
    return (get_byte(codes, j) >> (done & 7)) & mask


@helper
def unpack(start, count, bits, codes) -> Any:
    """Inverse of `pack`: write a byte per code, and up to 7 more. Returns the end of the planes."""
    done = 0
    if bits & 8:
        for j in range(count):
            put_byte(codes, j, get_byte(start, j))
        start += count
    for width in (4, 2, 1):
        if bits & width:
            n = (count * width + 7) >> 3
            for s in range(8 // width):
                _add_part(start, n, width * s, (1 << width) - 1, done, codes + s * n)
            start, done = start + n, done + width
    return start


@helper
def _add_part(start, count, shift, mask, done, codes) -> None:
    if done == 0:
        for j in range(count):
            put_byte(codes, j, (get_byte(start, j) >> (shift & 7)) & mask)
    else:
        for j in range(count):
            field = (get_byte(start, j) >> (shift & 7)) & mask
            put_byte(codes, j, field << (done & 7) | get_byte(codes, j))
