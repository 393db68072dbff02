"""Which candidates get the low bits: the smallest keys of each scope, and their flags on the wire."""

from __future__ import annotations

import numpy as np

from lowbit.ops.cpu.jit import get, helper, kernel, put
from lowbit.ops.cpu.operations import add32, flags_of_byte, greater32, lesser32, byte_of_flags
from lowbit.ops.cpu.planes import load64, store64


@kernel
def choose(keys, per_scope, low, flags, start, stop):
    """Set the flags of the `low` smallest of each scope's int32 keys; of equal keys, the first ones.

    The threshold is found by bisection: linear in the candidates, and the passes over them vectorise.
    """
    for first in range(start * per_scope, stop * per_scope, per_scope):
        below, most = np.int32(2**31 - 1), np.int32(-(2**31))
        for i in range(first, first + per_scope):
            below, most = lesser32(below, get(keys, i)), greater32(most, get(keys, i))
        # At most `fewer` < low keys are <= below, and at least `low` are <= most.
        below, most, fewer, found = np.int64(below) - 1, np.int64(most), 0, per_scope
        while most - below > 1 and found != low:
            middle = (below + most) >> 1
            count = np.int32(0)
            for i in range(first, first + per_scope):
                count = add32(count, get(keys, i) <= middle)
            if count >= low:
                most, found = middle, np.int64(count)
            else:
                below, fewer = middle, np.int64(count)
        if found == low:
            for i in range(first, first + per_scope):
                put(flags, i, get(keys, i) <= most)
        else:
            equal = low - fewer
            for i in range(first, first + per_scope):
                tie = get(keys, i) == most and equal > 0
                put(flags, i, tie or get(keys, i) < most)
                equal -= tie


@kernel
def write_flags(flags, payload, to, size):
    """Write flags (one byte each, a multiple of 8) as a bitmap of `size` bytes."""
    for i in range(size):
        put(payload, to + i, byte_of_flags(load64(flags, 8 * i)))


@kernel
def read_flags(payload, start, size, flags):
    """Inverse of `write_flags`."""
    for i in range(size):
        store64(flags, 8 * i, flags_of_byte(get(payload, start + i)))


@helper
def count_flags(flags, stop):
    """How many of the first `stop` flags are set."""
    total = 0
    for i in range(stop):
        total += get(flags, i)
    return total
