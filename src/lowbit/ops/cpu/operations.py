"""Elementwise formulas as LLVM instructions on float32 and 32-bit integers: each step with one rounding, as written."""

from __future__ import annotations

from typing import Any

from numba.types import float32, int32, uint8, uint16, uint64

from lowbit.ops.cpu.jit import operation
from lowbit.ops.cpu.memory import F32, I8, I16, I32, I64
from lowbit.ops.exact import LOG2_COEFFICIENTS

MAGNITUDE = 0x7FFFFFFF
TO_INTEGER = 2.0**23  # adding it rounds 0 <= v < 2^23 to nearest even, into the low bits
INTEGER_BITS = 0x4B000000  # of 2^23
TO_SIGNED = 1.5 * 2.0**23  # the same for |v| < 2^22


@operation(int32, float32)
def float_bits(b: Any, x: Any) -> Any:
    """The bits of a float32 number."""
    return b.bitcast(x, I32)


@operation(float32, int32)
def bits_float(b: Any, bits: Any) -> Any:
    """The float32 number with these bits."""
    return b.bitcast(bits, F32)


@operation(int32, float32)
def order_key(b: Any, x: Any) -> Any:
    """An integer in the order of float32 numbers, NaN beyond the infinities: integer minima vectorise, others do not."""
    bits = b.bitcast(x, I32)
    return b.xor(bits, b.and_(b.ashr(bits, I32(31)), I32(MAGNITUDE)))


@operation(float32, int32)
def key_value(b: Any, key: Any) -> Any:
    """The float32 number of an order key."""
    return b.bitcast(b.xor(key, b.and_(b.ashr(key, I32(31)), I32(MAGNITUDE))), F32)


@operation(float32, float32, float32)
def lesser(b: Any, x: Any, y: Any) -> Any:
    """The smaller one; `y` if either is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@operation(float32, float32, float32)
def greater(b: Any, x: Any, y: Any) -> Any:
    """The larger one; `y` if either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@operation(int32, int32, int32)
def lesser32(b: Any, i: Any, j: Any) -> Any:
    """The smaller integer."""
    return b.select(b.icmp_signed("<", i, j), i, j)


@operation(int32, int32, int32)
def greater32(b: Any, i: Any, j: Any) -> Any:
    """The larger integer."""
    return b.select(b.icmp_signed(">", i, j), i, j)


@operation(int32, int32, int32)
def add32(b: Any, i: Any, j: Any) -> Any:
    """The sum in 32 bits: a sum in 64 would halve the speed of a loop."""
    return b.add(i, j)


@operation(float32, float32)
def magnitude(b: Any, x: Any) -> Any:
    """|x|."""
    return _magnitude(b, x)


@operation(float32, float32)
def round_signed(b: Any, v: Any) -> Any:
    """The nearest integer, ties to even, of |v| < 2^22."""
    return b.fsub(b.fadd(v, F32(TO_SIGNED)), F32(TO_SIGNED))


@operation(float32, float32)
def round_bf16(b: Any, x: Any) -> Any:
    """The nearest bfloat16 of a finite number, ties to even, as float32."""
    return b.bitcast(b.and_(_carry(b, b.bitcast(x, I32), 16), I32(-0x10000)), F32)


@operation(uint8, float32, float32)
def code(b: Any, v: Any, top: Any) -> Any:
    """Round to nearest even and cut to [0, top]."""
    return b.trunc(b.bitcast(b.fadd(_cut(b, v, top), F32(TO_INTEGER)), I32), I8)


@operation(uint8, float32, float32)
def code_below(b: Any, v: Any, top: Any) -> Any:
    """Round down and cut to [0, top]."""
    return b.fptoui(_cut(b, v, top), I8)


@operation(int32, float32, float32)
def level(b: Any, x: Any, scale: Any) -> Any:
    """|x| * scale, at most 2^15, as an integer (for `lowbit.ops.exact.entropy`)."""
    rounded = b.fadd(b.fmul(_magnitude(b, x), scale), F32(TO_INTEGER))
    return b.sub(b.bitcast(rounded, I32), I32(INTEGER_BITS))


@operation(int32, float32, float32)
def weighted_log(b: Any, x: Any, scale: Any) -> Any:
    """a log2(a) in units of 1/16 for a = level(x, scale)."""
    rounded = b.fadd(b.fmul(_magnitude(b, x), scale), F32(TO_INTEGER))
    a = b.fsub(rounded, F32(TO_INTEGER))
    # Numbers from 2^19 on are multiples of 1/16; a = 0 has log2 = -127 here and gives 0.
    return b.sub(b.bitcast(b.fadd(b.fmul(a, _log2(b, a)), F32(2.0**19)), I32), I32(0x49000000))


@operation(float32, float32)
def log2(b: Any, x: Any) -> Any:
    """`lowbit.ops.exact.log2`."""
    return _log2(b, x)


