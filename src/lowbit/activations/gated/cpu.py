"""Gated activations on the CPU, one pass for each operator.

A few groups at a time are decoded to lines of float32 numbers that stay in the L1 cache, so that each element is read
from memory only once. Without `up`, its line holds ones.
"""

from __future__ import annotations

import torch
from numba.types import float32  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from lowbit.activations.gated import cpu_curves
from lowbit.activations.gated.reference import ACTIVATIONS
from lowbit.codecs.group_int.cpu import decode_groups, decode_scratch, encode_groups, encode_scratch, parts
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.kernels.cpu.jit import helper, kernel, operation
from lowbit.kernels.cpu.lines import LINE, NO, element, output_line, read_line, write_line, zero_gaps
from lowbit.kernels.cpu.memory import get_float, put_float
from lowbit.kernels.cpu.runs import ONE
from lowbit.kernels.cpu.threads import over_rows
from lowbit.kernels.layout import ceil_div

silu, silu_slope = operation(float32, float32)(cpu_curves.silu), operation(float32, float32)(cpu_curves.silu_slope)
gelu, gelu_slope = operation(float32, float32)(cpu_curves.gelu), operation(float32, float32)(cpu_curves.gelu_slope)
gelu_tanh = operation(float32, float32)(cpu_curves.gelu_tanh)
gelu_tanh_slope = operation(float32, float32)(cpu_curves.gelu_tanh_slope)
relu, relu_slope = operation(float32, float32)(cpu_curves.relu), operation(float32, float32)(cpu_curves.relu_slope)

AT_ONCE = 1024  # elements at a time: seven lines of them fit in the L1 cache
SILU, GELU, GELU_TANH, RELU = range(len(ACTIVATIONS))


def encode(
    gate: Tensor, up: Tensor | None, payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """The reference's payloads; out = act(gate) * up."""
    layout = group_int_layout(gate.numel(), bits, group, symmetric=False)
    for payload in (payload_gate, payload_up):
        if payload is not None:
            zero_gaps(payload, layout)
    seeds = (seed or 0) % 2**32, ((seed or 0) + 1) % 2**32
    _run(
        _forward, gate, *element(gate), *element(up), *element(out),
        parts(payload_gate, out, bits, group), parts(payload_up, out, bits, group),
        False, seed is not None, *seeds,
        activation=activation, gated=up is not None, bits=bits, group=group,
    )  # fmt: skip


def recompute(
    payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """out = act(gate') * up'."""
    _run(
        _forward, out, *element(None), *element(None), *element(out),
        parts(payload_gate, out, bits, group), parts(payload_up, out, bits, group),
        True, False, 0, 0,
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
        kernel(
            *arguments, like.numel(), code, gated, bits, group,
            at_once, scratch.data_ptr(), start, stop,
        )  # fmt: skip

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
    elif activation == GELU_TANH:
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
    elif activation == GELU_TANH:
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
