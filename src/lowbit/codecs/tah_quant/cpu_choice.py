"""Choose the candidates of the low bits, the smallest keys of each scope, and pack their flags; rotate tiles."""

from __future__ import annotations

import numpy as np

from lowbit.kernels.cpu.jit import helper
from lowbit.kernels.cpu.memory import get_byte, get_float, get_int, get_word, put_byte, put_float, put_word
from lowbit.kernels.cpu.operations import add32, byte_of_flags, flags_of_byte, greater32, lesser32


@helper
def choose(keys, candidates, low, flags):
    """Set the flags of the `low` smallest of a scope's int32 keys; of equal keys, the first ones.

    The threshold is found by bisection: linear in the candidates, and the passes over them vectorise.
    """
    below, most = np.int32(2**31 - 1), np.int32(-(2**31))
    for i in range(candidates):
        below, most = lesser32(below, get_int(keys, i)), greater32(most, get_int(keys, i))
    # At most `fewer` < low keys are <= below, and at least `low` are <= most.
    below, most, fewer, at_most = np.int64(below) - 1, np.int64(most), 0, candidates
    while most - below > 1 and at_most != low:
        middle = (below + most) >> 1
        count = np.int32(0)
        for i in range(candidates):
            count = add32(count, get_int(keys, i) <= middle)
        if count >= low:
            most, at_most = middle, np.int64(count)
        else:
            below, fewer = middle, np.int64(count)
    if at_most == low:
        for i in range(candidates):
            put_byte(flags, i, get_int(keys, i) <= most)
    else:
        equal = low - fewer
        for i in range(candidates):
            tie = get_int(keys, i) == most and equal > 0
            put_byte(flags, i, tie or get_int(keys, i) < most)
            equal -= tie


@helper
def write_flags(flags, size, bitmap) -> None:
    """Write flags, one byte each, as the bits of `size` bytes."""
    for i in range(size):
        put_byte(bitmap, i, byte_of_flags(get_word(flags, i)))


@helper
def read_flags(bitmap, size, flags) -> None:
    """Inverse of `write_flags`."""
    for i in range(size):
        put_word(flags, i, flags_of_byte(get_byte(bitmap, i)))


@helper
def read_checked_flags(bitmap, size, candidates, low, flags):
    """Read a scope's flags; return whether `low` of its candidates are set. If not, set the first `low` instead.

    Flags determine the positions of codes: with a wrong number of them, these could be beyond the payload.
    """
    read_flags(bitmap, size, flags)
    intact = count_flags(flags, candidates) == low
    if not intact:
        for i in range(candidates):
            put_byte(flags, i, i < low)
    return intact


@helper
def count_flags(flags, stop):
    """Count the set flags among the first `stop`."""
    total = 0
    for i in range(stop):
        total += get_byte(flags, i)
    return total


@helper
def spin(x, count, position, norm, s) -> None:
    """Write the rotated tile, its pivot swapped to the front, to `s[:count]`."""
    for j in range(count):
        put_float(s, j, get_float(x, j))
    swap(s, position)
    rotate(s, count, norm)


@helper
def rotate(s, count, norm) -> None:
    """Walsh-Hadamard transform of `s[:count]` in place, times `norm`."""
    half = 1
    while half < count:
        for first in range(0, count, 2 * half):
            for j in range(first, first + half):
                a, b = get_float(s, j), get_float(s, j + half)
                put_float(s, j, a + b)
                put_float(s, j + half, a - b)
        half *= 2
    for j in range(count):
        put_float(s, j, get_float(s, j) * norm)


@helper
def swap(s, position) -> None:
    """Exchange `s[0]` and `s[position]`."""
    first = get_float(s, 0)
    put_float(s, 0, get_float(s, position))
    put_float(s, position, first)
