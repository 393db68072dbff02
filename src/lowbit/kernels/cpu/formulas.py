"""Elementwise formulas as LLVM instructions on float32 and 32-bit integers: each step rounds once, as written.

Every function takes a builder and operands, either scalars or vectors. Its annotations are numba types, by which
`lowbit.kernels.cpu.operations` makes it a function for kernels.
"""

from typing import Annotated, Any

from llvmlite import ir
from numba.types import float32, int32, uint8, uint16, uint64

from lowbit.kernels.cpu.memory import F32, I8, I16, I32, I64, pointer
from lowbit.kernels.exact import BEND, LOG2_COEFFICIENTS, TILT

Float = Annotated[Any, float32]
Int = Annotated[Any, int32]
Byte = Annotated[Any, uint8]
Half = Annotated[Any, uint16]
Word = Annotated[Any, uint64]

MAGNITUDE = 0x7FFFFFFF
TO_INTEGER = 2.0**23  # adding it rounds 0 <= v < 2^23 to nearest even, into the low bits
INTEGER_BITS = 0x4B000000  # of 2^23
TO_SIGNED = 1.5 * 2.0**23  # the same for |v| < 2^22


def shaped(kind: ir.Type, like: Any) -> ir.Type:
    """Return the type `kind`, or a vector of it as long as `like`."""
    return ir.VectorType(kind, like.type.count) if isinstance(like.type, ir.VectorType) else kind


def constant(kind: ir.Type, value: float, like: Any) -> ir.Constant:
    """Make a constant, or a vector of it as long as `like`."""
    shape = shaped(kind, like)
    return ir.Constant(shape, [value] * shape.count if isinstance(shape, ir.VectorType) else value)


def f32(value: float, like: Any) -> ir.Constant:
    """Make a float32 constant."""
    return constant(F32, value, like)


def i32(value: int, like: Any) -> ir.Constant:
    """Make a constant of 32 bits."""
    return constant(I32, value, like)


def float_bits(b: Any, x: Float) -> Int:
    """The bits of float32 numbers."""
    return b.bitcast(x, shaped(I32, x))


def bits_float(b: Any, bits: Int) -> Float:
    """The float32 numbers with these bits."""
    return b.bitcast(bits, shaped(F32, bits))


def order_key(b: Any, x: Float) -> Int:
    """Map float32 to integers in the same order, NaN beyond infinity: integer minima vectorise, float minima do not."""
    return _flip(b, float_bits(b, x))


def key_value(b: Any, key: Int) -> Float:
    """The float32 numbers of order keys."""
    return bits_float(b, _flip(b, key))


def lesser(b: Any, x: Float, y: Float) -> Float:
    """The smaller of two numbers; `y` if either is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def greater(b: Any, x: Float, y: Float) -> Float:
    """The larger of two numbers; `y` if either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def lesser32(b: Any, i: Int, j: Int) -> Int:
    """The smaller of two integers."""
    return b.select(b.icmp_signed("<", i, j), i, j)


def greater32(b: Any, i: Int, j: Int) -> Int:
    """The larger of two integers."""
    return b.select(b.icmp_signed(">", i, j), i, j)


def add32(b: Any, i: Int, j: Int) -> Int:
    """The sum in 32 bits: 64 bits would halve the speed of a loop."""
    return b.add(i, j)


def truncate(b: Any, x: Float) -> Int:
    """Convert to a 32-bit integer, rounding towards zero."""
    return b.fptosi(x, shaped(I32, x))


def magnitude(b: Any, x: Float) -> Float:
    """|x|."""
    return bits_float(b, b.and_(float_bits(b, x), constant(I32, MAGNITUDE, x)))


def power_of_two(b: Any, exponent: Int) -> Float:
    """2^exponent, for normal numbers."""
    return bits_float(b, b.shl(b.add(exponent, constant(I32, 127, exponent)), i32(23, exponent)))


def round_signed(b: Any, v: Float) -> Float:
    """The nearest integer, ties to even, of |v| < 2^22."""
    return b.fsub(b.fadd(v, f32(TO_SIGNED, v)), f32(TO_SIGNED, v))


def round_bf16(b: Any, x: Float) -> Float:
    """The nearest bfloat16 of a finite number, ties to even, as float32."""
    return bits_float(b, b.and_(_carry(b, float_bits(b, x), 16), i32(-0x10000, x)))


def code(b: Any, v: Float, top: Float) -> Byte:
    """Round to nearest even and clamp to [0, top], as bytes."""
    rounded = b.fadd(_cut(b, v, top), f32(TO_INTEGER, v))
    return b.trunc(float_bits(b, rounded), shaped(I8, v))


