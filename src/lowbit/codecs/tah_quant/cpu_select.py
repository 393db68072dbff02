"""Select the candidates of the low bits: their keys, the threshold by bisection, and the flags."""

from typing import Any

import numpy as np

from lowbit.kernels.cpu.jit import helper
from lowbit.kernels.cpu.memory import get_byte, get_float, get_int, put_byte, put_int, put_word
from lowbit.kernels.cpu.operations import (
    INTEGER_BITS,
    add32,
    bits_float,
    flags_of_byte,
    float_bits,
    greater,
    greater32,
    key_value,
    lesser32,
    level,
    log2,
    order_key,
    weighted_log,
)
from lowbit.kernels.cpu.runs import KEY_INFINITY, USUAL, are_finite


@helper
def flag_smallest(keys, candidates, low, flags):
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
def read_checked_flags(bitmap, size, candidates, low, flags):
    """Read a scope's flags; return whether `low` of its candidates are set. If not, set the first `low` instead.

    Flags determine the positions of codes: with a wrong number of them, these could be beyond the payload.
    """
    for i in range(size):
        put_word(flags, i, flags_of_byte(get_byte(bitmap, i)))
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
def put_tile_keys(x, tile, full, low, high, keys, sums) -> None:
    """Write the keys of a token's full tiles."""
    for t in range(full):
        scale = _scale(get_int(low, t), get_int(high, t))
        _put_sums(x + 4 * t * tile, tile, scale, sums + 4 * t, sums + 4 * (full + t))
    for t in range(full):
        total, terms = get_int(sums, t), get_int(sums, full + t)
        key = _key(np.float32(greater32(total, 1)), np.float32(terms))
        finite = are_finite(get_int(low, t), get_int(high, t))
        put_int(keys, t, key if finite else KEY_INFINITY)


@helper
def put_token_key(x, channels, tile, tiles, low, high, key, sums) -> None:
    """Write the key of a whole token."""
    least, most = get_int(low, 0), get_int(high, 0)
    for t in range(1, tiles):
        least, most = lesser32(least, get_int(low, t)), greater32(most, get_int(high, t))
    total, terms, scale = 0, 0, _scale(least, most)
    for t in range(tiles):
        count = min(tile, channels - t * tile)
        _put_sums(x + 4 * t * tile, count, scale, sums, sums + 4)
        total += get_int(sums, 0)
        terms += get_int(sums, 1)
    entropy = _key(np.float32(max(total, 1)), np.float32(terms))
    put_int(key, 0, entropy if are_finite(least, most) else KEY_INFINITY)


@helper
def _scale(low, high) -> Any:
    """The power of two that makes the largest magnitude a 15-bit integer."""
    most = greater(key_value(high), -key_value(low))
    exponent = min(max(float_bits(most) >> 23, 27), 254)
    return bits_float((127 + 14 + 127 - exponent) << 23)


@helper
def _put_sums(x, count, scale, total, terms) -> None:
    """Write the sums of up to 128 integers and of their weighted logarithms, which are below 2^31: 32 bits suffice."""
    if count == USUAL:
        _add_up(x, USUAL, scale, total, terms)
    else:
        _add_up(x, count, scale, total, terms)


@helper
def _add_up(x, count, scale, total, terms) -> None:
    integers, weighted = np.int32(0), np.int32(0)
    for j in range(count):
        scaled = level(get_float(x, j), scale)
        integers = add32(integers, float_bits(scaled) - INTEGER_BITS)
        weighted = add32(weighted, float_bits(weighted_log(scaled)) - 0x49000000)
    put_int(total, 0, integers)
    put_int(terms, 0, weighted)


@helper
def _key(weight, terms) -> Any:
    return order_key(log2(weight) - terms * np.float32(0.0625) / weight)
