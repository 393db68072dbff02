"""Operations on each coefficient, as 32-bit LLVM instructions (see `lowbit.kernels.cpu.formulas`)."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.types import float32, int32, int64, uint16

from lowbit.codecs.transform_quant import tables
from lowbit.codecs.transform_quant.reference import FARTHEST, LIMIT, WORD
from lowbit.codecs.transform_quant.tables import (
    BORDERS,
    DEAD,
    DITHERS,
    HIGHEST,
    LOWEST,
    MIDDLE,
    NOISE,
    PRECISION,
    ROOT,
    SYMBOLS,
    TOTAL,
)
from lowbit.kernels.cpu.formulas import greater, greater32, lesser, lesser32, magnitude, power_of_two
from lowbit.kernels.cpu.jit import operation
from lowbit.kernels.cpu.memory import F32, I16, I32, I64

DEAD_TOKEN = -(1 << 20)  # addend to scales that marks a token without coefficients


@operation(int32, int64, int32)
def dither_of(b: Any, index: Any, seed: Any) -> Any:
    """A byte: `reference.dither`."""
    above = b.mul(b.trunc(b.lshr(index, I64(32)), I32), I32(0x9E3779B9))
    h = b.xor(b.trunc(index, I32), b.add(seed, above))
    h = b.mul(b.xor(h, b.lshr(h, I32(16))), I32(0x7FEB352D))
    h = b.mul(b.xor(h, b.lshr(h, I32(15))), I32(0x846CA68B))
    return b.lshr(b.xor(h, b.lshr(h, I32(16))), I32(24))


@operation(int32, int32, int32)
def scale_of(b: Any, channel: Any, row: Any) -> Any:
    """The standard deviation that a coefficient is coded for, in quarters of an octave of a step."""
    return lesser32(b, greater32(b, b.add(channel, row), I32(LOWEST)), I32(HIGHEST))


@operation(int32, int32)
def raw_of(b: Any, scale: Any) -> Any:
    """Number of a code's lowest bits that are sent uncoded."""
    return b.ashr(greater32(b, scale, I32(0)), I32(2))


@operation(int32, int32, int32, int32)
def context_of(b: Any, scale: Any, dither: Any, row: Any) -> Any:
    """The table that a symbol is coded with."""
    dead = b.icmp_signed("==", row, I32(DEAD_TOKEN))
    high = b.icmp_signed(">=", scale, I32(0))
    group = b.sub(b.select(high, b.and_(scale, I32(3)), scale), I32(LOWEST))
    group = b.select(dead, I32(DEAD), group)
    value = b.lshr(dither, b.ashr(greater32(b, scale, I32(0)), I32(2)))
    mirrored = b.sub(I32(255), value)
    near = lesser32(b, value, mirrored)
    place = I32(0)
    for border in BORDERS:
        place = b.add(place, b.zext(b.icmp_signed(">=", near, I32(border)), I32))
    low = b.icmp_signed("<", value, I32(128))
    place = b.select(low, place, b.sub(I32(DITHERS - 1), place))
    return b.add(b.shl(group, I32(4)), place)


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
def symbol_of(b: Any, code: Any, scale: Any, context: Any) -> Any:
    """16 times the table, plus the symbol of a code's upper part."""
    upper = b.ashr(code, b.ashr(greater32(b, scale, I32(0)), I32(2)))
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


@operation(int64, int64, int64)
def symbol_at(b: Any, row: Any, slot: Any) -> Any:
    """Find the symbol between whose limits in a table's row, at this address, a slot lies."""
    kind = ir.VectorType(I16, SYMBOLS)
    limits = b.load(b.inttoptr(row, ir.PointerType(kind)), align=2)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), b.trunc(slot, I16), I32(0))
    wanted = b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, SYMBOLS), [0] * SYMBOLS))
    below = b.bitcast(b.icmp_unsigned("<=", limits, wanted), I16)
    return b.sub(b.zext(b.ctpop(below), I64), I64(1))


@operation(int64, int64, int64)
def is_full(b: Any, state: Any, entry: Any) -> Any:
    """Whether a state must output a word before it encodes a symbol (see `shares`), as 0 or 1."""
    share = b.and_(b.lshr(entry, I64(PRECISION)), I64(2 * TOTAL - 1))
    return b.zext(b.icmp_unsigned(">=", state, b.shl(share, I64(LIMIT))), I64)


@operation(int64, int64, int64)
def with_symbol(b: Any, state: Any, entry: Any) -> Any:
    """Encode a symbol into a state below 2^31: the quotient by the symbol's share is a product and a shift."""
    start = b.and_(entry, I64(TOTAL - 1))
    share = b.and_(b.lshr(entry, I64(PRECISION)), I64(2 * TOTAL - 1))
    shift = b.and_(b.lshr(entry, I64(25)), I64(63))
    upper = b.lshr(b.mul(state, b.lshr(entry, I64(31))), shift)
    return b.add(b.add(state, start), b.mul(upper, b.sub(I64(TOTAL), share)))


@operation(int64, int64, int64, int64, int64)
def without_symbol(b: Any, state: Any, slot: Any, row: Any, symbol: Any) -> Any:
    """Remove a symbol from a state, by the limits in its table's row."""
    limits = b.gep(b.inttoptr(row, ir.PointerType(I16)), [symbol])
    start = b.zext(b.load(limits, align=2), I64)
    end = b.zext(b.load(b.gep(limits, [I64(1)]), align=2), I64)
    return b.add(b.mul(b.sub(end, start), b.lshr(state, I64(PRECISION))), b.sub(slot, start))


@operation(int64, int64, int64, uint16)
def refilled(b: Any, state: Any, empty: Any, word: Any) -> Any:
    """Return the state, with a word appended at its low end if `empty`."""
    fresh = b.or_(b.shl(state, I64(WORD)), b.zext(word, I64))
    return b.select(b.icmp_signed("!=", empty, I64(0)), fresh, state)


@operation(int64, int64, int64)
def lesser64(b: Any, i: Any, j: Any) -> Any:
    """The smaller of two integers, without a branch."""
    return b.select(b.icmp_signed("<", i, j), i, j)


@functools.cache
def shares() -> np.ndarray:
    """One uint64 per symbol (16 per table), from low bits up: start (12 bits), share (13), shift (6), factor (33).

    The factor is 2^shift / share, rounded up, with 31 + ceil(log2(share)) for the shift: its product with a number
    below 2^31, shifted back, is the quotient by the share, rounded down.
    """
    limits = tables.limits()[:, : SYMBOLS + 1].astype(np.int64)
    start, share = limits[:, :-1].reshape(-1), np.diff(limits, axis=1).reshape(-1)
    shift = np.array([30 + int(s - 1).bit_length() + 1 for s in share])
    factor = np.array([-(-(1 << int(n)) // int(s)) for n, s in zip(shift, share, strict=True)], np.uint64)
    packed = start | share << PRECISION | shift << 25
    return packed.astype(np.uint64) | factor << np.uint64(31)
