"""Choices of a `TransformQuant` sender: scales of channels and tokens, the step that fills a payload, own weights."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.transform_quant.cpu_symbols import (
    DEAD_TOKEN,
    code_of,
    coding_of,
    context_of,
    dither_of,
    raw_of,
    scale_of,
    symbol_of,
)
from lowbit.codecs.transform_quant.memory import OWN_SEEN, OWN_SPREAD, OWN_TOKENS, ZEROS, sampled
from lowbit.codecs.transform_quant.reference import (
    FINE,
    FURTHEST_BELOW,
    HIGHEST,
    LEAST_STEP,
    LOWEST,
    MOST_LOWERED,
    MOST_STEP,
    NAN,
    NEGLIGIBLE,
    OUTLYING,
    ROUNDS,
    STREAM_BYTES,
    ZERO,
    TransformGeometry,
    _mantissas,
    costs,
    symbol_costs,
)
from lowbit.kernels.cpu.jit import helper, kernel, over_rows, summing
from lowbit.kernels.cpu.lines import largest, largest_bits, norm_of, squares, sum_over_rows
from lowbit.kernels.cpu.memory import (
    Room,
    address,
    get_byte,
    get_float,
    get_int,
    get_word,
    put_byte,
    put_double,
    put_float,
    put_int,
)
from lowbit.kernels.cpu.operations import ONE, greater, power_of_two
from lowbit.kernels.cpu.runs import SMALLEST

SAMPLE = 1 << 13  # approximate number of coefficients that measure how well the tables fit a message
LEAST_ROWS = 32  # tokens among them, at least
CORRECTIONS = 2  # of the first step, by that sample
RESERVE = 0.0  # share of the payload that the first attempt leaves free: one in five is repeated
BEYOND, NORMAL = (127 + 112) << 23, 0x00800000  # bits of float32 magnitudes: `LARGEST`, and the least normal one
NONE = -(1 << 20)  # marks a missing scale
NORMS = 1 << 10  # quarters of an octave, beyond the largest and the smallest norm
TINY = float(torch.finfo(torch.float32).tiny)
ZERO_, NOT_A_NUMBER = np.float32(0), np.float32(np.nan)


@dataclass(frozen=True)
class Fit:
    """A sender's choices for a message, except the step; parts of its payload, and scratch.

    Attributes:
        level, token, norm: addresses of scales of channels, and of tokens' scales and norms, as they are sent, uint8.
        channel: address of the scale of each channel, int32.
        highest, largest: the largest scale, and the largest norm.
        room: what holds them.
    """

    level: int
    token: int
    norm: int
    channel: int
    highest: int
    largest: int
    room: Room


def fitted(z: Tensor, payload: Tensor, geo: TransformGeometry) -> Fit:
    """Write scales to the payload; see the reference; sums are float32, in another order."""
    (rows, channels), at, start = z.shape, geo.layout.offsets, payload.data_ptr()
    room = Room(*[4 * rows] * 4, *[4 * channels] * 4, rows)
    quarters, norms, factor, square, inverse, total, unused, channel, norm = room.at
    norm = start + at["norms"] if geo.by_token else norm
    of_rows = quarters, norms, factor, square
    over_rows(lambda i, j: _measure(z.data_ptr(), i, j, channels, *of_rows, geo.by_token), rows, z.nbytes)
    for turn in range(ROUNDS + 2):
        if turn:
            _invert(total, inverse, channels)
        _turn(z, factor, inverse, square, turn > 0, total if turn <= ROUNDS else unused)
    level, token = start + at["levels"], start + at["tokens"]
    highest, largest = _travelling(total, channels, *of_rows, rows, geo.by_token, level, token, norm, channel)
    return Fit(level, token, norm, channel, highest, largest, room)


def first_step(fit: Fit, z: Tensor, seed: int, room: int, geo: TransformGeometry) -> int:
    """The step that is likely to fill `room` bytes of streams.

    The tables give the bits of symbols for their scales; a sample of tokens shows how well the tables fit.
    """
    rows, channels = z.shape
    every = max(1, min(rows * channels // SAMPLE, rows // LEAST_ROWS)) | 1  # most likely no divisor of a sequence
    return _first_step(
        z.data_ptr(), rows, channels, every, fit.level, fit.channel, fit.token, fit.norm, geo.by_token, fit.highest,
        fit.largest, address(_powers), seed, address(_costs), address(_symbol_costs),
        8 * (room - geo.streams * STREAM_BYTES) * (1 - RESERVE),
    )  # fmt: skip


def token_steps(token: int, norm: int, largest: int, step: int, geo: TransformGeometry) -> Room:
    """For each token: its addend to channels' scales, int32, its step, and the step's inverse, float32."""
    room = Room(*[4 * geo.rows] * 3)
    _token_steps(token, norm, geo.rows, geo.by_token, largest, step, address(_powers), *room.at)
    return room


@functools.cache
def _costs() -> np.ndarray:
    return costs().astype(np.float32)


@functools.cache
def _symbol_costs() -> np.ndarray:
    return symbol_costs().astype(np.float32)


@functools.cache
def _powers() -> np.ndarray:
    return _mantissas(torch.device("cpu")).numpy()


def _turn(z: Tensor, factor: int, inverse: int, square: int, fit: bool, total: int) -> None:
    """Fit tokens' scales to those of the channels, if requested, and write the sums for the channels' scales."""
    rows, channels = z.shape

    def work(first: int, last: int, sums: int) -> None:
        _fit_rows(z.data_ptr(), first, last, channels, factor, inverse, square, fit, sums)

    sum_over_rows(work, rows, z.nbytes, total, channels)


@kernel
def _measure(z, first, last, channels, quarters, norms, factor, square, by_token) -> None:
    """Compute for each row the base of its scale and norm, and the factor that brings its numbers near 1.

    A row of zeros has the factor 0, and one with NaN or numbers beyond `LARGEST` a negative one.
    """
    for r in range(first, last):
        line = z + 4 * r * channels
        largest = largest_bits(line, channels)
        exponent = (np.int64(largest) >> 23) - 127
        usable = NORMAL <= largest < BEYOND
        scale = power_of_two(-exponent) if usable else ONE
        norm = _quarters(squares(line, channels, scale) / channels) if by_token and usable else 0
        put_int(quarters, r, 0 if by_token else 4 * exponent)
        put_int(norms, r, norm + 4 * exponent)
        scale *= np.float32(2.0 ** (-0.25 * norm))
        put_float(factor, r, scale if usable else np.float32(0 if largest < NORMAL else -1))
        put_float(square, r, ONE)


@helper
def _quarters(square) -> Any:
    """Logarithm of the square root, in quarters of an octave."""
    return np.int64(np.rint(2 * np.log2(np.float64(square))))


@kernel
def _fit_rows(z, first, last, channels, factor, inverse, square, fit, sums) -> None:
    for j in range(channels):
        put_float(sums, j, ZERO_)
    for r in range(first, last):
        line, scale = z + 4 * r * channels, get_float(factor, r)
        if scale > 0:
            if fit:
                put_float(square, r, _weighted(line, inverse, scale, channels) / np.float32(channels))
            _add_squares(sums, line, scale, ONE / greater(get_float(square, r), SMALLEST), channels)


@summing
def _weighted(line, weight, scale, channels) -> Any:
    total = ZERO_
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
def _invert(total, inverse, channels) -> None:
    """Invert sums of squares to weights of channels; a common factor does not change the tokens' scales."""
    least = greater(largest(total, channels) * np.float32(NEGLIGIBLE), SMALLEST)
    for j in range(channels):
        put_float(inverse, j, ONE / greater(get_float(total, j), least))


