"""Process a row of `FeatureInt` in whole vectors: scaling, codes, planes, and back.

A vector that would cross the end of a plane is moved back to end there, and repeats some work of the one before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.types import boolean, float32, int64, intp, none  # pyright: ignore[reportAttributeAccessIssue]

from lowbit.kernels.cpu import formulas
from lowbit.kernels.cpu.formulas import constant, load, shaped, spread, store
from lowbit.kernels.cpu.jit import helper, operation
from lowbit.kernels.cpu.memory import F32, I8, I16, I32, I64, get_byte, pointer, put_byte

LANES = 32  # elements in registers at a time
LOCALITY = 2  # prefetch to the second cache: the first one is full
WORDS = ir.VectorType(I64, LANES // 8)
BYTES = ir.VectorType(I8, LANES)


@operation(intp, intp, intp)
def word(b: Any, address: Any, index: Any) -> Any:
    """Read an address from a list of addresses."""
    return b.load(pointer(b, address, index, I64), align=1)


def _scaler(halves: bool) -> Any:
    @operation(int64, intp, intp, intp, intp, intp)
    def scale(b: Any, x: Any, offset: Any, inverse: Any, count: Any, to: Any) -> Any:
        """Write (x - offset) inverse of `count` numbers, a multiple of `LANES`; return the largest magnitude."""
        most = cgutils.alloca_once_value(b, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
        with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
            first = b.mul(loop.index, I64(LANES))
            numbers = load(b, x, first, I16 if halves else F32, LANES)
            if halves:
                bits = b.zext(numbers, shaped(I32, numbers))
                numbers = formulas.bits_float(b, b.shl(bits, constant(I32, 16, bits)))
            v = b.fmul(b.fsub(numbers, load(b, offset, first, F32, LANES)), load(b, inverse, first, F32, LANES))
            store(b, v, b.add(to, b.mul(first, I64(4))))
            bits = formulas.float_bits(b, formulas.magnitude(b, v))
            b.store(formulas.greater32(b, bits, b.load(most)), most)
        name = f"llvm.vector.reduce.smax.v{LANES}i32"
        kind = ir.FunctionType(I32, [ir.VectorType(I32, LANES)])
        return b.zext(b.call(cgutils.get_or_insert_function(b.module, kind, name), [b.load(most)]), I64)

    return scale


scale_bf16, scale_float32 = _scaler(True), _scaler(False)


@operation(none, intp, float32, float32, float32, intp, intp, intp, intp)
def code_line(
    b: Any, line: Any, factor: Any, center: Any, top: Any, count: Any, to: Any, ahead: Any, size: Any
) -> None:
    """Write the codes of `count` numbers of a line, a multiple of `LANES`, as bytes.

    Meanwhile prefetch the next row, `count` elements of `size` bytes from address `ahead` on.
    """
    factor, center, top = (spread(b, v, LANES) for v in (factor, center, top))
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
        first = b.mul(loop.index, I64(LANES))
        b.call(prefetch, [pointer(b, ahead, b.mul(first, size), I8), I32(0), I32(LOCALITY), I32(1)])
        v = b.fadd(b.fmul(load(b, line, first, F32, LANES), factor), center)
        store(b, formulas.code(b, v, top), b.add(to, first))


@operation(none, intp, intp, intp)
def move(b: Any, source: Any, to: Any, count: Any) -> None:
    """Copy `count` bytes and up to `LANES` - 1 more."""
    with cgutils.for_range(b, b.udiv(b.add(count, I64(LANES - 1)), I64(LANES))) as loop:
        first = b.mul(loop.index, I64(LANES))
        store(b, load(b, source, first, I8, LANES), b.add(to, first))


@operation(none, intp, float32, float32, intp, intp, intp, intp, boolean, boolean)
def numbers(
    b: Any, codes: Any, center: Any, gain: Any, scale: Any, offset: Any, count: Any, line: Any, first: Any, last: Any
) -> None:
    """Decode `count` codes, a multiple of `LANES`, to a line, or add them to it.

    The last summand also adds the offsets.
    """
    center, gain = spread(b, b.fneg(center), LANES), spread(b, gain, LANES)

    def build(adds: bool, ends: bool) -> None:
        with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
            at = b.mul(loop.index, I64(LANES))
            value = formulas.restored(b, load(b, codes, at, I8, LANES), center, gain)
            value = b.fmul(value, load(b, scale, at, F32, LANES))
            if adds:
                value = b.fadd(load(b, line, at, F32, LANES), value)
            if ends:
                value = b.fadd(value, load(b, offset, at, F32, LANES))
            store(b, value, b.add(line, b.mul(at, I64(4))))

    with b.if_else(first) as (write, add):
        for branch, adds in ((write, False), (add, True)):
            with branch, b.if_else(last) as (end, go_on):
                for inner, ends in ((end, True), (go_on, False)):
                    with inner:
                        build(adds, ends)


def _over(b: Any, width: Any) -> Any:
    """Emit a loop over vectors that cover `width` bytes, at least `LANES`; yields the start of each."""
    return cgutils.for_range(b, b.udiv(b.add(width, I64(LANES - 1)), I64(LANES)))


def _start(b: Any, index: Any, width: Any) -> Any:
    first, most = b.mul(index, I64(LANES)), b.sub(width, I64(LANES))
    return b.select(b.icmp_signed("<", first, most), first, most)


def _fields(p: int) -> ir.Constant:
    """Mask of the low p bits of every byte."""
    return ir.Constant(WORDS, [((1 << p) - 1) * 0x0101010101010101] * (LANES // 8))


def _packer(p: int) -> Any:
    @operation(none, intp, intp, intp, intp)
    def pack(b: Any, codes: Any, width: Any, done: Any, to: Any) -> None:
        """Write a plane of p bits that is `width` bytes long, from codes with `done` bits below it."""
        below = spread(b, done, LANES // 8)
        with _over(b, width) as loop:
            first, plane = _start(b, loop.index, width), None
            for s in range(8 // p):
                at = b.add(first, b.mul(width, I64(s)))
                part = b.bitcast(load(b, codes, at, I8, LANES), WORDS)
                part = b.shl(b.and_(b.lshr(part, below), _fields(p)), constant(I64, p * s, part))
                plane = part if plane is None else b.or_(plane, part)
            store(b, b.bitcast(plane, BYTES), b.add(to, first))

    return pack


def _unpacker(p: int) -> Any:
    @operation(none, intp, intp, intp, intp)
    def unpack(b: Any, plane: Any, width: Any, done: Any, codes: Any) -> None:
        """Inverse of `pack`: write codes, or add the plane's bits to codes that have lower bits."""
        below = spread(b, done, LANES // 8)

        def build(adds: bool) -> None:
            with _over(b, width) as loop:
                first = _start(b, loop.index, width)
                bits = b.bitcast(load(b, plane, first, I8, LANES), WORDS)
                for s in range(8 // p):
                    at = b.add(first, b.mul(width, I64(s)))
                    part = b.and_(b.lshr(bits, constant(I64, p * s, bits)), _fields(p))
                    if adds:
                        before = b.bitcast(load(b, codes, at, I8, LANES), WORDS)
                        part = b.or_(b.shl(part, below), before)
                    store(b, b.bitcast(part, BYTES), b.add(codes, at))

        with b.if_else(b.icmp_signed(">", done, I64(0))) as (add, write):
            for branch, adds in ((add, True), (write, False)):
                with branch:
                    build(adds)

    return unpack


_pack_1, _pack_2, _pack_4, _pack_8 = (_packer(p) for p in (1, 2, 4, 8))
_unpack_1, _unpack_2, _unpack_4, _unpack_8 = (_unpacker(p) for p in (1, 2, 4, 8))


@helper
def pack(codes, count, bits, to) -> None:
    """Write the planes of a row's codes; there must be room for 7 more."""
    for j in range(count, count + 7):
        put_byte(codes, j, 0)
    done, p = 0, 8
    while p:
        if bits & p:
            width = (count * p + 7) >> 3
            if width < LANES:
                for j in range(width):
                    value = 0
                    for s in range(8 // p):
                        value |= ((get_byte(codes, j + s * width) >> done) & ((1 << p) - 1)) << (p * s)
                    put_byte(to, j, value)
            elif p == 8:
                _pack_8(codes, width, done, to)
            elif p == 4:
                _pack_4(codes, width, done, to)
            elif p == 2:
                _pack_2(codes, width, done, to)
            else:
                _pack_1(codes, width, done, to)
            done, to = done + p, to + width
        p >>= 1


@helper
def unpack(planes, count, bits, codes) -> None:
    """Inverse of `pack`: a byte for each of a row's codes, and up to 7 more."""
    done, p = 0, 8
    while p:
        if bits & p:
            width = (count * p + 7) >> 3
            if width < LANES:
                for j in range(width):
                    value = np.int64(get_byte(planes, j))
                    for s in range(8 // p):
                        field, at = (value >> (p * s)) & ((1 << p) - 1), j + s * width
                        put_byte(codes, at, field if done == 0 else (field << done) | get_byte(codes, at))
            elif p == 8:
                _unpack_8(planes, width, done, codes)
            elif p == 4:
                _unpack_4(planes, width, done, codes)
            elif p == 2:
                _unpack_2(planes, width, done, codes)
            else:
                _unpack_1(planes, width, done, codes)
            done, planes = done + p, planes + width
        p >>= 1
