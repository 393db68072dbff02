"""Operations on each coefficient, and on eight symbols of the entropy coder."""

# pyright: reportAttributeAccessIssue=false

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.types import int64

from lowbit.codecs.transform_quant.reference import (
    BEGIN,
    BORDERS,
    CONTEXTS,
    DEAD,
    DITHERS,
    FARTHEST,
    HIGHEST,
    LIMIT,
    LOWEST,
    MIDDLE,
    NOISE,
    PRECISION,
    ROOT,
    STRIDE,
    SYMBOLS,
    TOTAL,
    WORD,
    limits,
)
from lowbit.kernels.cpu.jit import helper, operation
from lowbit.kernels.cpu.memory import I8, I16, I32, I64, get_half, get_int, put_half, put_int
from lowbit.kernels.cpu.operations import (
    HALF,
    ONE,
    ZERO,
    add32,
    float_bits,
    greater,
    greater32,
    lesser,
    lesser32,
    magnitude,
    power_of_two,
)

EIGHT_I16, EIGHT_I32 = (ir.VectorType(kind, 8) for kind in (I16, I32))
NEUTRAL = CONTEXTS << 4  # a symbol that leaves a state as it is; likewise the context CONTEXTS
DEAD_TOKEN = -(1 << 20)  # addend to scales that marks a token without coefficients
FAR, CELL, MIDDLE_DITHER = np.float32(FARTHEST), np.float32(1 / 256), np.float32(127.5)
ODD_SQUARE, NOISE_SQUARE = np.float32(float(ROOT)), np.float32(float(NOISE))


@helper
def dither_of(first, index, seed) -> Any:
    """A byte for an element of a row that begins with the element `first`: `reference.dither`, in 32 bits."""
    low, more = np.uint32(first), np.uint32(0x9E3779B9)
    place, seed = np.uint32(low + np.uint32(index)), np.uint32(seed + np.uint32(np.uint32(first >> 32) * more))
    h = place ^ np.uint32(seed + (more if place < low else np.uint32(0)))
    h = np.uint32(np.uint32(h ^ (h >> 16)) * np.uint32(0x7FEB352D))
    h = np.uint32(np.uint32(h ^ (h >> 15)) * np.uint32(0x846CA68B))
    return np.int32(np.uint32(h ^ (h >> 16)) >> 24)


@helper
def scale_of(channel, row) -> Any:
    """The standard deviation that a coefficient is coded for, in quarters of an octave of a step."""
    return lesser32(greater32(add32(channel, row), LOWEST), HIGHEST)


@helper
def coding_of(scale, row) -> Any:
    """How codes of a scale are coded: 32 times the first of their tables, plus the width of their lowest bits."""
    group = np.int32(scale & 3) if scale >= 0 else np.int32(scale)
    group = np.int32(DEAD) if row == DEAD_TOKEN else np.int32(group - LOWEST)
    return np.int32(group * (32 * DITHERS) + (greater32(scale, 0) >> 2))


@helper
def raw_of(coding) -> Any:
    """Number of a code's lowest bits that are sent uncoded."""
    return np.int32(coding & 31)


@helper
def context_of(coding, dither) -> Any:
    """The table that a symbol is coded with."""
    value = np.int32(np.int32(dither) >> (coding & 31))
    near = lesser32(value, 255 - value)
    # The first borders are powers of two: the exponent of `near` counts those that it reaches.
    place = lesser32((float_bits(np.float32(np.int32(near | 1))) >> 23) - 127, len(BORDERS) - 2)
    place = add32(add32(place, near >= BORDERS[-2]), near >= BORDERS[-1])
    place = place if value < 128 else np.int32(DITHERS - 1 - place)
    return np.int32((coding >> 5) + place)


@helper
def code_of(value, inverse, dither) -> Any:
    """The number of the cell that a coefficient falls into."""
    scaled = value * inverse + (np.float32(np.int32(dither)) + HALF) * CELL
    scaled = scaled if scaled == scaled else ZERO
    scaled = lesser(greater(scaled, -FAR), FAR)
    code = np.int32(scaled)
    return np.int32(code - np.int32(np.float32(code) > scaled))


@helper
def symbol_of(code, coding, context) -> Any:
    """16 times the table, plus the symbol of a code's upper part."""
    symbol = np.int32((np.int32(code) >> (coding & 31)) + MIDDLE)
    inside = 0 <= symbol < SYMBOLS  # 0, too, is one beyond
    return np.int32(np.int32(context << 4) + (symbol if inside else np.int32(0)))


@helper
def middle_of(code, dither) -> Any:
    """Middle of a cell without the dither, in steps."""
    return np.float32(np.int32(code)) + (MIDDLE_DITHER - np.float32(np.int32(dither))) * CELL


@helper
def drawn(middle, scale) -> Any:
    """`reference.drawn`, with shares computed instead of looked up: table loads cannot be vectorised."""
    square = (ODD_SQUARE if scale & 1 else ONE) * power_of_two(np.int32(scale) >> 1)
    share, size = square / (square + NOISE_SQUARE), magnitude(middle)
    size = greater(size * share, size - HALF)
    return -size if middle < ZERO else size


