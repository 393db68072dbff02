"""Formulas on one number: each step rounds once, as written, and loops over them are vectorised.

Arithmetic on small integers has 64 bits in numba; conversions to `np.int32` after each step let LLVM use 32.
"""

from typing import Any

import numpy as np

from lowbit.kernels import exact
from lowbit.kernels.cpu.jit import helper

MAGNITUDE = 0x7FFFFFFF
TO_INTEGER = np.float32(2.0**23)  # adding it rounds 0 <= v < 2^23 to nearest even, into the low bits
INTEGER_BITS = 0x4B000000  # of 2^23
TO_SIGNED = np.float32(1.5 * 2.0**23)  # the same for |v| < 2^22
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = map(np.float32, exact.LOG2_COEFFICIENTS)
_BEND, _TILT = np.float32(exact.BEND), np.float32(exact.TILT)
_TERMS, _ULP = np.float32(2.0**19), np.float32(2.0**-23)
_LEAST_FP16, _UNIT = np.float32(2.0**-14), np.float32(2.0**-24)
_GATHER, _SPREAD, _CHOOSE = np.uint64(0x0102040810204080), np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)
_SEVENS, _TOP, _SIGN = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(56), np.uint64(7)


@helper
def float_bits(x) -> Any:
    """The bits of a float32 number, int32."""
    return np.float32(x).view(np.int32)


@helper
def bits_float(bits) -> Any:
    """The float32 number with these bits."""
    return np.int32(bits).view(np.float32)


@helper
def order_key(x) -> Any:
    """Map float32 to int32 in the same order, NaN beyond infinity: integer minima vectorise, float minima do not."""
    return _flip(float_bits(x))


@helper
def key_value(key) -> Any:
    """The float32 number of an order key."""
    return bits_float(_flip(key))


@helper
def lesser(x, y) -> Any:
    """The smaller of two float32 numbers; `y` if either is NaN."""
    x, y = np.float32(x), np.float32(y)
    return x if x < y else y


@helper
def greater(x, y) -> Any:
    """The larger of two float32 numbers; `y` if either is NaN."""
    x, y = np.float32(x), np.float32(y)
    return x if x > y else y


@helper
def lesser32(i, j) -> Any:
    """The smaller of two int32 numbers."""
    i, j = np.int32(i), np.int32(j)
    return i if i < j else j


@helper
def greater32(i, j) -> Any:
    """The larger of two int32 numbers."""
    i, j = np.int32(i), np.int32(j)
    return i if i > j else j


@helper
def add32(i, j) -> Any:
    """The sum in 32 bits: 64 bits would halve the speed of a loop."""
    return np.int32(np.int32(i) + np.int32(j))


@helper
def truncate(x) -> Any:
    """Convert to int32, rounding towards zero."""
    return np.int32(np.float32(x))


@helper
def magnitude(x) -> Any:
    """|x|."""
    return bits_float(float_bits(x) & MAGNITUDE)


@helper
def power_of_two(exponent) -> Any:
    """2^exponent, for normal numbers."""
    return bits_float(np.int32(exponent + 127) << 23)


@helper
def round_signed(v) -> Any:
    """The nearest integer, ties to even, of |v| < 2^22."""
    return (np.float32(v) + TO_SIGNED) - TO_SIGNED


@helper
def round_bf16(x) -> Any:
    """The nearest bfloat16 of a finite number, ties to even, as float32."""
    return bits_float(_carry(float_bits(x), 16) & -0x10000)


@helper
def code(v, top) -> Any:
    """Round to nearest even and clamp to [0, top], as a byte; 0 for NaN."""
    return np.uint8(float_bits(_cut(v, top) + TO_INTEGER))


@helper
def code_below(v, top) -> Any:
    """Round down and clamp to [0, top], as a byte; 0 for NaN."""
    return np.uint8(_cut(v, top))


@helper
def restored(code, offset, step) -> Any:
    """(code + offset) * step. The sum is exact, so it may replace the two additions of the formats' formulas."""
    return (np.float32(np.int32(code)) + offset) * step


@helper
def level(x, scale) -> Any:
    """2^23 + |x| * scale, the product rounded to an integer (see `lowbit.kernels.exact.entropy`)."""
    return magnitude(x) * scale + TO_INTEGER


@helper
def weighted_log(level) -> Any:
    """2^19 + a log2(a), the product rounded to 1/16, for a level 2^23 + a."""
    a = level - TO_INTEGER
    # float32 numbers from 2^19 on are multiples of 1/16. For a = 0 the logarithm is -127 here, and the product 0.
    return a * quick_log2(a) + _TERMS