def code_below(b: Any, v: Float, top: Float) -> Byte:
    """Round down and clamp to [0, top], as bytes."""
    return b.fptoui(_cut(b, v, top), shaped(I8, v))


def restored(b: Any, codes: Byte, offset: Float, step: Float) -> Float:
    """(codes + offset) * step. The sum is exact, so it may replace the two additions of the formats' formulas."""
    numbers = b.sitofp(b.zext(codes, shaped(I32, codes)), shaped(F32, codes))
    return b.fmul(b.fadd(numbers, offset), step)


def level(b: Any, x: Float, scale: Float) -> Float:
    """2^23 + |x| * scale, the product rounded to an integer (see `lowbit.kernels.exact.entropy`)."""
    return b.fadd(b.fmul(magnitude(b, x), scale), f32(TO_INTEGER, x))


def weighted_log(b: Any, level: Float) -> Float:
    """2^19 + a log2(a), the product rounded to 1/16, for a level 2^23 + a."""
    a = b.fsub(level, f32(TO_INTEGER, level))
    # float32 numbers from 2^19 on are multiples of 1/16. For a = 0 the logarithm is -127 here, and the product 0.
    return b.fadd(b.fmul(a, quick_log2(b, a)), f32(2.0**19, a))


def log2(b: Any, x: Float) -> Float:
    """`lowbit.kernels.exact.log2`."""
    bits = float_bits(b, x)
    exponent = b.sub(b.ashr(bits, i32(23, x)), i32(127, x))
    fraction = b.or_(b.and_(bits, i32(0x7FFFFF, x)), i32(0x3F800000, x))
    t = b.fsub(bits_float(b, fraction), f32(1, x))
    p = f32(LOG2_COEFFICIENTS[-1], x)
    for c in LOG2_COEFFICIENTS[-2::-1]:
        p = b.fadd(b.fmul(p, t), f32(c, x))
    return b.fadd(b.sitofp(exponent, shaped(F32, x)), b.fmul(p, t))


def quick_log2(b: Any, x: Any) -> Any:
    """`lowbit.kernels.exact.quick_log2`."""
    bits = float_bits(b, x)
    shifted = b.sitofp(b.sub(bits, i32(0x3F800000, x)), shaped(F32, x))
    fraction = b.or_(b.and_(bits, i32(0x7FFFFF, x)), i32(0x3F800000, x))
    t = b.fsub(bits_float(b, fraction), f32(1, x))
    bend = b.fadd(b.fmul(t, f32(TILT, x)), f32(BEND, x))
    straight = b.fmul(shifted, f32(2.0**-23, x))
    return b.fadd(straight, b.fmul(b.fsub(t, b.fmul(t, t)), bend))


def steps_below(b: Any, octave: Int, top: Int) -> Int:
    """Distance of a step below the top of its token in sixteenths of an octave, as a byte; 255 for no step."""
    below = b.sub(top, octave)
    below = lesser32(b, greater32(b, below, i32(0, below)), i32(254, below))
    is_zero = b.icmp_signed("==", octave, i32(0, octave))
    return b.select(is_zero, i32(255, below), below)


def step_below(b: Any, below: Int, top: Int) -> Float:
    """`lowbit.kernels.exact.octave_steps`."""
    octave = greater32(b, b.sub(top, below), i32(16, below))
    is_zero = b.icmp_signed("==", below, i32(255, below))
    step = bits_float(b, b.shl(octave, i32(19, octave)))
    return b.select(is_zero, f32(0, below), step)


def uniform(b: Any, index: Word, seed: Word) -> Float:
    """Random numbers in [0, 1) with 24 bits, by the reference's hash of 64-bit integers."""
    above = b.mul(b.trunc(b.lshr(index, I64(32)), I32), I32(0x9E3779B9))
    h = b.xor(b.trunc(index, I32), b.add(b.trunc(seed, I32), above))
    h = b.mul(b.xor(h, b.lshr(h, I32(16))), I32(0x7FEB352D))
    h = b.mul(b.xor(h, b.lshr(h, I32(15))), I32(0x846CA68B))
    h = b.xor(h, b.lshr(h, I32(16)))
    return b.fmul(b.sitofp(b.lshr(h, I32(8)), F32), F32(2.0**-24))


def byte_of_flags(b: Any, flags: Word) -> Byte:
    """Pack eight bytes, each 0 or 1, into the bits of one byte."""
    # The product has the flag of byte i at bit 56 + i, and no two of its terms meet in one bit.
    return b.trunc(b.lshr(b.mul(flags, I64(0x0102040810204080)), I64(56)), I8)


