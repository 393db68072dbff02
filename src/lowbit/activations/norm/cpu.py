"""Norms on the CPU, row by row.

A row is converted or decoded to a line of float32 numbers that stays in the cache; its codes, its sums and the
normalized row are computed from there. Groups that span two rows are decoded for both; to encode such rows, the payload
is made first, in a separate pass.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.group_int import cpu as group_int
from lowbit.codecs.group_int.cpu import decode_groups, decode_scratch, encode_groups, encode_scratch, parts
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.kernels.cpu.jit import helper, kernel, over_rows, summing
from lowbit.kernels.cpu.lines import LINE, NO, dot, element, output_line, read_line, write_line, zero_gaps
from lowbit.kernels.cpu.memory import get_float, put_float
from lowbit.kernels.cpu.runs import ONE, ZERO

AT_ONCE = 1024  # elements whose groups are encoded together
PLAIN, ENCODE, DECODE = range(3)


def encode(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, payload: Tensor, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """The reference's payload; out = norm(x)."""
    mode = PLAIN if x.shape[1] % group else ENCODE
    if mode == ENCODE:
        zero_gaps(payload, group_int_layout(x.numel(), bits, group, symmetric=False))
    else:
        group_int.encode(x.view(-1), payload, bits, group, False, seed)
    _run_forward(mode, x, weight, bias, payload, out, eps, centred, offset, bits, group, seed)


