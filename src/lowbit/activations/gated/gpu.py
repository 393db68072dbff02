"""Gated activations on a GPU: one launch for each operator.

A program holds some groups of gate and up in registers, so that each element is read once.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import math

import triton
import triton.language as tl
from torch import Tensor

from lowbit.activations.gated.reference import ACTIVATIONS
from lowbit.codecs.group_int.gpu import decode_parts, encode_parts, lanes, shape_of, zero_gaps
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.kernels.gpu import eighths
from lowbit.kernels.gpu.launch import ends, launch, starts

AT_ONCE = 8192  # elements of each tensor that a program holds in registers
SILU, GELU, TANH, RELU = (tl.constexpr(i) for i in range(4))  # in the order of `ACTIVATIONS`
# erfc(z) = t ((((c0 t + c1) t + ...) t + c4) e^(-z^2) within 1.5e-7, where t = 1 / (1 + p z), z >= 0
# (Abramowitz and Stegun, 7.1.26).
ERFC = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
GELU_TANH = math.sqrt(2 / math.pi), 0.044715  # act(g) = g (1 + tanh(a (g + b g^3))) / 2
TWICE, CUBIC = (tl.constexpr(c) for c in (2 * GELU_TANH[0], GELU_TANH[1]))
NEAR = tl.constexpr(ERFC[0] * 0.5**0.5)
E0, E1, E2, E3, E4 = (tl.constexpr(c / 2) for c in ERFC[1])
FAR = tl.constexpr(16.0)  # the slopes of both gelu are constant beyond it


def encode(
    gate: Tensor, up: Tensor | None, payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """The reference's payloads; out = act(gate) * up."""
    _run_forward(gate, up, payload_gate, payload_up, out, activation, bits, group, seed)


def recompute(
    payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """out = act(gate') * up'."""
    _run_forward(None, None, payload_gate, payload_up, out, activation, bits, group, None)


def _run_forward(
    gate: Tensor | None, up: Tensor | None, payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    layout = group_int_layout(out.numel(), bits, group, symmetric=False)
    launch(
        _forward, *_shape(out.numel(), group), out if gate is None else gate, out if up is None else up,
        payload_gate, payload_gate if payload_up is None else payload_up, out,
        out.numel(), (seed or 0) % 2**32, ((seed or 0) + 1) % 2**32,
        *starts(layout, "mids", "codes"), *ends(layout, "scales", "mids"),
        DECODING=gate is None, ACTIVATION=ACTIVATIONS.index(activation), GATED=payload_up is not None,
        BITS=bits, GROUP=group, STOCHASTIC=seed is not None,
    )  # fmt: skip


def backward(
    payload_gate: Tensor, payload_up: Tensor | None, grad_out: Tensor,
    grad_gate: Tensor, grad_up: Tensor | None, out: Tensor | None,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of gate' and up', and act(gate') * up' if `out` is given."""
    layout = group_int_layout(grad_out.numel(), bits, group, symmetric=False)
    launch(
        _backward, *_shape(grad_out.numel(), group), payload_gate,
        payload_gate if payload_up is None else payload_up, grad_out,
        grad_gate, grad_gate if grad_up is None else grad_up, grad_gate if out is None else out,
        grad_out.numel(), *starts(layout, "mids", "codes"),
        ACTIVATION=ACTIVATIONS.index(activation), GATED=payload_up is not None,
        AGAIN=out is not None, BITS=bits, GROUP=group,
    )  # fmt: skip


def _shape(numel: int, group: int) -> tuple[int, int, dict[str, int | bool]]:
    """Twice the warps that one tensor would have."""
    programs, warps, shape = shape_of(numel, group, AT_ONCE)
    return programs, min(32, 2 * warps), shape


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Values and slopes of float32 numbers within 2.5e-7 and 2e-6 of the function; NaN for NaN.

    The exponential and the division are the GPU's approximations: no byte of a payload depends on them.
    """
    if ACTIVATION == RELU:
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, tl.where(x == x, 0.0, x))
    # `tl.minimum` and `tl.maximum` would drop NaN.
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


@triton.jit
def _read(
    x, payload, seed, group, exists, at, count, j, v, keep, mids_16, codes_16, scales_end, mids_end,
    DECODING: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STOCHASTIC: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Decode a payload to eight float32 tensors, or load and encode them."""
    if DECODING:
        parts = decode_parts(payload, group, exists, j, v, keep, mids_16, codes_16, BITS, GROUP, False)
    else:
        parts = eighths.load(x, at, v, keep, count, j, RAGGED)
        encode_parts(
            parts, payload, group, exists, at, count, j, v, keep, seed, mids_16, codes_16,
            BITS, GROUP, False, STOCHASTIC, RAGGED,
        )  # fmt: skip
        zero_gaps(payload, mids_16, codes_16, scales_end, mids_end)
    return parts


@triton.jit(do_not_specialize=[
    "numel", "gate_seed", "up_seed", "mids_16", "codes_16", "scales_end", "mids_end",
])  # fmt: skip
def _forward(
    gate, up, payload_gate, payload_up, out, numel, gate_seed, up_seed,
    mids_16, codes_16, scales_end, mids_end,
    DECODING: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, STOCHASTIC: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    group, at, count, j, v, keep = lanes(numel, GROUP, GROUPS, WIDTH, RAGGED)
    exists = group * GROUP < numel
    x = _read(
        gate, payload_gate, gate_seed, group, exists, at, count, j, v, keep, mids_16, codes_16, scales_end, mids_end,
        DECODING, BITS, GROUP, STOCHASTIC, RAGGED,
    )  # fmt: skip
    z = [activate(part, ACTIVATION)[0] for part in x]
    if GATED:
        y = _read(
            up, payload_up, up_seed, group, exists, at, count, j, v, keep, mids_16, codes_16, scales_end, mids_end,
            DECODING, BITS, GROUP, STOCHASTIC, RAGGED,
        )  # fmt: skip
        product = ()
        for k in tl.static_range(8):
            product = product + (z[k] * y[k],)
        eighths.store(product, out, at, v, keep, count, j, RAGGED)
    else:
        eighths.store(z, out, at, v, keep, count, j, RAGGED)


@triton.jit(do_not_specialize=["numel", "mids_16", "codes_16"])
def _backward(
    payload_gate, payload_up, grad_out, grad_gate, grad_up, out, numel, mids_16, codes_16,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, AGAIN: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    group, at, count, j, v, keep = lanes(numel, GROUP, GROUPS, WIDTH, RAGGED)
    exists = group * GROUP < numel
    g = eighths.load(grad_out, at, v, keep, count, j, RAGGED)
    x = decode_parts(payload_gate, group, exists, j, v, keep, mids_16, codes_16, BITS, GROUP, False)
    y = x
    if GATED:
        y = decode_parts(payload_up, group, exists, j, v, keep, mids_16, codes_16, BITS, GROUP, False)
    of_gate, of_up, product = (), (), ()
    for k in tl.static_range(8):
        value, slope = activate(x[k], ACTIVATION)
        if GATED:
            of_gate = of_gate + (g[k] * y[k] * slope,)
            of_up = of_up + (g[k] * value,)
            product = product + (value * y[k],)
        else:
            of_gate = of_gate + (g[k] * slope,)
            product = product + (value,)
    eighths.store(of_gate, grad_gate, at, v, keep, count, j, RAGGED)
    if GATED:
        eighths.store(of_up, grad_up, at, v, keep, count, j, RAGGED)
    if AGAIN:
        eighths.store(product, out, at, v, keep, count, j, RAGGED)