def flags_of_byte(b: Any, bits: Byte) -> Word:
    """Inverse of `byte_of_flags`."""
    spread = b.mul(b.zext(bits, I64), I64(0x0101010101010101))
    chosen = b.and_(spread, I64(0x8040201008040201))
    # Carries into the top bit of each byte that is not 0, and never out of a byte.
    carried = b.add(chosen, I64(0x7F7F7F7F7F7F7F7F))
    return b.and_(b.lshr(carried, I64(7)), I64(0x0101010101010101))


def from_bf16(b: Any, half: Half) -> Float:
    """Convert exactly."""
    return b.bitcast(b.shl(b.zext(half, I32), I32(16)), F32)


def to_bf16(b: Any, x: Float) -> Half:
    """Round to nearest even."""
    # NaN apart: the carry could make it infinity, or zero.
    rounded = b.lshr(_carry(b, float_bits(b, x), 16), I32(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), I32(0x7FC0), rounded), I16)


def from_fp16(b: Any, half: Half) -> Float:
    """Convert exactly, also subnormal numbers, in any denormal mode."""
    h = b.zext(half, I32)
    sign = b.shl(b.and_(h, I32(0x8000)), I32(16))
    a = b.shl(b.and_(h, I32(0x7FFF)), I32(13))
    # By a difference of normal numbers: `a` itself is a subnormal one, which the processor may flush.
    tiny = b.fsub(b.bitcast(b.add(a, I32(0x38800000)), F32), F32(2.0**-14))
    bits = b.add(a, I32(0x38000000))
    bits = b.select(b.icmp_unsigned(">=", a, I32(0x0F800000)), b.or_(a, I32(0x7F800000)), bits)
    bits = b.select(b.icmp_unsigned("<", a, I32(0x00800000)), b.bitcast(tiny, I32), bits)
    return b.bitcast(b.or_(bits, sign), F32)


def to_fp16(b: Any, x: Float) -> Half:
    """Round to nearest even; finite numbers stay finite."""
    bits = b.bitcast(x, I32)
    sign = b.and_(b.lshr(bits, I32(16)), I32(0x8000))
    a, most, infinity = b.and_(bits, I32(MAGNITUDE)), I32(0x477FE000), I32(0x7F800000)
    c = b.select(b.icmp_unsigned(">", a, most), most, a)
    normal = b.lshr(b.sub(_carry(b, c, 13), I32(0x38000000)), I32(13))
    # Float32 numbers from 0.5 on are multiples of 2^-24, like float16's subnormal ones: the sum rounds.
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(c, F32), F32(0.5)), I32), I32(0x3F000000))
    h = b.select(b.icmp_unsigned("<", c, I32(0x38800000)), tiny, normal)
    h = b.select(b.icmp_unsigned("==", a, infinity), I32(0x7C00), h)
    h = b.select(b.icmp_unsigned(">", a, infinity), I32(0x7E00), h)
    return b.trunc(b.or_(h, sign), I16)


def overflown(b: Any, x: Float) -> Float:
    """Replace numbers that round to more than float16's largest by Inf."""
    beyond = b.fcmp_ordered(">=", magnitude(b, x), f32(65520, x))
    infinity = b.or_(b.and_(float_bits(b, x), i32(-0x80000000, x)), i32(0x7F800000, x))
    return b.select(beyond, bits_float(b, infinity), x)


def load(b: Any, address: Any, index: Any, kind: ir.Type, count: int) -> Any:
    """Load a vector of `count` elements of the type `kind`, from element `index` on."""
    return b.load(b.bitcast(pointer(b, address, index, kind), ir.PointerType(ir.VectorType(kind, count))), align=1)


def store(b: Any, values: Any, address: Any) -> None:
    """Write a vector."""
    b.store(values, b.inttoptr(address, ir.PointerType(values.type)), align=1)


def spread(b: Any, value: Any, count: int) -> Any:
    """Broadcast a number to a vector of length `count`."""
    one = b.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, I32(0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, count), [0] * count))


def _flip(b: Any, bits: Any) -> Any:
    """Invert all bits of negative numbers except the sign."""
    return b.xor(bits, b.and_(b.ashr(bits, i32(31, bits)), i32(MAGNITUDE, bits)))


def _carry(b: Any, bits: Any, dropped: int) -> Any:
    """Add a carry so that cutting off the `dropped` low bits rounds to nearest even."""
    odd = b.and_(b.lshr(bits, i32(dropped, bits)), i32(1, bits))
    return b.add(b.add(bits, i32((1 << (dropped - 1)) - 1, bits)), odd)


def _cut(b: Any, v: Any, top: Any) -> Any:
    # For NaN `greater` returns 0, which becomes its code.
    return lesser(b, greater(b, v, f32(0, v)), top)