@helper
def encoded_eight(states, symbols, table, end) -> Any:
    """Encode eight symbols, 16 bits each, into eight states; return the number of words.

    The words of states that would get too large are written so that the last one ends at `end`, in the states' order.

    Args:
        table: address of `shares`.
    """
    words = 0
    for lane in range(7, -1, -1):
        state, entry = np.uint32(get_int(states, lane)), get_int(table, np.int64(get_half(symbols, lane)))
        start, share = np.uint32(entry & (TOTAL - 1)), np.uint32(entry) >> 16
        if state >= np.uint32(share << LIMIT):
            words += 1
            put_half(end - 2 * words, 0, state)
            state = np.uint32(state >> WORD)
        quotient = np.uint32(state // np.uint32(share))
        rest = np.uint32(state - np.uint32(quotient * share))
        put_int(states, lane, np.uint32(np.uint32(quotient << PRECISION) + rest + start))
    return words


@operation(int64, int64, int64, int64, int64, int64)
def decoded_eight(b: Any, states: Any, contexts: Any, limits: Any, places: Any, words: Any) -> Any:
    """Decode a symbol from each of eight states, and write its upper code in the place of its context, 32 bits each.

    Args:
        limits, places: addresses of `padded_limits` and `word_places`. words: where eight must be readable.

    Returns:
        The number of words that were taken.
    """
    state = b.load(_at(b, states, 0, EIGHT_I32), align=4)
    slot, pair, code = b.and_(state, _all(EIGHT_I32, TOTAL - 1)), *2 * [ir.Constant(EIGHT_I32, ir.Undefined)]
    slots = b.trunc(slot, EIGHT_I16)
    row_type = ir.VectorType(I16, SYMBOLS)
    for lane in range(8):
        context = b.zext(b.load(_at(b, contexts, 4 * lane, I32), align=4), I64)
        row = b.add(limits, b.mul(context, I64(2 * STRIDE)))
        wanted = b.shuffle_vector(slots, slots, ir.Constant(ir.VectorType(I32, SYMBOLS), [lane] * SYMBOLS))
        below = b.icmp_unsigned("<=", b.load(_at(b, row, 0, row_type), align=2), wanted)
        number = b.zext(b.ctpop(b.bitcast(below, I16)), I64)  # one more than the symbol
        limit = b.load(_at(b, b.add(row, b.shl(number, I64(1))), -2, I32), align=2)
        pair = b.insert_element(pair, limit, I32(lane))
        code = b.insert_element(code, b.trunc(number, I32), I32(lane))
    start, end = b.and_(pair, _all(EIGHT_I32, 0xFFFF)), b.lshr(pair, _all(EIGHT_I32, 16))
    state = b.mul(b.sub(end, start), b.lshr(state, _all(EIGHT_I32, PRECISION)))
    state = b.add(state, b.sub(slot, start))
    empty = b.icmp_unsigned("<", state, _all(EIGHT_I32, BEGIN))
    mask = b.zext(b.bitcast(empty, I8), I64)
    places, word = b.add(places, b.shl(mask, I64(3))), ir.Constant(EIGHT_I16, ir.Undefined)
    top = b.add(words, b.shl(b.ctpop(mask), I64(1)))
    for lane in range(8):
        place = b.zext(b.load(_at(b, places, lane, I8), align=1), I64)
        word = b.insert_element(word, b.load(_at(b, b.sub(top, place), 0, I16), align=2), I32(lane))
    fresh = b.or_(b.shl(state, _all(EIGHT_I32, WORD)), b.zext(word, EIGHT_I32))
    b.store(b.select(empty, fresh, state), _at(b, states, 0, EIGHT_I32), align=4)
    b.store(b.sub(code, _all(EIGHT_I32, MIDDLE + 1)), _at(b, contexts, 0, EIGHT_I32), align=4)
    return b.ctpop(mask)


def _at(b: Any, address: Any, offset: int, kind: ir.Type) -> Any:
    return b.inttoptr(b.add(address, I64(offset)), ir.PointerType(kind))


def _all(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


@functools.cache
def word_places() -> np.ndarray:
    """By mask of the states that have a word, and state: bytes from its word to the end of all words, uint8 (256, 8).

    For a state without a word these are the bytes from the end to the word below the next.
    """
    has = np.arange(256)[:, None] >> np.arange(8) & 1
    above = has[:, ::-1].cumsum(1)[:, ::-1] - has
    return (2 * (above + 1)).astype(np.uint8)


@functools.cache
def shares() -> np.ndarray:
    """Start | share << 16 of each symbol of each context, int32; the last context leaves a state as it is."""
    padded = np.minimum(padded_limits()[:, : SYMBOLS + 1].astype(np.int32), TOTAL)
    return np.ascontiguousarray(padded[:, :-1] | np.diff(padded, axis=1) << 16)


@functools.cache
def padded_limits() -> np.ndarray:
    """`reference.limits`, and a context that has one symbol, so that it leaves a state as it is."""
    whole = np.full((1, STRIDE), 0xFFFF, np.uint16)
    whole[0, :2] = 0, TOTAL
    return np.concatenate([limits(), whole])
