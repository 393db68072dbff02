"""Activations and their slopes in Triton, by the formulas of `cpu_curves` and within the same errors.

The exponential and the division are the GPU's approximations: no byte of a payload depends on them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.activations.gated.reference import ERFC, GELU_TANH

SILU, GELU, TANH, RELU = (tl.constexpr(i) for i in range(4))  # in the order of `ACTIVATIONS`
TWICE, CUBIC = (tl.constexpr(c) for c in (2 * GELU_TANH[0], GELU_TANH[1]))
NEAR = tl.constexpr(ERFC[0] * 0.5**0.5)
E0, E1, E2, E3, E4 = (tl.constexpr(c / 2) for c in ERFC[1])
FAR = tl.constexpr(16.0)  # the slopes of both gelu are constant beyond it


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Values and slopes of float32 numbers; NaN for NaN."""
    if ACTIVATION == RELU:
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, tl.where(x == x, 0.0, x))
    near = tl.where(x > FAR, FAR, tl.where(x < -FAR, -FAR, x))
    if ACTIVATION == GELU:
        bell = tl.exp(near * near * -0.5)
        t = 1.0 / tl.fma(tl.abs(near), NEAR, 1.0)
        tail = tl.fma(tl.fma(tl.fma(tl.fma(t, E0, E1), t, E2), t, E3), t, E4) * t * bell
        below = tl.where(x < 0, tail, 1.0 - tail)
        return x * tl.where(x < -FAR, 0.0, below), tl.fma(near, bell * 0.3989422804014327, below)
    inner, steepness = x, tl.full(x.shape, 1.0, tl.float32)
    if ACTIVATION == TANH:
        inner = near * tl.fma(near * near, TWICE * CUBIC, TWICE)
        steepness = tl.fma(near * near, 3 * TWICE * CUBIC, TWICE)
    else:
        near = tl.where(x > 100.0, 100.0, tl.where(x < -100.0, -100.0, x))
    e = tl.exp(-tl.abs(inner))
    half = 1.0 / (1.0 + e)
    share = tl.where(inner < 0, e * half, half)
    return x * share, tl.fma(near * (e * half * half), steepness, share)