@kernel
def _travelling(
    total, channels, quarters, norms, factor, square, rows, by_token, level, token, norm, channel
) -> Any:  # fmt: skip
    """Convert scales to the bytes that are sent, and return the largest scale."""
    if by_token:
        _lower(quarters, norms, factor, rows)
    highest, most, largest = NONE, NONE, NONE
    for j in range(channels):
        scale = _quarters(get_float(total, j)) if get_float(total, j) > 0 else NONE
        put_int(channel, j, scale)
        highest = max(highest, scale)
    for r in range(rows):
        if get_float(factor, r) > 0:
            scale = np.int64(get_int(quarters, r))
            scale += _quarters(greater(get_float(square, r), SMALLEST))
            put_int(quarters, r, scale)
            most, largest = max(most, scale), max(largest, np.int64(get_int(norms, r)))
    for j in range(channels):
        scale = np.int64(get_int(channel, j))
        put_byte(level, j, 255 if scale == NONE else min(highest - scale, FURTHEST_BELOW))
    for r in range(rows):
        coded = get_float(factor, r) > 0
        below = min(most - np.int64(get_int(quarters, r)), FURTHEST_BELOW)
        put_byte(token, r, below if coded else ZERO if get_float(factor, r) == 0 else NAN)
        below = min(largest - np.int64(get_int(norms, r)), FURTHEST_BELOW)
        put_byte(norm, r, below if coded else FURTHEST_BELOW)
    if most == NONE:
        highest, most, largest = 0, 0, 0
    for j in range(channels):
        put_int(channel, j, highest + most - np.int64(get_byte(level, j)))
    return highest + most, largest