@helper
def log2(x) -> Any:
    """`lowbit.kernels.exact.log2`."""
    bits = float_bits(x)
    exponent = np.int32((bits >> 23) - 127)
    t = bits_float((bits & 0x7FFFFF) | 0x3F800000) - ONE
    p = (((((_C6 * t + _C5) * t + _C4) * t + _C3) * t + _C2) * t + _C1) * t + _C0
    return np.float32(exponent) + p * t


@helper
def quick_log2(x) -> Any:
    """`lowbit.kernels.exact.quick_log2`."""
    bits = float_bits(x)
    straight = np.float32(np.int32(bits - 0x3F800000)) * _ULP
    t = bits_float((bits & 0x7FFFFF) | 0x3F800000) - ONE
    return straight + (t - t * t) * (t * _TILT + _BEND)


@helper
def steps_below(octave, top) -> Any:
    """Distance of a step below the top of its token in sixteenths of an octave, as a byte; 255 for no step."""
    below = lesser32(greater32(top - octave, 0), 254)
    return np.int32(255) if octave == 0 else below


@helper
def step_below(below, top) -> Any:
    """`lowbit.kernels.exact.octave_steps`."""
    step = bits_float(greater32(top - np.int32(below), 16) << 19)
    return ZERO if below == 255 else step


@helper
def uniform(index, seed) -> Any:
    """A random number in [0, 1) with 24 bits, by the reference's hash of 64-bit integers."""
    above = np.uint32(np.uint32(index >> 32) * np.uint32(0x9E3779B9))
    h = np.uint32(index) ^ np.uint32(np.uint32(seed) + above)
    h = np.uint32(np.uint32(h ^ (h >> 16)) * np.uint32(0x7FEB352D))
    h = np.uint32(np.uint32(h ^ (h >> 15)) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> 16))
    return np.float32(np.int32(h >> 8)) * _UNIT


@helper
def byte_of_flags(flags) -> Any:
    """Pack eight bytes, each 0 or 1, of a uint64 into the bits of one byte."""
    # The product has the flag of byte i at bit 56 + i, and no two of its terms meet in one bit.
    return np.uint8((flags * _GATHER) >> _TOP)


@helper
def flags_of_byte(bits) -> Any:
    """Inverse of `byte_of_flags`."""
    # The sum carries into the top bit of each byte that is not 0, and never out of a byte.
    return (((np.uint64(bits) * _SPREAD & _CHOOSE) + _SEVENS) >> _SIGN) & _SPREAD


@helper
def from_bf16(half) -> Any:
    """Convert the bits of a bfloat16 exactly."""
    return bits_float(np.int32(half) << 16)


@helper
def to_bf16(x) -> Any:
    """Round to nearest even, as bits."""
    # NaN apart: the carry could make it infinity, or zero.
    rounded = _carry(float_bits(x), 16) >> 16
    return np.uint16(rounded if x == x else 0x7FC0)


@helper
def from_fp16(half) -> Any:
    """Convert the bits of a float16 exactly, also subnormal numbers, in any denormal mode."""
    sign = np.int32(np.int32(half) << 16) & -0x80000000
    a = np.int32((np.int32(half) & 0x7FFF) << 13)
    # By a difference of normal numbers: `a` itself is a subnormal one, which the processor may flush.
    tiny = float_bits(bits_float(a + 0x38800000) - _LEAST_FP16)
    bits = np.int32(a | 0x7F800000) if a >= 0x0F800000 else np.int32(a + 0x38000000)
    return bits_float((tiny if a < 0x00800000 else bits) | sign)


@helper
def to_fp16(x) -> Any:
    """Round to nearest even, as bits; finite numbers stay finite."""
    bits = float_bits(x)
    a = np.int32(bits & MAGNITUDE)
    c = lesser32(a, 0x477FE000)
    normal = np.int32(np.int32(_carry(c, 13) - 0x38000000) >> 13)
    # Float32 numbers from 0.5 on are multiples of 2^-24, like float16's subnormal ones: the sum rounds.
    tiny = np.int32(float_bits(bits_float(c) + HALF) - 0x3F000000)
    h = tiny if c < 0x38800000 else normal
    h = np.int32(0x7C00) if a == 0x7F800000 else h
    h = np.int32(0x7E00) if a > 0x7F800000 else h
    return np.uint16(h | ((bits >> 16) & 0x8000))


@helper
def _flip(bits) -> Any:
    """Invert all bits of negative numbers except the sign."""
    bits = np.int32(bits)
    return np.int32(bits ^ (np.int32(bits >> 31) & MAGNITUDE))


@helper
def _carry(bits, dropped) -> Any:
    """Add a carry so that cutting off the `dropped` low bits rounds to nearest even."""
    return np.int32(bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1))


@helper
def _cut(v, top) -> Any:
    # For NaN `greater` returns 0, which becomes its code.
    return lesser(greater(v, ZERO), top)
