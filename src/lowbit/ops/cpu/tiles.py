"""What both formats do to a run of elements that shares one scale. All of it is inlined into the kernels.

`x` and `y` are float32 arrays, `codes` has one byte for each element; runs start at `base` or `at`.
"""

from __future__ import annotations

import numpy as np

from lowbit.ops.cpu.jit import get, helper, put
from lowbit.ops.cpu.operations import code, greater32, lesser32, order_key, quotient

LARGEST = np.float32(2.0**127)
SMALLEST = np.float32(2.0**-126)
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
KEY_INFINITY, KEY_MINUS_INFINITY = 0x7F800000, 0x807FFFFF - 2**32
FEWEST, MOST = np.float32(2.0**-60), np.float32(2.0**100)


@helper
def extremes(x, base, count):  # noqa: ANN201
    """Order keys of the smallest and the largest element."""
    low, high = np.int32(2**31 - 1), np.int32(-(2**31))
    for j in range(count):
        key = order_key(get(x, base + j))
        low = lesser32(low, key)
        high = greater32(high, key)
    return low, high


@helper
def are_finite(low, high):  # noqa: ANN201
    """Whether a run with these extremes holds neither NaN nor Inf."""
    return low > KEY_MINUS_INFINITY and high < KEY_INFINITY


@helper
def quantize(x, base, count, step, shift, top, codes, at):  # noqa: ANN201
    """codes = x / step + shift, rounded and cut to [0, top]; `step` has at most 8 significant bits."""
    if FEWEST < step < MOST:
        inverse = ONE / step
        for j in range(count):
            put(codes, at + j, code(quotient(get(x, base + j), step, inverse) + shift, top))
    else:
        for j in range(count):
            put(codes, at + j, code(get(x, base + j) / step + shift, top))


@helper
def restore(codes, at, count, offset, step, y, base):  # noqa: ANN201
    """y = (codes + offset) * step, where the sum is exact, so that it may stand for the formula's two."""
    for j in range(count):
        put(y, base + j, (np.float32(get(codes, at + j)) + offset) * step)


@helper
def rotate(s, count, norm):
    """Walsh-Hadamard transform of `s[:count]` in place, times `norm`."""
    half = 1
    while half < count:
        for first in range(0, count, 2 * half):
            for j in range(first, first + half):
                a, b = get(s, j), get(s, j + half)
                put(s, j, a + b)
                put(s, j + half, a - b)
        half *= 2
    for j in range(count):
        put(s, j, get(s, j) * norm)


@helper
def swap(s, position):
    """Exchange `s[0]` and `s[position]`."""
    first = get(s, 0)
    put(s, 0, get(s, position))
    put(s, position, first)


@helper
def spin(x, base, count, position, norm, s):
    """`s[:count]` = the rotated tile, its pivot swapped to the front."""
    for j in range(count):
        put(s, j, get(x, base + j))
    swap(s, position)
    rotate(s, count, norm)