@helper
def _lower(quarters, norms, factor, rows) -> None:
    """The reference's `lowered`: reduce outliers' norms, and raise their scales, which are in units of norms."""
    count, usable = np.zeros(2 * NORMS, np.int32), 0
    for r in range(rows):
        if get_float(factor, r) > 0:
            count[np.int64(get_int(norms, r)) + NORMS] += 1
            usable += 1
    median, up_to = 0, np.int64(count[0])
    while up_to <= (usable - 1) // 2:
        median += 1
        up_to += count[median]
    most, cost, larger = 0, 0, 0  # `larger`: outliers that lie more than `most` above the median
    for norm in range(median + OUTLYING + 1, 2 * NORMS):
        larger += count[norm]
    while most < MOST_LOWERED and cost + larger <= usable:
        most, cost = most + 1, cost + larger
        larger -= count[median + most] if most > OUTLYING else 0
    for r in range(rows):
        above = np.int64(get_int(norms, r)) + NORMS - median
        if above > OUTLYING and get_float(factor, r) > 0:
            above = min(above, most)
            put_int(norms, r, np.int64(get_int(norms, r)) - above)
            put_int(quarters, r, np.int64(get_int(quarters, r)) + above)


@kernel
def _token_steps(token, norm, rows, by_token, largest, step, powers, row, steps, inverse) -> None:
    for r in range(rows):
        below = np.int64(get_byte(token, r))
        size = _size_of(norm, r, by_token, largest, step, powers)
        put_int(row, r, _addend(below, step))
        put_float(steps, r, size if below < NAN else ZERO_ if below == ZERO else NOT_A_NUMBER)
        put_float(inverse, r, ONE / size if below < NAN else ZERO_)


@helper
def _size_of(norm, r, by_token, largest, step, powers) -> Any:
    """The step of a token."""
    fine = step
    if by_token:
        fine += FINE // 4 * (largest - np.int64(get_byte(norm, r)))
    fine = min(max(fine, LEAST_STEP), MOST_STEP)
    return get_float(powers, fine & (FINE - 1)) * power_of_two(fine >> 6)


