"""Formulas on float32 and 32-bit integers in Triton; each step rounds once, as in the reference.

Kernels are launched with fusion of multiply and add switched off; the only division is `tl.div_rn`, which rounds
correctly (`/` would be approximate). To round to an integer, add a power of two: the low bits of the sum are the
integer.
"""

import triton
import triton.language as tl
from triton import knobs

from lowbit.kernels.exact import BEND, LOG2_COEFFICIENTS, TILT

C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in LOG2_COEFFICIENTS)
BEND_, TILT_ = tl.constexpr(BEND), tl.constexpr(TILT)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter's conversion to bfloat16 differs from a GPU's
INTEGER = tl.constexpr(2.0**23)  # adding it rounds 0 <= v < 2^23 to nearest even
SIGNED = tl.constexpr(1.5 * 2.0**23)  # the same for |v| < 2^22
INTEGER_BITS = tl.constexpr(0x4B000000)  # of 2^23


@triton.jit
def bits_of(x):
    """The bits of float32 numbers, as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def of_bits(bits):
    """The float32 numbers with these bits."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """2^exponent, for normal numbers."""
    return of_bits((exponent + 127) << 23)


@triton.jit
def round_signed(v):
    """The nearest integer, ties to even, of |v| < 2^22."""
    return (v + SIGNED) - SIGNED


@triton.jit
def widened(x):
    """Convert exactly to float32; bfloat16 by its bits, because Triton's interpreter loses its denormals."""
    if x.dtype == tl.bfloat16:
        return of_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def round_bf16(x):
    """The nearest bfloat16, ties to even, as float32; NaN stays."""
    bits = bits_of(x)
    rounded = of_bits((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000)
    # NaN apart: the carry could make it infinity, or zero.
    return tl.where(x == x, rounded, x)


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """Round float32 to nearest even in DTYPE; finite numbers stay finite in float16, as in the reference."""
    if tl.float16 == DTYPE:
        finite = (bits_of(x) & 0x7FFFFFFF) < 0x7F800000
        return tl.where(finite, tl.minimum(tl.maximum(x, -65504.0), 65504.0), x).to(DTYPE)
    elif INTERPRETED and tl.bfloat16 == DTYPE:
        return (bits_of(round_bf16(x)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round float32 to nearest even in DTYPE; numbers beyond float16's largest become Inf."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        return narrowed(x, DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def inverse_of(scale):
    """1 / scale rounded once, or 1."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale > 0, scale, 1.0))


@triton.jit
def code_of(x, inverse, shift, top):
    """Codes round(x * inverse + shift), clamped to [0, top]; 0 for NaN."""
    v = x * inverse + shift
    v = tl.where(v > 0, v, 0.0)
    return bits_of(tl.minimum(v, top) + INTEGER) & 255


@triton.jit
def code_below(x, inverse, shift, top, random):
    """Do as `code_of`, but round down after adding a random number in [0, 1)."""
    v = (x * inverse + shift) + random
    v = tl.where(v > 0, v, 0.0)
    return tl.minimum(v, top).to(tl.int32)


@triton.jit
def number_of(code):
    """Codes below 2^23 as float32 numbers: a conversion would take four times as long."""
    return of_bits(code | INTEGER_BITS) - INTEGER


@triton.jit
def section(payload, start_16):
    """Pointer to a section, from its start in units of 16 bytes."""
    return payload + start_16.to(tl.int64) * 16


@triton.jit
def zero_gap(payload, end, start_16):
    """Clear the bytes, at most 15, between the end of a section and the start of the next."""
    # All programs may write these zeros: they are the same.
    at = end.to(tl.int64) + tl.arange(0, 16)
    tl.store(payload + at, 0, mask=at < start_16.to(tl.int64) * 16)


@triton.jit
def uniform(index, seed):
    """float32 numbers in [0, 1) from int64 indices (see `lowbit.kernels.exact.uniform`)."""
    above = (index >> 32).to(tl.uint32) * 0x9E3779B9
    h = index.to(tl.uint32) ^ (seed.to(tl.uint32) + above)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)


@triton.jit
def log2(x):
    """`lowbit.kernels.exact.log2`."""
    bits = bits_of(x)
    t = of_bits((bits & 0x7FFFFF) | 0x3F800000) - 1.0
    p = t * C6 + C5
    p = p * t + C4
    p = p * t + C3
    p = p * t + C2
    p = p * t + C1
    p = p * t + C0
    return ((bits >> 23) - 127).to(tl.float32) + p * t


@triton.jit
def magnitude_scale(largest):
    """The power of two that makes the largest magnitude a 15-bit integer (see `lowbit.kernels.exact.entropy`)."""
    exponent = tl.minimum(tl.maximum(bits_of(largest) >> 23, 27), 254)
    return of_bits((127 + 14 + 127 - exponent) << 23)


@triton.jit
def entropy_terms(x, scale):
    """Summands of entropy: magnitudes as integers a, and a log2 a in sixteenths."""
    level = tl.abs(x) * scale + INTEGER
    a = level - INTEGER
    bits = bits_of(a)
    straight = (bits - 0x3F800000).to(tl.float32) * (2.0**-23)
    t = of_bits((bits & 0x7FFFFF) | 0x3F800000) - 1.0
    logarithm = straight + (t - t * t) * (t * TILT_ + BEND_)
    weighted = a * logarithm + 524288.0  # 2^19: numbers from there on are multiples of 1/16
    return bits_of(level) - INTEGER_BITS, bits_of(weighted) - 0x49000000


@triton.jit
def entropy_key(total, terms, finite):
    """Sort keys by entropy, from its sums; the largest key if values are not finite."""
    weight = tl.maximum(total, 1).to(tl.float32)
    bits = bits_of(log2(weight) - tl.div_rn(terms.to(tl.float32) * 0.0625, weight))
    return tl.where(finite, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7F800000)
