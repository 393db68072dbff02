"""Encode and decode a run of elements that share one scale: a group, or a tile.

Its codes lie in bit planes (see `lowbit.kernels.layout`). Cut into `8 / p` parts, p being its narrowest plane's width,
all codes of a part lie at one shift in every plane; so eight neighbours of each part make up eight bytes of every
plane, one 64-bit word each, without a detour through memory. A run of 64 is coded all at once. The loops that numba
vectorises by itself are slower, above all for their preambles.
Arguments are addresses: `x`, `y`, `s` of float32 numbers, `codes` of scratch with a byte for each element of a run.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.types import float32, intp, none

from lowbit.kernels import exact
from lowbit.kernels.cpu import formulas
from lowbit.kernels.cpu.formulas import INTEGER_BITS
from lowbit.kernels.cpu.jit import helper, operation
from lowbit.kernels.cpu.memory import F32, I8, I32, I64, get_byte, get_float, pointer, put_byte, put_float, put_int
from lowbit.kernels.cpu.operations import code, greater32, lesser32, order_key, restored

BYTES = ir.VectorType(I8, 8)
AT_ONCE = 32  # elements of a run of 64 that are in registers at a time


@operation(none, intp, intp, float32, float32, float32, intp, intp)
def encode_words(b: Any, x: Any, part: Any, inverse: Any, shift: Any, top: Any, bits: Any, to: Any) -> None:
    """Write the codes of x[0], x[part], x[2 * part], ... and of seven neighbours each to planes from byte `to` on."""
    scale = [formulas.spread(b, v, 8) for v in (inverse, shift, top)]

    def build(bits: int) -> None:
        parts = 8 // (bits & -bits)
        codes = [
            b.bitcast(_codes(b, formulas.load(b, x, b.mul(part, I64(k)), F32, 8), *scale), I64) for k in range(parts)
        ]
        for width, done, words, first in _planes(bits, parts):
            for j in range(words):
                word = _join(b, codes[j::words], width, done)
                at = b.add(to, b.mul(part, I64(first + j)))
                b.store(word, b.inttoptr(at, ir.PointerType(I64)), align=1)

    _for_bits(b, bits, build)


@operation(none, intp, float32, float32, float32, intp, intp)
def encode_64(b: Any, x: Any, inverse: Any, shift: Any, top: Any, bits: Any, to: Any) -> None:
    """Encode 64 elements: their codes are eight words, which lie next to each other in the planes."""
    scale = [formulas.spread(b, v, AT_ONCE) for v in (inverse, shift, top)]
    words = ir.VectorType(I64, AT_ONCE // 8)
    low, high = (b.bitcast(_codes(b, formulas.load(b, x, I64(i), F32, AT_ONCE), *scale), words) for i in (0, AT_ONCE))

    def build(bits: int) -> None:
        for width, done, count, first in _planes(bits, 8):
            groups = [_pick(b, low, high, range(i, i + count)) for i in range(0, 8, count)]
            plane = _join(b, groups, width, done)
            target = pointer(b, to, I64(8 * first), I8)
            b.store(plane, b.bitcast(target, ir.PointerType(plane.type)), align=1)

    _for_bits(b, bits, build)


@operation(none, intp, intp, intp, float32, float32, intp)
def decode_words(b: Any, start: Any, part: Any, bits: Any, offset: Any, step: Any, y: Any) -> None:
    """Inverse of `encode_words`: write (code + offset) * step to y[0], y[part], ... and their neighbours."""
    scale = [formulas.spread(b, v, 8) for v in (offset, step)]

    def build(bits: int) -> None:
        parts = 8 // (bits & -bits)
        codes = [I64(0)] * parts
        for width, done, words, first in _planes(bits, parts):
            for j in range(words):
                at = b.add(start, b.mul(part, I64(first + j)))
                word = b.load(b.inttoptr(at, ir.PointerType(I64)), align=1)
                for s in range(8 // width):
                    field = b.and_(b.lshr(word, I64(width * s)), _mask(width, word))
                    k = j + s * words
                    codes[k] = b.or_(codes[k], b.shl(field, I64(done)))
        for k, c in enumerate(codes):
            numbers = formulas.restored(b, b.bitcast(c, BYTES), *scale)
            target = pointer(b, y, b.mul(part, I64(k)), F32)
            b.store(numbers, b.bitcast(target, ir.PointerType(numbers.type)), align=4)

    _for_bits(b, bits, build)


@operation(none, intp, intp, intp)
def extremes_64(b: Any, x: Any, low: Any, high: Any) -> None:
    """Write the order keys of the smallest and the largest of 64 elements."""
    keys = formulas.order_key(b, formulas.load(b, x, I64(0), F32, 64))
    b.store(_reduced(b, "smin", keys), b.inttoptr(low, ir.PointerType(I32)))
    b.store(_reduced(b, "smax", keys), b.inttoptr(high, ir.PointerType(I32)))


@operation(none, intp, float32, intp, intp)
def entropy_sums_64(b: Any, x: Any, scale: Any, total: Any, terms: Any) -> None:
    """Write the sums of 64 integers and of their weighted logarithms."""
    sums = [I32(0), I32(0)]
    for i in range(0, 64, AT_ONCE):
        levels = formulas.level(b, formulas.load(b, x, I64(i), F32, AT_ONCE), formulas.spread(b, scale, AT_ONCE))
        logs = formulas.weighted_log(b, levels)
        for n, values in enumerate((levels, logs)):
            sums[n] = b.add(sums[n], _reduced(b, "add", formulas.float_bits(b, values)))
    for bits, value, target in zip((INTEGER_BITS, 0x49000000), sums, (total, terms), strict=True):
        b.store(b.sub(value, I32(64 * bits)), b.inttoptr(target, ir.PointerType(I32)))


def _planes(bits: int, parts: int) -> list[tuple[int, int, int, int]]:
    """For each plane: its width, the code's bits below it, and its length and start in bytes per byte of a part."""
    done, planes = 0, []
    for width in (8, 4, 2, 1):
        if bits & width:
            planes.append((width, done, parts * width // 8, parts * done // 8))
            done += width
    return planes


def _codes(b: Any, x: Any, inverse: Any, shift: Any, top: Any) -> Any:
    return formulas.code(b, b.fadd(b.fmul(x, inverse), shift), top)


def _join(b: Any, groups: list[Any], width: int, done: int) -> Any:
    """Combine the codes at each of a plane's shifts to the plane's words."""
    plane = formulas.constant(I64, 0, groups[0])
    for s, codes in enumerate(groups):
        field = b.lshr(codes, formulas.constant(I64, done, codes))
        field = b.and_(field, _mask(width, codes))
        plane = b.or_(plane, b.shl(field, formulas.constant(I64, width * s, codes)))
    return plane


def _mask(width: int, like: Any) -> Any:
    return formulas.constant(I64, ((1 << width) - 1) * 0x0101010101010101, like)


def _pick(b: Any, low: Any, high: Any, lanes: range) -> Any:
    return b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _reduced(b: Any, how: str, values: Any) -> Any:
    name = f"llvm.vector.reduce.{how}.v{values.type.count}i32"
    kind = ir.FunctionType(I32, [values.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [values])


def _for_bits(b: Any, bits: Any, build: Callable[[int], None]) -> None:
    """Emit one branch per width of codes, in which shifts and the number of parts are constants."""
    done = b.append_basic_block("done")
    switch = b.switch(bits, done)
    for known in range(2, 9):
        block = b.append_basic_block(f"bits{known}")
        switch.add_case(I64(known), block)
        with b.goto_block(block):
            build(known)
            b.branch(done)
    b.position_at_end(done)


LARGEST, SMALLEST = np.float32(exact.LARGEST), np.float32(exact.SMALLEST)
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
KEY_INFINITY, KEY_MINUS_INFINITY = 0x7F800000, 0x807FFFFF - 2**32


@helper
def put_extremes(x, count, low, high) -> None:
    """Write the order keys of the smallest and the largest element to the addresses `low` and `high`."""
    if count == 64:
        extremes_64(x, low, high)
        return
    least, most = np.int32(2**31 - 1), np.int32(-(2**31))
    for j in range(count):
        key = order_key(get_float(x, j))
        least = lesser32(least, key)
        most = greater32(most, key)
    put_int(low, 0, least)
    put_int(high, 0, most)


@helper
def are_finite(low, high) -> Any:
    """Whether a run with these extremes holds neither NaN nor Inf."""
    return low > KEY_MINUS_INFINITY and high < KEY_INFINITY


@helper
def encode_run(x, count, inverse, shift, top, bits, to, codes) -> Any:
    """Write codes x * inverse + shift, rounded and clamped to [0, top], as bit planes to `to`; returns their end.

    `count` is rounded up to a multiple of 8 with codes of 0.
    """
    padded = (count + 7) & -8
    part = (padded * (bits & -bits)) >> 3
    if count == 64:
        encode_64(x, inverse, shift, top, bits, to)
        return to + 8 * bits
    # Words hold eight neighbours; runs whose parts are not multiples of eight are packed byte by byte.
    if part & 7 == 0 and count == padded:
        for i in range(0, part, 8):
            encode_words(x + 4 * i, part, inverse, shift, top, bits, to + i)
        return to + (padded >> 3) * bits
    for j in range(count):
        put_byte(codes, j, code(get_float(x, j) * inverse + shift, top))
    return pack(codes, count, bits, to)


@helper
def decode_run(start, count, bits, offset, step, y, codes) -> Any:
    """Decode the codes at `start` to y = (code + offset) * step; returns the codes' end."""
    padded = (count + 7) & -8
    part = (padded * (bits & -bits)) >> 3
    if part & 7 == 0 and count == padded:
        for i in range(0, part, 8):
            decode_words(start + i, part, bits, offset, step, y + 4 * i)
    else:
        unpack(start, padded, bits, codes)
        for j in range(count):
            put_float(y, j, restored(get_byte(codes, j), offset, step))
    return start + (padded >> 3) * bits


@helper
def pack(codes, count, bits, to) -> Any:
    """Pack any number of codes into bit planes, byte by byte (see `encode_run`)."""
    padded, done, width = (count + 7) & -8, 0, 8
    for j in range(count, padded):
        put_byte(codes, j, 0)
    while width:
        if bits & width:
            size = (padded >> 3) * width
            for byte in range(size):
                value, shift = 0, 0
                for j in range(byte, padded, size):
                    value |= ((get_byte(codes, j) >> done) & ((1 << width) - 1)) << shift
                    shift += width
                put_byte(to, 0, value)
                to += 1
            done += width
        width >>= 1
    return to


@helper
def unpack(start, padded, bits, codes) -> None:
    """Inverse of `pack`: write a byte per code; `padded` is their number, rounded up to a multiple of 8."""
    done, width = 0, 8
    while width:
        if bits & width:
            size = (padded >> 3) * width
            for byte in range(size):
                value = np.int64(get_byte(start, 0))
                for j in range(byte, padded, size):
                    field = (value & ((1 << width) - 1)) << done
                    put_byte(codes, j, field | get_byte(codes, j) if done else field)
                    value >>= width
                start += 1
            done += width
        width >>= 1