@helper
def _addend(below, step) -> Any:
    """What the scales of channels need for those of a token's coefficients, in quarters of an octave of a step."""
    add = min(max(-((step + FINE // 8) >> 4) - below, DEAD_TOKEN + 1), -DEAD_TOKEN)
    return np.int64(DEAD_TOKEN) if below >= NAN else add


@kernel
def _first_step(
    z, rows, channels, every, level, channel, token, norm, by_token, highest, largest, powers, seed, mean, costs, wanted
) -> Any:  # fmt: skip
    """Find the step with which the tables predict `wanted` bits, and correct it by the bits of some tokens."""
    count = _count_scales(level, channels, token, rows)
    step = _step_for(count, highest, mean, wanted)
    for _ in range(CORRECTIONS):
        taken, expected = 0.0, 0.0
        for r in range(every >> 1, rows, every):
            below = np.int64(get_byte(token, r))
            if below < NAN:
                add, size = _addend(below, step), _size_of(norm, r, by_token, largest, step, powers)
                taken += _cost_of(z + 4 * r * channels, r * channels, channels, channel, add, ONE / size, seed, costs)
                expected += _expected(channels, channel, add, mean)
        at = (step + FINE // 8) >> 4
        bits = _bits_at(count, highest - at, mean)
        slope = (bits - _bits_at(count, highest - at - 1, mean)) / 16
        if expected > 0 and slope > 0:
            step += np.int64(np.ceil((bits - wanted * expected / max(taken, 1.0)) / slope))
            step = min(max(step, LEAST_STEP, 16 * (highest - HIGHEST)), MOST_STEP)
    return step


@helper
def _count_scales(level, channels, token, rows) -> Any:
    """How many coefficients have which scale, in quarters of an octave below the largest; without dead tokens."""
    levels, tokens = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for j in range(channels):
        levels[get_byte(level, j)] += 1
    for r in range(rows):
        tokens[get_byte(token, r)] += 1
    tokens[NAN:] = 0
    count = np.zeros(512, np.float64)
    for i in range(256):
        if levels[i] > 0:
            for k in range(NAN):
                count[i + k] += levels[i] * tokens[k]
    return count


@helper
def _step_for(count, highest, cost, wanted) -> Any:
    """Return the step whose symbols take about `wanted` bits, if they are distributed as in the tables."""
    low, high = highest - HIGHEST, highest - LOWEST  # a step that is too small, and one that is large enough, if any is
    more, fewer = _bits_at(count, highest - low, cost), _bits_at(count, highest - high, cost)
    if more <= wanted:
        high, fewer = low, more
    while high - low > 1:
        middle = (low + high) >> 1
        bits = _bits_at(count, highest - middle, cost)
        if bits <= wanted:
            high, fewer = middle, bits
        else:
            low, more = middle, bits
    share = (wanted - fewer) / (more - fewer) if more > fewer else 0.0
    step = 16 * high - np.int64(16 * min(max(share, 0.0), 1.0))
    return min(max(step, LEAST_STEP), MOST_STEP)


@helper
def _bits_at(count, largest, cost) -> Any:
    total = 0.0
    for below in range(512):
        if count[below] > 0:
            total += count[below] * np.float64(get_float(cost, max(largest - below, LOWEST) - LOWEST))
    return total


@summing
def _cost_of(line, first, channels, channel, add, inverse, seed, costs) -> Any:
    total = ZERO_
    for j in range(channels):
        dither, coding = dither_of(first, j, seed), coding_of(scale_of(get_int(channel, j), add), add)
        value = code_of(get_float(line, j), inverse, dither)
        bits = get_float(costs, symbol_of(value, coding, context_of(coding, dither)))
        total += bits + np.float32(raw_of(coding))
    return total


@summing
def _expected(channels, channel, add, mean) -> Any:
    total = ZERO_
    for j in range(channels):
        total += get_float(mean, np.int64(scale_of(get_int(channel, j), add)) - LOWEST)
    return total


def own_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `memory`."""
    rows = sampled(len(x), OWN_SEEN, x.device)
    squares = torch.zeros(x.shape[1], dtype=torch.float64, device="cpu")
    differ = _own_squares(x.data_ptr(), rows.data_ptr(), len(rows), x.shape[1], squares.data_ptr())
    return squares, torch.tensor(differ, device="cpu")


@kernel
def _own_squares(x, rows, count, channels, out) -> Any:
    used, total, squares = 0, 0.0, np.zeros(channels)
    for i in range(count):
        line = x + 4 * np.int64(get_word(rows, i)) * channels
        norm = np.float64(norm_of(line, channels))
        used += norm > 0
        scale = 1 / max(norm, TINY)
        for j in range(channels):
            value = np.float64(get_float(line, j)) * scale
            squares[j] += value * value
    for j in range(channels):
        squares[j] /= count
        put_double(out, j, squares[j])
        total += squares[j]
    if not total < np.inf or used < OWN_TOKENS:
        return False
    ordered = np.sort(squares)
    median = ordered[(channels - 1) // 2]  # as PyTorch's
    mean, square = 0.0, 0.0
    for j in range(channels):
        squares[j] = np.log2(squares[j] if squares[j] > ZEROS else median)
        mean += squares[j] / channels
    for j in range(channels):
        square += (squares[j] - mean) ** 2 / channels
    return np.sqrt(square) / 2 > OWN_SPREAD
