"""What a sender of `TransformQuant` chooses: scales of channels and tokens, and the step that fills the payload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.transform_quant import tables
from lowbit.codecs.transform_quant.cpu_symbols import (
    DEAD_TOKEN,
    code_of,
    context_of,
    dither_of,
    raw_of,
    scale_of,
    symbol_of,
)
from lowbit.codecs.transform_quant.layout import STREAM_BYTES, TransformGeometry
from lowbit.codecs.transform_quant.reference import (
    FINE,
    FURTHEST_BELOW,
    HIGHEST,
    LEAST_STEP,
    MOST_STEP,
    NAN,
    ROUNDS,
    ZERO,
    _mantissas,
)
from lowbit.codecs.transform_quant.tables import LOWEST
from lowbit.kernels.cpu.jit import kernel, summing
from lowbit.kernels.cpu.memory import get_float, get_int, get_word, put_float, put_int
from lowbit.kernels.cpu.operations import float_bits, greater, greater32, lesser32, magnitude, power_of_two
from lowbit.kernels.cpu.runs import SMALLEST
from lowbit.kernels.cpu.threads import over_rows
from lowbit.kernels.cpu.vectors import squares

SAMPLE = 1 << 14  # coefficients that tell how well the tables suit a message, about
RESERVE = 0.004  # of the payload, which the first attempt leaves
INFINITE, NORMAL = 0x7F800000, 0x00800000  # bits of float32 magnitudes


class Fit(NamedTuple):
    """Scales as they travel, uint8, and `scalars`: the largest scale and norm; `channel`: each one's scale, int32."""

    level: np.ndarray
    token: np.ndarray
    norm: np.ndarray
    scalars: tuple[int, int]
    channel: np.ndarray


def fitted(z: Tensor, geo: TransformGeometry) -> Fit:
    """See the reference; sums are float32, and their order is another one."""
    rows, channels = z.shape
    most, factor, sums = np.empty(rows, np.int32), np.empty(rows, np.float32), np.empty(rows, np.float32)
    at = [a.ctypes.data for a in (most, factor, sums)]
    over_rows(lambda i, j: _measure(z.data_ptr(), i, j, channels, *at), rows, z.nbytes)
    finite, usable = most < INFINITE, (most < INFINITE) & (most >= NORMAL)
    exponent = np.where(usable, (most >> 23) - 127, 0)
    norm = _quarters(sums / channels) if geo.by_token else np.zeros(rows, np.int64)
    factor *= np.exp2(-0.25 * norm).astype(np.float32)
    factor[~usable] = 0
    square = usable.astype(np.float32)
    channel = np.ones(channels, np.float32)
    for turn in range(ROUNDS + 1):
        inverse = np.where(channel > 0, 1 / np.where(channel > 0, channel, 1), 1).astype(np.float32)
        channel = _turn(z, factor, inverse, square, bool(turn), rows, channels) / max(1, usable.sum())
    inverse = np.where(channel > 0, 1 / np.where(channel > 0, channel, 1), 1).astype(np.float32)
    _turn(z, factor, inverse, square, True, rows, channels)
    token = _quarters(square) + (0 if geo.by_token else 4 * exponent)
    level, highest = _below(_quarters(channel), channel > 0, 255)
    token, largest = _below(token, usable, ZERO)
    norm, norms = _below(norm + 4 * exponent, usable, FURTHEST_BELOW)
    token[~finite] = NAN
    scalars = (highest + largest, norms)
    return Fit(level, token, norm, scalars, (scalars[0] - level.astype(np.int64)).astype(np.int32))