@operation(float32, uint64, uint64)
def uniform(b: Any, index: Any, seed: Any) -> Any:
    """A number in [0, 1) with 24 bits: the reference's hash."""
    above = b.mul(b.trunc(b.lshr(index, I64(32)), I32), I32(0x9E3779B9))
    h = b.xor(b.trunc(index, I32), b.add(b.trunc(seed, I32), above))
    h = b.mul(b.xor(h, b.lshr(h, I32(16))), I32(0x7FEB352D))
    h = b.mul(b.xor(h, b.lshr(h, I32(15))), I32(0x846CA68B))
    h = b.xor(h, b.lshr(h, I32(16)))
    return b.fmul(b.sitofp(b.lshr(h, I32(8)), F32), F32(2.0**-24))


@operation(uint8, uint64)
def byte_of_flags(b: Any, flags: Any) -> Any:
    """Eight bytes, each 0 or 1, as the bits of one."""
    return b.trunc(b.lshr(b.mul(flags, I64(0x0102040810204080)), I64(56)), I8)


@operation(uint64, uint8)
def flags_of_byte(b: Any, bits: Any) -> Any:
    """Inverse of `byte_of_flags`."""
    spread = b.mul(b.zext(bits, I64), I64(0x0101010101010101))
    chosen = b.and_(spread, I64(0x8040201008040201))
    carried = b.add(chosen, I64(0x7F7F7F7F7F7F7F7F))
    return b.and_(b.lshr(carried, I64(7)), I64(0x0101010101010101))


@operation(float32, uint16)
def from_bf16(b: Any, half: Any) -> Any:
    """Exactly."""
    return b.bitcast(b.shl(b.zext(half, I32), I32(16)), F32)


@operation(uint16, float32)
def to_bf16(b: Any, x: Any) -> Any:
    """Round to nearest even."""
    bits = b.bitcast(x, I32)
    rounded = b.lshr(_carry(b, bits, 16), I32(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), I32(0x7FC0), rounded), I16)


@operation(float32, uint16)
def from_fp16(b: Any, half: Any) -> Any:
    """Exactly, subnormal numbers too, whatever the mode for them."""
    h = b.zext(half, I32)
    sign = b.shl(b.and_(h, I32(0x8000)), I32(16))
    a = b.shl(b.and_(h, I32(0x7FFF)), I32(13))
    tiny = b.fsub(b.bitcast(b.add(a, I32(0x38800000)), F32), F32(2.0**-14))
    bits = b.add(a, I32(0x38000000))
    bits = b.select(b.icmp_unsigned(">=", a, I32(0x0F800000)), b.or_(a, I32(0x7F800000)), bits)
    bits = b.select(b.icmp_unsigned("<", a, I32(0x00800000)), b.bitcast(tiny, I32), bits)
    return b.bitcast(b.or_(bits, sign), F32)


@operation(uint16, float32)
def to_fp16(b: Any, x: Any) -> Any:
    """Round to nearest even; what is finite stays finite."""
    bits = b.bitcast(x, I32)
    sign = b.and_(b.lshr(bits, I32(16)), I32(0x8000))
    a, most, infinity = b.and_(bits, I32(MAGNITUDE)), I32(0x477FE000), I32(0x7F800000)
    c = b.select(b.icmp_unsigned(">", a, most), most, a)
    normal = b.lshr(b.sub(_carry(b, c, 13), I32(0x38000000)), I32(13))
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(c, F32), F32(0.5)), I32), I32(0x3F000000))
    h = b.select(b.icmp_unsigned("<", c, I32(0x38800000)), tiny, normal)
    h = b.select(b.icmp_unsigned("==", a, infinity), I32(0x7C00), h)
    h = b.select(b.icmp_unsigned(">", a, infinity), I32(0x7E00), h)
    return b.trunc(b.or_(h, sign), I16)


def _carry(b: Any, bits: Any, dropped: int) -> Any:
    """Add what makes cutting off the `dropped` low bits round to nearest even."""
    odd = b.and_(b.lshr(bits, I32(dropped)), I32(1))
    return b.add(b.add(bits, I32((1 << (dropped - 1)) - 1)), odd)


def _magnitude(b: Any, x: Any) -> Any:
    return b.bitcast(b.and_(b.bitcast(x, I32), I32(MAGNITUDE)), F32)


def _log2(b: Any, x: Any) -> Any:
    bits = b.bitcast(x, I32)
    exponent = b.sitofp(b.sub(b.ashr(bits, I32(23)), I32(127)), F32)
    t = b.fsub(b.bitcast(b.or_(b.and_(bits, I32(0x7FFFFF)), I32(0x3F800000)), F32), F32(1))
    p = F32(LOG2_COEFFICIENTS[-1])
    for c in LOG2_COEFFICIENTS[-2::-1]:
        p = b.fadd(b.fmul(p, t), F32(c))
    return b.fadd(exponent, b.fmul(p, t))


def _cut(b: Any, v: Any, top: Any) -> Any:
    v = b.select(b.fcmp_ordered(">", v, F32(0)), v, F32(0))
    return b.select(b.fcmp_ordered("<", v, top), v, top)
