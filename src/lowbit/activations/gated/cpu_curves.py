"""Activations and their slopes as LLVM instructions, exact to a few float32 steps.

Loops over them are vectorized; calling the C library for each element would take ten times as long. The errors below
are the largest found, compared with float64. NaN gives NaN.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowbit.activations.gated.reference import ERFC, GELU_TANH
from lowbit.kernels.cpu.formulas import TO_SIGNED, bits_float, constant, float_bits, greater, lesser, magnitude
from lowbit.kernels.cpu.memory import F32, I32

LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4  # the first of 9 bits
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""(e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, from Cephes' expf."""
FAR = 16.0  # the slopes of both gelu are constant beyond it


def exp(b: Any, x: Any) -> Any:
    """e^x within 1.2e-7 of its value; 0 below -88.1, Inf above 88.4."""
    x = lesser(b, _f32(89, x), greater(b, _f32(-88.3, x), x))
    shifted = _fma(b, x, LOG2E, TO_SIGNED)
    n = b.fsub(shifted, _f32(TO_SIGNED, x))
    r = _fma(b, n, -LN2_LOW, _fma(b, n, -LN2_HIGH, x))
    p = _f32(EXP[0], x)
    for c in EXP[1:]:
        p = _fma(b, p, r, c)
    p = b.fadd(_fma(b, b.fmul(r, r), p, r), _f32(1, x))
    # The shifted number's low bits are the integer: its conversion would be undefined for NaN.
    return b.fmul(p, bits_float(b, b.shl(b.add(float_bits(b, shifted), _i32(127, x)), _i32(23, x))))


def sigmoid(b: Any, x: Any) -> Any:
    """1 / (1 + e^-x), within 1.2e-7 of its value."""
    e, share = _halves(b, x)
    return b.select(b.fcmp_ordered("<", x, _f32(0, x)), b.fmul(e, share), share)


def silu(b: Any, x: Any) -> Any:
    """x sigmoid(x), within 1.4e-7 |x|."""
    return b.fmul(x, sigmoid(b, x))


def silu_slope(b: Any, x: Any) -> Any:
    """Its derivative s + x s', s = sigmoid(x), within 2e-7."""
    return _fma(b, _near(b, x, 100.0), _sigmoid_slope(b, x), sigmoid(b, x))


def gelu_tanh(b: Any, x: Any) -> Any:
    """x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return b.fmul(x, sigmoid(b, _twice_inner(b, _near(b, x))))


def gelu_tanh_slope(b: Any, x: Any) -> Any:
    """Its derivative s + x s' 2 u', within 2e-7."""
    near = _near(b, x)
    inner = _twice_inner(b, near)
    twice, cubic = 2 * GELU_TANH[0], GELU_TANH[1]
    steepness = _fma(b, b.fmul(near, near), 3 * cubic * twice, twice)
    around = b.fmul(near, _sigmoid_slope(b, inner))
    return _fma(b, around, steepness, sigmoid(b, inner))


def gelu(b: Any, x: Any) -> Any:
    """x times the normal distribution function, which is exact within 2.4e-7."""
    return b.fmul(x, _normal_below(b, x))


def gelu_slope(b: Any, x: Any) -> Any:
    """Its derivative: the distribution function plus x times the density, within 3e-7."""
    near = _near(b, x)
    density = b.fmul(_bell(b, near), _f32(0.3989422804014327, x))
    return _fma(b, near, density, _normal_below(b, x))


def relu(b: Any, x: Any) -> Any:
    """max(x, 0)."""
    return greater(b, _f32(0, x), x)


def relu_slope(b: Any, x: Any) -> Any:
    """1 above 0, else 0."""
    below = b.select(b.fcmp_ordered("<=", x, _f32(0, x)), _f32(0, x), x)
    return b.select(b.fcmp_ordered(">", x, _f32(0, x)), _f32(1, x), below)


def _halves(b: Any, x: Any) -> tuple[Any, Any]:
    """e = e^-|x|, and 1 / (1 + e), without cancellation on either side of 0."""
    e = exp(b, b.fneg(magnitude(b, x)))
    return e, b.fdiv(_f32(1, x), b.fadd(_f32(1, x), e))


def _sigmoid_slope(b: Any, x: Any) -> Any:
    e, share = _halves(b, x)
    return b.fmul(b.fmul(e, share), share)


def _near(b: Any, x: Any, far: float = FAR) -> Any:
    """Cut to a range in which nothing overflows."""
    return lesser(b, _f32(far, x), greater(b, _f32(-far, x), x))


def _twice_inner(b: Any, x: Any) -> Any:
    twice, cubic = 2 * GELU_TANH[0], GELU_TANH[1]
    return b.fmul(x, _fma(b, b.fmul(x, x), twice * cubic, twice))


def _bell(b: Any, near: Any) -> Any:
    return exp(b, b.fmul(b.fmul(near, near), _f32(-0.5, near)))


def _normal_below(b: Any, x: Any) -> Any:
    near = _near(b, x)
    factor, coefficients = ERFC
    t = b.fdiv(_f32(1, x), _fma(b, magnitude(b, near), factor * 0.5**0.5, 1.0))
    p = _f32(coefficients[0] / 2, x)
    for c in coefficients[1:]:
        p = _fma(b, p, t, c / 2)
    tail = b.fmul(b.fmul(p, t), _bell(b, near))
    return b.select(b.fcmp_ordered("<", x, _f32(0, x)), tail, b.fsub(_f32(1, x), tail))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once where the machine can; numbers become constants."""
    x, y, z = (_f32(v, x) if isinstance(v, float) else v for v in (x, y, z))
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(b.module.declare_intrinsic("llvm.fmuladd", [x.type], kind), [x, y, z])


def _f32(value: float, like: Any) -> Any:
    return constant(F32, value, like)


def _i32(value: int, like: Any) -> Any:
    return constant(I32, value, like)