def first_step(fit: Fit, z: Tensor, seed: int, room: int, geo: TransformGeometry) -> tuple[int, float]:
    """The step that is likely to fill `room` bytes of streams, and the bits that a message loses by each further one.

    How many bits symbols take follows from their scales, by the tables; how well these suit, from a sample of tokens.
    """
    coded = np.flatnonzero(fit.token < NAN)
    if not len(coded):
        return 0, 1.0
    wanted = 8 * (room - geo.streams * STREAM_BYTES) * (1 - RESERVE)
    by_level = np.bincount(fit.level, minlength=256)
    bits = _bits(by_level, fit.token[coded])
    step, _ = _step_for(bits, wanted, fit.scalars[0])
    sample = coded[:: max(1, len(coded) * z.shape[1] // SAMPLE)]
    rows, inverse = row_scales(fit.token, step), inverses(fit.token, fit.norm, fit.scalars[1], step, geo)
    sample = np.ascontiguousarray(sample, np.int64)
    taken = _cost_of(
        z.data_ptr(), sample.ctypes.data, len(sample), z.shape[1], fit.channel.ctypes.data, rows.ctypes.data,
        inverse.ctypes.data, seed, symbol_costs().ctypes.data,
    )  # fmt: skip
    expected = np.interp(step / 16, *_curve(_bits(by_level, fit.token[sample]), fit.scalars[0]))
    return _step_for(bits * (taken / expected), wanted, fit.scalars[0])


def next_step(step: int, excess: int | None, slope: float) -> int:
    """A larger step, for streams that are too long by `excess` bytes; None: by far."""
    more = FINE if excess is None else 1 + int(8 * excess / max(slope, 1.0))
    return min(MOST_STEP, step + min(more, FINE))


def row_scales(token: np.ndarray, step: int) -> np.ndarray:
    """What each row adds to its channels' scales, int32."""
    quarters = (step + FINE // 8) >> 4
    row = (-quarters - token.astype(np.int64)).clip(DEAD_TOKEN + 1, -DEAD_TOKEN)
    return np.where(token >= NAN, DEAD_TOKEN, row).astype(np.int32)


def steps(token: np.ndarray, norms: np.ndarray, norm: int, step: int, geo: TransformGeometry) -> np.ndarray:
    """Each token's step, float32: the reference's."""
    by_norm = FINE // 4 * (norm - norms.astype(np.int64)) if geo.by_token else np.zeros(len(token), np.int64)
    fine = np.clip(step + by_norm, LEAST_STEP, MOST_STEP)
    step_R = np.ldexp(_powers()[fine % FINE], fine // FINE)
    return np.where(token == ZERO, 0.0, np.where(token == NAN, np.nan, step_R)).astype(np.float32)


def inverses(token: np.ndarray, norms: np.ndarray, norm: int, step: int, geo: TransformGeometry) -> np.ndarray:
    """One divided by each token's step; 0 where nothing is coded."""
    step_R = steps(token, norms, norm, step, geo)
    there = step_R > 0
    return np.where(there, np.float32(1) / np.where(there, step_R, np.float32(1)), 0).astype(np.float32)


def _bits(by_level: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Bits of the symbols of these tokens, for each scale that the largest may have, from the lowest one on."""
    return _cost_by_largest() @ np.convolve(by_level, np.bincount(token, minlength=256))


def _curve(bits: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps, in quarters of an octave, from the smallest one on, and the bits that they take."""
    return level - np.arange(HIGHEST, LOWEST - 1, -1), bits[::-1]


def _step_for(bits: np.ndarray, wanted: float, level: int) -> tuple[int, float]:
    """The step that takes so many bits, and the bits that the next one saves."""
    quarters, falling = _curve(bits, level)
    step = int(np.ceil(16 * np.interp(-wanted, -falling, quarters)))
    at = min(max((step >> 4) - int(quarters[0]), 0), len(falling) - 2)
    return min(max(step, LEAST_STEP), MOST_STEP), float(falling[at] - falling[at + 1]) / 16


@functools.cache
def _cost_by_largest() -> np.ndarray:
    """Bits of a symbol, by the largest scale and how far below it this one lies."""
    largest, below = np.arange(LOWEST, HIGHEST + 1), np.arange(511)
    scale = np.maximum(largest[:, None] - below, LOWEST)
    return tables.costs()[np.where(scale >= 0, scale & 3, scale) - LOWEST] + (np.maximum(scale, 0) >> 2)


@functools.cache
def symbol_costs() -> np.ndarray:
    """Bits of each symbol of each table, float32, without the lowest bits."""
    count = np.diff(tables.limits()[:, : tables.SYMBOLS + 1].astype(np.float64), axis=1)
    bits = tables.PRECISION - np.log2(count)
    bits[:, 0] += 16
    return np.ascontiguousarray(bits, np.float32)


@functools.cache
def _powers() -> np.ndarray:
    return _mantissas(torch.device("cpu")).numpy()


def _quarters(square: np.ndarray) -> np.ndarray:
    """The logarithm of a root, in quarters of an octave."""
    return np.rint(2 * np.log2(np.where(square > 0, square, 1).astype(np.float64))).astype(np.int64)


def _below(quarters: np.ndarray, there: np.ndarray, otherwise: int) -> tuple[np.ndarray, int]:
    """How far below their maximum numbers lie, uint8, and the maximum."""
    most = int(quarters[there].max()) if there.any() else 0
    return np.where(there, (most - quarters).clip(0, FURTHEST_BELOW), otherwise).astype(np.uint8), most


def _turn(
    z: Tensor, factor: np.ndarray, inverse: np.ndarray, square: np.ndarray, fit: bool, rows: int, channels: int
) -> np.ndarray:
    """Fit tokens' scales to those of the channels, if asked to, and give the sums for the channels'."""
    sums: list[np.ndarray] = []
    at = [a.ctypes.data for a in (factor, inverse, square)]

    def work(first: int, last: int) -> None:
        part = np.zeros(channels, np.float32)
        sums.append(part)
        _fit_rows(z.data_ptr(), first, last, channels, *at, fit, part.ctypes.data)

    over_rows(work, rows, z.nbytes)
    return np.sum(sums, 0)


@kernel
def _measure(z, first, last, channels, most, factor, sums) -> None:
    """Bits of each row's largest magnitude, what brings it below 2, and the sum of squares then."""
    for r in range(first, last):
        line, largest = z + 4 * r * channels, np.int32(0)
        for j in range(channels):
            largest = greater32(largest, float_bits(magnitude(get_float(line, j))))
        put_int(most, r, largest)
        scale = power_of_two(127 - lesser32(greater32(largest >> 23, 1), 253))
        put_float(factor, r, scale)
        put_float(sums, r, squares(line, channels, scale))


@kernel
def _fit_rows(z, first, last, channels, factor, inverse, square, fit, sums) -> None:
    for r in range(first, last):
        line, scale = z + 4 * r * channels, get_float(factor, r)
        if scale > 0:
            if fit:
                put_float(square, r, _weighted(line, inverse, scale, channels) / np.float32(channels))
            _add_squares(sums, line, scale, np.float32(1) / greater(get_float(square, r), SMALLEST), channels)


@summing
def _weighted(line, weight, scale, channels) -> Any:
    total = np.float32(0)
    for j in range(channels):
        value = get_float(line, j) * scale
        total += value * value * get_float(weight, j)
    return total


@summing
def _add_squares(sums, line, scale, weight, channels) -> Any:
    for j in range(channels):
        value = get_float(line, j) * scale
        put_float(sums, j, get_float(sums, j) + value * value * weight)


@kernel
def _cost_of(z, sample, count, channels, channel, rows, inverse, seed, costs) -> Any:
    """Bits of these rows' symbols and of what travels beside them."""
    total, raw = np.float64(0), np.int64(0)
    for i in range(count):
        r = np.int64(get_word(sample, i))
        row, scaled = get_int(rows, r), get_float(inverse, r)
        for j in range(channels):
            dither, scale = dither_of(r * channels + j, seed), scale_of(get_int(channel, j), row)
            value = code_of(get_float(z, r * channels + j), scaled, dither)
            total += get_float(costs, symbol_of(value, scale, context_of(scale, dither, row)))
            raw += raw_of(scale)
    return total + raw
