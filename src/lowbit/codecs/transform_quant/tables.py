"""Probabilities of symbols: the tables of the entropy coder, identical on every machine to the last bit.

A coefficient of z steps gets the code floor(z + (dither + 1/2) / 256). Its upper part, code >> n, is a symbol, and its
lowest n bits travel as they are: n is such that its standard deviation is below 2 units of the symbol. So one table for
each such scale, by quarters of an octave, and each class of dither is enough.

They are computed in float64 with only sums, products and quotients, in a fixed order, because IEEE arithmetic defines
their results exactly; it does not define those of a library's exponential function.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

PRECISION = 12  # bits of a probability
TOTAL = 1 << PRECISION
SYMBOLS = 16  # 1 to 15: codes -7 to 7; 0: a code beyond them, which is sent by itself
MIDDLE = 8  # symbol of the code 0
LOWEST = -24  # scale in quarters of an octave: 2^-6 of a step
RAW = 20  # bits of a code that travel as they are, at most
HIGHEST = 4 * RAW + 3  # scale
SCALES = 4 - LOWEST  # up to 3, just below 2 steps
DEAD = SCALES  # the next class: tokens of zeros or NaN, whose code is 0
DITHERS = 16  # classes of the 256 values, finer where a small coefficient may turn the code
BORDERS = (2, 4, 8, 16, 32, 48, 80)  # between classes: distance to the nearer end of the 256
CONTEXTS = (SCALES + 1) * DITHERS
ROOT = np.float32(2**0.5)
NOISE = np.float32(1 / 12)  # of a step squared
STRIDE = 32  # of a context's row of limits: 16 limits, `TOTAL`, and padding


@functools.cache
def limits() -> NDArray[np.uint16]:
    """Cumulative probabilities, (CONTEXTS, STRIDE): of symbol s, from [s] to [s + 1]."""
    scale = _quarter_octaves(np.arange(LOWEST, LOWEST + SCALES))
    edge = np.arange(-7, 9, dtype=np.float64)  # lower ends of the codes -7 to 8
    shift = (np.arange(256) + 0.5) / 256
    below = _logistic((edge - shift[:, None]) / scale[:, None, None])  # SCALES, 256, 16
    inside = below[..., 1:] - below[..., :-1]
    inside = np.stack([_mean(inside[:, dither_classes() == d]) for d in range(DITHERS)], 1)
    probability = np.concatenate([1 - inside.sum(-1, keepdims=True), inside], -1)
    dead = np.zeros((1, DITHERS, SYMBOLS))
    dead[..., MIDDLE] = 1
    probability = np.concatenate([probability, dead]).reshape(CONTEXTS, SYMBOLS)
    count = np.maximum(np.floor(probability * (TOTAL - SYMBOLS) + 0.5), 1).astype(np.int64)
    rows = np.arange(CONTEXTS)
    count[rows, count.argmax(1)] += TOTAL - count.sum(1)
    table = np.zeros((CONTEXTS, STRIDE), np.uint16)
    table[:, 1 : SYMBOLS + 1] = count.cumsum(1)
    table[:, SYMBOLS + 1 :] = 0xFFFF
    return table


@functools.cache
def dither_classes() -> NDArray[np.int64]:
    """The class of each value of dither, (256,)."""
    value = np.arange(256)
    near = np.searchsorted(np.array(BORDERS), np.minimum(value, 255 - value), side="right")
    return np.where(value < 128, near, DITHERS - 1 - near)


@functools.cache
def costs() -> NDArray[np.float64]:
    """Mean bits of a symbol by class, (SCALES + 1,), if scales are right: an estimate, for a sender alone."""
    count = np.diff(limits()[:, : SYMBOLS + 1].astype(np.float64), axis=1)
    share = np.where(count > 1, count, 0) / np.where(count > 1, count, 0).sum(1, keepdims=True)
    bits = -(share * np.log2(count / TOTAL)).sum(1).reshape(SCALES + 1, DITHERS)
    width = np.bincount(dither_classes(), minlength=DITHERS) / 256
    return (bits * width).sum(1)


@functools.cache
def shares() -> NDArray[np.float32]:
    """Return the share of a cell's middle in the best linear estimate, by scale from `LOWEST` to `HIGHEST`.

    The error of a middle has the variance `NOISE`. Every operation is float32, with an exactly defined result.
    """
    scale = np.arange(LOWEST, HIGHEST + 1)
    square = np.ldexp(np.where(scale & 1, ROOT, np.float32(1)), scale >> 1)
    return (square / (square + NOISE)).astype(np.float32)


def _quarter_octaves(k: NDArray[np.int64]) -> NDArray[np.float64]:
    """2^(k / 4)."""
    roots = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])
    return roots[k & 3] * np.ldexp(1.0, k >> 2)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Average along the second dimension, summing one after the other."""
    total = values[:, 0]
    for i in range(1, values.shape[1]):
        total = total + values[:, i]
    return total / values.shape[1]


def _logistic(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logistic distribution function of variance 1 at t: its tails lie between the normal's and Laplace's."""
    small = np.minimum(np.maximum(t * -1.8137993642342178, -64.0), 64.0) * 2.0**-9
    power = np.ones_like(t)
    for n in range(12, 0, -1):  # series of the exponential at a small argument; the result is squared nine times
        power = 1 + power * small / n
    for _ in range(9):
        power = power * power
    return 1 / (1 + power)
