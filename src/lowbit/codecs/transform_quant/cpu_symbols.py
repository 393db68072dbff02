"""Operations on each coefficient, as 32-bit LLVM instructions (see `lowbit.kernels.cpu.formulas`)."""

# pyright: reportAttributeAccessIssue=false

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.types import float32, int32, int64

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
from lowbit.kernels.cpu.formulas import greater, greater32, lesser, lesser32, magnitude, power_of_two
from lowbit.kernels.cpu.jit import operation
from lowbit.kernels.cpu.memory import F32, I8, I16, I32, I64

EIGHT_I16, EIGHT_I32, EIGHT_F32 = (ir.VectorType(kind, 8) for kind in (I16, I32, F32))
NEUTRAL = CONTEXTS << 4  # a symbol that leaves a state as it is; likewise the context CONTEXTS
DEAD_TOKEN = -(1 << 20)  # addend to scales that marks a token without coefficients


@operation(int32, int64, int64, int32)
def dither_of(b: Any, first: Any, index: Any, seed: Any) -> Any:
    """A byte for an element of a row that begins with the element `first`: `reference.dither`, in 32 bits."""
    low, above = b.trunc(first, I32), b.trunc(b.lshr(first, I64(32)), I32)
    place, seed = b.add(low, b.trunc(index, I32)), b.add(seed, b.mul(above, I32(0x9E3779B9)))
    carried = b.icmp_unsigned("<", place, low)
    h = b.xor(place, b.select(carried, b.add(seed, I32(0x9E3779B9)), seed))
    h = b.mul(b.xor(h, b.lshr(h, I32(16))), I32(0x7FEB352D))
    h = b.mul(b.xor(h, b.lshr(h, I32(15))), I32(0x846CA68B))
    return b.lshr(b.xor(h, b.lshr(h, I32(16))), I32(24))


@operation(int32, int32, int32)
def scale_of(b: Any, channel: Any, row: Any) -> Any:
    """The standard deviation that a coefficient is coded for, in quarters of an octave of a step."""
    return lesser32(b, greater32(b, b.add(channel, row), I32(LOWEST)), I32(HIGHEST))


@operation(int32, int32, int32)
def coding_of(b: Any, scale: Any, row: Any) -> Any:
    """How codes of a scale are coded: 32 times the first of their tables, plus the width of their lowest bits."""
    dead = b.icmp_signed("==", row, I32(DEAD_TOKEN))
    high = b.icmp_signed(">=", scale, I32(0))
    group = b.sub(b.select(high, b.and_(scale, I32(3)), scale), I32(LOWEST))
    group = b.select(dead, I32(DEAD), group)
    return b.add(b.mul(group, I32(32 * DITHERS)), b.ashr(greater32(b, scale, I32(0)), I32(2)))


@operation(int32, int32)
def raw_of(b: Any, coding: Any) -> Any:
    """Number of a code's lowest bits that are sent uncoded."""
    return b.and_(coding, I32(31))


@operation(int32, int32, int32)
def context_of(b: Any, coding: Any, dither: Any) -> Any:
    """The table that a symbol is coded with."""
    value = b.lshr(dither, b.and_(coding, I32(31)))
    mirrored = b.sub(I32(255), value)
    near = lesser32(b, value, mirrored)
    # The first borders are powers of two: the exponent of `near` counts those that it reaches.
    exponent = b.lshr(b.bitcast(b.sitofp(b.or_(near, I32(1)), F32), I32), I32(23))
    place = lesser32(b, b.sub(exponent, I32(127)), I32(len(BORDERS) - 2))
    for border in BORDERS[-2:]:
        place = b.add(place, b.zext(b.icmp_signed(">=", near, I32(border)), I32))
    low = b.icmp_signed("<", value, I32(128))
    place = b.select(low, place, b.sub(I32(DITHERS - 1), place))
    return b.add(b.lshr(coding, I32(5)), place)


@operation(int32, float32, float32, int32)
def code_of(b: Any, value: Any, inverse: Any, dither: Any) -> Any:
    """The number of the cell that a coefficient falls into."""
    shift = b.fmul(b.fadd(b.sitofp(dither, F32), F32(0.5)), F32(1 / 256))
    scaled = b.fadd(b.fmul(value, inverse), shift)
    scaled = b.select(b.fcmp_unordered("uno", scaled, scaled), F32(0), scaled)
    scaled = lesser(b, greater(b, scaled, F32(-FARTHEST)), F32(FARTHEST))
    code = b.fptosi(scaled, I32)
    above = b.fcmp_ordered(">", b.sitofp(code, F32), scaled)
    return b.sub(code, b.zext(above, I32))