def recompute(
    payload: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """out = norm(x')."""
    _run_forward(DECODE, None, weight, bias, payload, out, eps, centred, offset, bits, group, None)


def _run_forward(
    mode: int, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, payload: Tensor, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    factor, added = _affine(weight, bias, offset, out.shape[1])

    def work(scratch: Tensor, start: int, stop: int) -> None:
        _forward(
            mode, *element(x), *element(out), out.numel(), out.shape[1],
            parts(payload, out, bits, group), bits, group, seed is not None, (seed or 0) % 2**32,
            factor.data_ptr(), added.data_ptr(), eps, centred,
            scratch.data_ptr(), start, stop,
        )  # fmt: skip

    _over_rows(work, out, group, 2)


def backward(
    payload: Tensor, weight: Tensor | None, grad_out: Tensor,
    grad_x: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of norm at x'."""
    channels = grad_x.shape[1]
    factor, _ = _affine(weight, None, offset, channels)
    sums: dict[int, Tensor] = {}  # by range of rows, to add them in order whichever ends first
    lock = threading.Lock()

    def work(scratch: Tensor, start: int, stop: int) -> None:
        partial = torch.zeros(2, channels)
        with lock:
            sums[start] = partial
        _backward(
            *element(grad_out), *element(grad_x), grad_x.numel(), channels,
            parts(payload, grad_x, bits, group), bits, group,
            factor.data_ptr(), partial.data_ptr(), eps, centred,
            scratch.data_ptr(), start, stop,
        )  # fmt: skip

    _over_rows(work, grad_x, group, 3)
    weight_sum, bias_sum = torch.stack([sums[start] for start in sorted(sums)]).sum(0)
    if grad_weight is not None:
        grad_weight.copy_(weight_sum)
    if grad_bias is not None:
        grad_bias.copy_(bias_sum)


def _affine(weight: Tensor | None, bias: Tensor | None, offset: float, channels: int) -> tuple[Tensor, Tensor]:
    """The factors of normalized rows, and the numbers that are added to them."""
    factor = torch.ones(channels) if weight is None else weight.float() + offset
    return factor, torch.zeros(channels) if bias is None else bias.float()


def _over_rows(work: Callable[[Tensor, int, int], None], x: Tensor, group: int, lines: int) -> None:
    """Call `work` on ranges of rows, with scratch for `lines` lines and for coding."""
    per_block = max(1, AT_ONCE // group)
    nbytes = lines * 4 * (x.shape[1] + 2 * group)  # a row, and the rest of its first and last group
    nbytes += max(encode_scratch(group, per_block), decode_scratch(group))

    def run(start: int, stop: int) -> None:
        work(torch.empty(nbytes, dtype=torch.uint8), start, stop)

    over_rows(run, x.shape[0], x.nbytes)


@kernel
def _forward(
    mode, source, kind, out, out_kind, total, channels,
    parts, bits, group, stochastic, seed,
    factor, added, eps, centred, scratch, start, stop,
) -> None:  # fmt: skip
    size = 4 * (channels + 2 * group)
    line, out_line, rest = scratch, scratch + size, scratch + 2 * size
    per_block = max(1, AT_ONCE // group)
    for row in range(start, stop):
        begin = row * channels
        if mode == DECODE:
            x = _decoded(line, parts, begin, channels, total, bits, group, rest)
        else:
            x = read_line(source, kind, begin, channels, line)
        if mode == ENCODE:
            first = begin // group
            encode_groups(
                # The address that element 0 would have: groups are counted from the start of the tensor.
                x - 4 * begin, LINE, total, *parts, bits, group, NO,
                stochastic, seed, per_block, rest, first, first + channels // group,
            )  # fmt: skip
        mean = _mean(x, channels) if centred else ZERO
        inverse = _inverse_root(_squares(x, channels, mean), channels, eps)
        to = output_line(out, out_kind, begin, out_line)
        for j in range(channels):
            normal = (get_float(x, j) - mean) * inverse
            put_float(to, j, normal * get_float(factor, j) + get_float(added, j))
        write_line(to, out, out_kind, begin, channels)


@kernel
def _backward(
    grad_out, kind, grad_x, x_kind, total, channels,
    parts, bits, group,
    factor, sums, eps, centred, scratch, start, stop,
) -> None:  # fmt: skip
    size = 4 * (channels + 2 * group)
    line, grad_line, x_line, rest = scratch, scratch + size, scratch + 2 * size, scratch + 3 * size
    weight_sum, bias_sum = sums, sums + 4 * channels
    for row in range(start, stop):
        begin = row * channels
        x = _decoded(line, parts, begin, channels, total, bits, group, rest)
        g = read_line(grad_out, kind, begin, channels, grad_line)
        mean = _mean(x, channels) if centred else ZERO
        inverse = _inverse_root(_squares(x, channels, mean), channels, eps)
        along = _weighted(x, g, factor, channels, mean) * inverse / np.float32(channels)
        level = dot(g, factor, channels) / np.float32(channels) if centred else ZERO
        to_x = output_line(grad_x, x_kind, begin, x_line)
        for j in range(channels):
            normal = (get_float(x, j) - mean) * inverse
            grad = get_float(g, j)
            put_float(weight_sum, j, get_float(weight_sum, j) + grad * normal)
            put_float(bias_sum, j, get_float(bias_sum, j) + grad)
            grad = grad * get_float(factor, j) - level - normal * along
            put_float(to_x, j, grad * inverse)
        write_line(to_x, grad_x, x_kind, begin, channels)


@helper
def _decoded(line, parts, begin, count, total, bits, group, rest) -> Any:
    """Decode `count` elements from `begin` on into a line with room for two more groups; return where they start."""
    first, last = begin // group, (begin + count - 1) // group + 1
    start = line - 4 * first * group
    decode_groups(*parts, start, LINE, total, bits, group, NO, NO, rest, first, last)
    return start + 4 * begin


@helper
def _inverse_root(squares, count, eps) -> Any:
    return ONE / np.sqrt(squares / np.float32(count) + np.float32(eps))


@summing
def _mean(x, count) -> Any:
    total = ZERO
    for j in range(count):
        total += get_float(x, j)
    return total / np.float32(count)


@summing
def _squares(x, count, mean) -> Any:
    """Sum of (x - mean)^2."""
    total = ZERO
    for j in range(count):
        v = get_float(x, j) - mean
        total += v * v
    return total


@summing
def _weighted(x, g, factor, count, mean) -> Any:
    """Sum of g factor (x - mean)."""
    total = ZERO
    for j in range(count):
        total += (get_float(x, j) - mean) * (get_float(g, j) * get_float(factor, j))
    return total
