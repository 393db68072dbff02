"""Gated activations on the CPU, one pass for each operator.

A few groups at a time are decoded to lines of float32 numbers that stay in the L1 cache, so that each element is read
from memory only once. Without `up`, its line holds ones.

Activations and their slopes are LLVM instructions, exact to a few float32 steps: loops over them are vectorized, where
calls of the C library would take ten times as long. Their errors are the largest found, compared with float64. NaN
gives NaN.
"""

from typing import Any

import torch
from llvmlite import ir
from numba.types import float32  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from lowbit.activations.gated.reference import ACTIVATIONS, ERFC, GELU_TANH
from lowbit.codecs.group_int.cpu import decode_groups, decode_scratch, encode_groups, encode_scratch, parts
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.kernels.cpu.formulas import TO_SIGNED, bits_float, f32, float_bits, greater, i32, lesser, magnitude
from lowbit.kernels.cpu.jit import helper, kernel, operation, over_rows
from lowbit.kernels.cpu.lines import LINE, NO, element, output_line, read_line, write_line, zero_gaps
from lowbit.kernels.cpu.memory import get_float, put_float
from lowbit.kernels.cpu.runs import ONE
from lowbit.kernels.layout import ceil_div

LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4  # the first of 9 bits
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""(e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, from Cephes' expf."""
FAR = 16.0  # the slopes of both gelu are constant beyond it
AT_ONCE = 1024  # elements at a time: seven lines of them fit in the L1 cache
SILU, GELU, TANH, RELU = range(len(ACTIVATIONS))
_curve = operation(float32, float32)


def exp(b: Any, x: Any) -> Any:
    """e^x within 1.2e-7 of its value; 0 below -88.1, Inf above 88.4."""
    # In this order of operands NaN passes: both return the second one if either is NaN.
    x = lesser(b, f32(89, x), greater(b, f32(-88.3, x), x))
    shifted = _fma(b, x, LOG2E, TO_SIGNED)
    n = b.fsub(shifted, f32(TO_SIGNED, x))
    # ln 2 in two parts: n times the first, of 9 bits, is exact, so r keeps its low bits.
    r = _fma(b, n, -LN2_LOW, _fma(b, n, -LN2_HIGH, x))
    p = f32(EXP[0], x)
    for c in EXP[1:]:
        p = _fma(b, p, r, c)
    p = b.fadd(_fma(b, b.fmul(r, r), p, r), f32(1, x))
    # The shifted number's low bits are the integer: its conversion would be undefined for NaN.
    return b.fmul(p, bits_float(b, b.shl(b.add(float_bits(b, shifted), i32(127, x)), i32(23, x))))


def sigmoid(b: Any, x: Any) -> Any:
    """1 / (1 + e^-x), within 1.2e-7 of its value."""
    e, share = _halves(b, x)
    return b.select(b.fcmp_ordered("<", x, f32(0, x)), b.fmul(e, share), share)


@_curve
def silu(b: Any, x: Any) -> Any:
    """x sigmoid(x), within 1.4e-7 |x|."""
    return b.fmul(x, sigmoid(b, x))


@_curve
def silu_slope(b: Any, x: Any) -> Any:
    """Its derivative s + x s', s = sigmoid(x), within 2e-7."""
    return _fma(b, _near(b, x, 100.0), _sigmoid_slope(b, x), sigmoid(b, x))


@_curve
def gelu_tanh(b: Any, x: Any) -> Any:
    """x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return b.fmul(x, sigmoid(b, _twice_inner(b, _near(b, x))))


@_curve
def gelu_tanh_slope(b: Any, x: Any) -> Any:
    """Its derivative s + x s' 2 u', within 2e-7."""
    near = _near(b, x)
    inner = _twice_inner(b, near)
    twice, cubic = 2 * GELU_TANH[0], GELU_TANH[1]
    steepness = _fma(b, b.fmul(near, near), 3 * cubic * twice, twice)
    around = b.fmul(near, _sigmoid_slope(b, inner))
    return _fma(b, around, steepness, sigmoid(b, inner))


@_curve
def gelu(b: Any, x: Any) -> Any:
    """x times the normal distribution function, which is exact within 2.4e-7."""
    return b.fmul(x, _normal_below(b, x))


@_curve
def gelu_slope(b: Any, x: Any) -> Any:
    """Its derivative: the distribution function plus x times the density, within 3e-7."""
    near = _near(b, x)
    density = b.fmul(_bell(b, near), f32(0.3989422804014327, x))
    return _fma(b, near, density, _normal_below(b, x))


@_curve
def relu(b: Any, x: Any) -> Any:
    """max(x, 0)."""
    return greater(b, f32(0, x), x)


@_curve
def relu_slope(b: Any, x: Any) -> Any:
    """1 above 0, else 0."""
    below = b.select(b.fcmp_ordered("<=", x, f32(0, x)), f32(0, x), x)
    return b.select(b.fcmp_ordered(">", x, f32(0, x)), f32(1, x), below)


def _halves(b: Any, x: Any) -> tuple[Any, Any]:
    """e = e^-|x|, and 1 / (1 + e), without cancellation on either side of 0."""
    e = exp(b, b.fneg(magnitude(b, x)))
    return e, b.fdiv(f32(1, x), b.fadd(f32(1, x), e))


def _sigmoid_slope(b: Any, x: Any) -> Any:
    e, share = _halves(b, x)
    return b.fmul(b.fmul(e, share), share)


def _near(b: Any, x: Any, far: float = FAR) -> Any:
    """Cut to a range in which nothing overflows."""
    return lesser(b, f32(far, x), greater(b, f32(-far, x), x))


def _twice_inner(b: Any, x: Any) -> Any:
    twice, cubic = 2 * GELU_TANH[0], GELU_TANH[1]
    return b.fmul(x, _fma(b, b.fmul(x, x), twice * cubic, twice))


def _bell(b: Any, near: Any) -> Any:
    return exp(b, b.fmul(b.fmul(near, near), f32(-0.5, near)))


def _normal_below(b: Any, x: Any) -> Any:
    near = _near(b, x)
    factor, coefficients = ERFC
    t = b.fdiv(f32(1, x), _fma(b, magnitude(b, near), factor * 0.5**0.5, 1.0))
    p = f32(coefficients[0] / 2, x)
    for c in coefficients[1:]:
        p = _fma(b, p, t, c / 2)
    tail = b.fmul(b.fmul(p, t), _bell(b, near))
    return b.select(b.fcmp_ordered("<", x, f32(0, x)), tail, b.fsub(f32(1, x), tail))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once where the machine can; numbers become constants."""
    x, y, z = (f32(v, x) if isinstance(v, float) else v for v in (x, y, z))
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(b.module.declare_intrinsic("llvm.fmuladd", [x.type], kind), [x, y, z])


def encode(
    gate: Tensor, up: Tensor | None, payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """The reference's payloads; out = act(gate) * up."""
    layout = group_int_layout(gate.numel(), bits, group, symmetric=False)
    for payload in (payload_gate, payload_up):
        if payload is not None:
            zero_gaps(payload, layout)
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
    seeds = (seed or 0) % 2**32, ((seed or 0) + 1) % 2**32
    _run(
        _forward, out, *element(gate), *element(up), *element(out),
        parts(payload_gate, out, bits, group), parts(payload_up, out, bits, group),
        gate is None, seed is not None, *seeds,
        activation=activation, gated=payload_up is not None, bits=bits, group=group,
    )  # fmt: skip


def backward(
    payload_gate: Tensor, payload_up: Tensor | None, grad_out: Tensor,
    grad_gate: Tensor, grad_up: Tensor | None, out: Tensor | None,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of gate' and up', and act(gate') * up' if `out` is given."""
    _run(
        _backward, grad_out, *element(grad_out),
        *element(grad_gate), *element(grad_up), *element(out),
        parts(payload_gate, grad_gate, bits, group), parts(payload_up, grad_gate, bits, group),
        activation=activation, gated=payload_up is not None, bits=bits, group=group,
    )  # fmt: skip


def _run(kernel, like: Tensor, *arguments, activation: str, gated: bool, bits: int, group: int) -> None:
    """Call a kernel on ranges of groups, with scratch for each."""
    at_once, code = max(1, AT_ONCE // group), ACTIVATIONS.index(activation)
    nbytes = 7 * 4 * at_once * group + max(encode_scratch(group, at_once), decode_scratch(group))

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(nbytes, dtype=torch.uint8)
        kernel(*arguments, like.numel(), code, gated, bits, group, at_once, scratch.data_ptr(), start, stop)

    over_rows(work, ceil_div(like.numel(), group), like.nbytes)


@kernel
def _forward(
    gate, gate_kind, up, up_kind, out, out_kind,
    gate_parts, up_parts,
    decoding, stochastic, gate_seed, up_seed,
    total, activation, gated, bits, group, at_once, scratch, start, stop,
) -> None:  # fmt: skip
    size = 4 * at_once * group
    gate_line, up_line, out_line, rest = (scratch, scratch + size, scratch + 2 * size, scratch + 3 * size)
    _fill(up_line, at_once * group)
    for first in range(start, stop, at_once):
        last, begin = min(first + at_once, stop), first * group
        count = min(last * group, total) - begin
        x, y = gate_line, up_line
        if decoding:
            decode_groups(*gate_parts, x - 4 * begin, LINE, total, bits, group, NO, NO, rest, first, last)
            if gated:
                decode_groups(*up_parts, y - 4 * begin, LINE, total, bits, group, NO, NO, rest, first, last)
        else:
            x = read_line(gate, gate_kind, begin, count, gate_line)
            encode_groups(
                x - 4 * begin, LINE, total, *gate_parts,
                bits, group, NO, stochastic, gate_seed, at_once, rest, first, last,
            )  # fmt: skip
            if gated:
                y = read_line(up, up_kind, begin, count, up_line)
                encode_groups(
                    y - 4 * begin, LINE, total, *up_parts,
                    bits, group, NO, stochastic, up_seed, at_once, rest, first, last,
                )  # fmt: skip
        to = output_line(out, out_kind, begin, out_line)
        _put_values(activation, x, y, count, to)
        write_line(to, out, out_kind, begin, count)


@kernel
def _backward(
    grad_out, kind, grad_gate, gate_kind, grad_up, up_kind, out, out_kind,
    gate_parts, up_parts,
    total, activation, gated, bits, group, at_once, scratch, start, stop,
) -> None:  # fmt: skip
    size = 4 * at_once * group
    x, y, grad_line = scratch, scratch + size, scratch + 2 * size
    gate_line, up_line, out_line = scratch + 3 * size, scratch + 4 * size, scratch + 5 * size
    rest = scratch + 6 * size
    _fill(y, at_once * group)
    for first in range(start, stop, at_once):
        last, begin = min(first + at_once, stop), first * group
        count = min(last * group, total) - begin
        decode_groups(*gate_parts, x - 4 * begin, LINE, total, bits, group, NO, NO, rest, first, last)
        if gated:
            decode_groups(*up_parts, y - 4 * begin, LINE, total, bits, group, NO, NO, rest, first, last)
        g = read_line(grad_out, kind, begin, count, grad_line)
        to_gate = output_line(grad_gate, gate_kind, begin, gate_line)
        to_up, to = output_line(grad_up, up_kind, begin, up_line), output_line(out, out_kind, begin, out_line)
        _put_gradients(activation, x, y, g, count, to_gate, to_up, to)
        write_line(to_gate, grad_gate, gate_kind, begin, count)
        write_line(to_up, grad_up, up_kind, begin, count)
        write_line(to, out, out_kind, begin, count)


@helper
def _fill(line, count) -> None:
    for j in range(count):
        put_float(line, j, ONE)


@helper
def _put_values(activation, x, y, count, to) -> None:
    """to = act(x) y."""
    if activation == SILU:
        for j in range(count):
            put_float(to, j, silu(get_float(x, j)) * get_float(y, j))
    elif activation == GELU:
        for j in range(count):
            put_float(to, j, gelu(get_float(x, j)) * get_float(y, j))
    elif activation == TANH:
        for j in range(count):
            put_float(to, j, gelu_tanh(get_float(x, j)) * get_float(y, j))
    else:
        for j in range(count):
            put_float(to, j, relu(get_float(x, j)) * get_float(y, j))


@helper
def _put_gradients(activation, x, y, g, count, to_gate, to_up, to) -> None:
    if activation == SILU:
        for j in range(count):
            a = get_float(x, j)
            _put_three(silu(a), silu_slope(a), y, g, j, to_gate, to_up, to)
    elif activation == GELU:
        for j in range(count):
            a = get_float(x, j)
            _put_three(gelu(a), gelu_slope(a), y, g, j, to_gate, to_up, to)
    elif activation == TANH:
        for j in range(count):
            a = get_float(x, j)
            _put_three(gelu_tanh(a), gelu_tanh_slope(a), y, g, j, to_gate, to_up, to)
    else:
        for j in range(count):
            a = get_float(x, j)
            _put_three(relu(a), relu_slope(a), y, g, j, to_gate, to_up, to)


@helper
def _put_three(value, slope, y, g, j, to_gate, to_up, to) -> None:
    """Gradients of act(x) y, and the product itself, of one element."""
    grad, factor = get_float(g, j), get_float(y, j)
    put_float(to_gate, j, grad * factor * slope)
    put_float(to_up, j, grad * value)
    put_float(to, j, value * factor)
