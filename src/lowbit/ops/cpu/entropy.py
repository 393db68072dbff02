"""Keys of tiles and tokens in the order of their entropy (`lowbit.ops.exact.entropy`), Inf where one is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.ops.cpu.jit import helper
from lowbit.ops.cpu.memory import get_float, get_int
from lowbit.ops.cpu.operations import (
    add32,
    bits_float,
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
from lowbit.ops.cpu.tiles import KEY_INFINITY, are_finite


@helper
def tile_key(x, count, low, high) -> Any:
    """Key of `count` elements whose extremes have the order keys `low` and `high`."""
    if not are_finite(low, high):
        return KEY_INFINITY
    total, terms = _sums(x, count, _scale(low, high))
    return _key(total, terms)


@helper
def token_key(x, channels, tile, tiles, low, high) -> Any:
    """Key of a token, given the addresses of its tiles' extremes."""
    least, most = get_int(low, 0), get_int(high, 0)
    for t in range(1, tiles):
        least, most = lesser32(least, get_int(low, t)), greater32(most, get_int(high, t))
    if not are_finite(least, most):
        return KEY_INFINITY
    total, terms, scale = 0, 0, _scale(least, most)
    for t in range(tiles):
        some, some_terms = _sums(x + 4 * t * tile, min(tile, channels - t * tile), scale)
        total += some
        terms += some_terms
    return _key(total, terms)


@helper
def _scale(low, high):
    """The power of two that makes the largest magnitude a 15-bit integer."""
    most = greater(key_value(high), -key_value(low))
    exponent = min(max(float_bits(most) >> 23, 27), 254)
    return bits_float((127 + 14 + 127 - exponent) << 23)


@helper
def _sums(x, count, scale):
    """Of up to 128 integers and their weighted logarithms: below 2^31, so that 32 bits suffice."""
    total, terms = np.int32(0), np.int32(0)
    for j in range(count):
        total = add32(total, level(get_float(x, j), scale))
        terms = add32(terms, weighted_log(get_float(x, j), scale))
    return np.int64(total), np.int64(terms)


@helper
def _key(total, terms):
    weight = np.float32(max(total, 1))
    return np.int64(order_key(log2(weight) - np.float32(terms) * np.float32(0.0625) / weight))