@operation(int32, int32, int32, int32)
def symbol_of(b: Any, code: Any, coding: Any, context: Any) -> Any:
    """16 times the table, plus the symbol of a code's upper part."""
    upper = b.ashr(code, b.and_(coding, I32(31)))
    symbol = b.add(upper, I32(MIDDLE))
    inside = b.icmp_unsigned("<", symbol, I32(SYMBOLS))  # 0, too, is one beyond
    return b.add(b.shl(context, I32(4)), b.select(inside, symbol, I32(0)))


@operation(float32, int32, int32)
def middle_of(b: Any, code: Any, dither: Any) -> Any:
    """Middle of a cell without the dither, in steps."""
    shift = b.fmul(b.fsub(F32(127.5), b.sitofp(dither, F32)), F32(1 / 256))
    return b.fadd(b.sitofp(code, F32), shift)


@operation(float32, float32, int32)
def drawn(b: Any, middle: Any, scale: Any) -> Any:
    """`reference.drawn`, with shares computed instead of looked up: table loads cannot be vectorised."""
    odd = b.icmp_signed("!=", b.and_(scale, I32(1)), I32(0))
    square = b.fmul(b.select(odd, F32(float(ROOT)), F32(1)), power_of_two(b, b.ashr(scale, I32(1))))
    share, size = b.fdiv(square, b.fadd(square, F32(float(NOISE)))), magnitude(b, middle)
    size = greater(b, b.fmul(size, share), b.fsub(size, F32(0.5)))
    return b.select(b.fcmp_ordered("<", middle, F32(0)), b.fneg(size), size)


@operation(int64, int64, int64, int64, int64, int64)
def encoded_eight(b: Any, states: Any, symbols: Any, table: Any, places: Any, end: Any) -> Any:
    """Encode eight symbols, 16 bits each, into eight states; return the number of words.

    The words of states that would get too large are written so that the last one ends at `end`, in the states' order.
    What is below them may be overwritten as well.

    Args:
        table, places: addresses of `shares` and `word_places`.
    """
    state = b.load(_at(b, states, 0, EIGHT_I32), align=4)
    share = ir.Constant(EIGHT_I32, ir.Undefined)
    for lane in range(8):
        symbol = b.zext(b.load(_at(b, symbols, 2 * lane, I16), align=2), I64)
        entry = b.load(_at(b, b.add(table, b.shl(symbol, I64(2))), 0, I32), align=4)
        share = b.insert_element(share, entry, I32(lane))
    start = b.and_(share, _all(EIGHT_I32, TOTAL - 1))
    share = b.lshr(share, _all(EIGHT_I32, 16))
    full = b.icmp_unsigned(">=", state, b.shl(share, _all(EIGHT_I32, LIMIT)))
    mask = b.zext(b.bitcast(full, I8), I64)
    word, places = b.trunc(state, EIGHT_I16), b.add(places, b.shl(mask, I64(3)))
    for lane in reversed(range(8)):  # a state without a word writes where the next one below it does
        place = b.zext(b.load(_at(b, places, lane, I8), align=1), I64)
        b.store(b.extract_element(word, I32(lane)), _at(b, b.sub(end, place), 0, I16), align=2)
    state = b.select(full, b.lshr(state, _all(EIGHT_I32, WORD)), state)
    # The quotient is below 2^19, so rounding errors of float32 change it by at most 1.
    quotient = b.fptosi(b.fdiv(b.sitofp(state, EIGHT_F32), b.sitofp(share, EIGHT_F32)), EIGHT_I32)
    rest = b.sub(state, b.mul(quotient, share))
    below = b.sext(b.icmp_signed("<", rest, _all(EIGHT_I32, 0)), EIGHT_I32)
    quotient, rest = b.add(quotient, below), b.add(rest, b.and_(share, below))
    above = b.sext(b.icmp_signed(">=", rest, share), EIGHT_I32)
    quotient, rest = b.sub(quotient, above), b.sub(rest, b.and_(share, above))
    state = b.add(b.shl(quotient, _all(EIGHT_I32, PRECISION)), b.add(rest, start))
    b.store(state, _at(b, states, 0, EIGHT_I32), align=4)
    return b.ctpop(mask)


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
