"""Access to float32, bfloat16 and float16 elements, so that one compiled kernel serves all three.

Other dtypes than float32 are converted through a line of float32 numbers that stays in the cache. At the end: sums over
such lines, which may be computed in any order.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.kernels.cpu.jit import helper, kernel, over_rows, summing
from lowbit.kernels.cpu.memory import Room, get_float, get_half, put_float, put_half
from lowbit.kernels.cpu.operations import (
    ONE,
    ZERO,
    float_bits,
    from_bf16,
    from_fp16,
    greater,
    greater32,
    magnitude,
    to_bf16,
    to_fp16,
)
from lowbit.kernels.cpu.runs import SMALLEST
from lowbit.kernels.layout import Layout

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def sections(payload: Tensor, layout: Layout) -> dict[str, int]:
    """Address of each section of a payload."""
    start = payload.data_ptr()
    return {name: start + offset for name, offset in layout.offsets.items()}


def zero_gaps(payload: Tensor, layout: Layout) -> None:
    """Clear the bytes between sections."""
    end = 0
    for name, start in layout.offsets.items():
        ctypes.memset(payload.data_ptr() + end, 0, start - end)
        end = start + layout.sizes[name]


@helper
def widen(x, kind, start, count, line) -> None:
    """Convert `count` elements from `start` on to float32, exactly."""
    if kind == BFLOAT16:
        for j in range(count):
            put_float(line, j, from_bf16(get_half(x, start + j)))
    else:
        for j in range(count):
            put_float(line, j, from_fp16(get_half(x, start + j)))


@helper
def narrow(line, y, kind, start, count, accumulate) -> None:
    """Write `count` float32 numbers to the elements from `start` on, or add them, rounding once."""
    if accumulate:
        add(y, kind, start, count, line)
    if kind == FLOAT32:
        for j in range(count):
            put_float(y, start + j, get_float(line, j))
    elif kind == BFLOAT16:
        for j in range(count):
            put_half(y, start + j, to_bf16(get_float(line, j)))
    else:
        for j in range(count):
            put_half(y, start + j, to_fp16(get_float(line, j)))


@helper
def add(y, kind, start, count, line) -> None:
    """Add `count` elements from `start` on to a line of float32 numbers."""
    if kind == FLOAT32:
        for j in range(count):
            put_float(line, j, get_float(y, start + j) + get_float(line, j))
    elif kind == BFLOAT16:
        for j in range(count):
            put_float(line, j, from_bf16(get_half(y, start + j)) + get_float(line, j))
    else:
        for j in range(count):
            put_float(line, j, from_fp16(get_half(y, start + j)) + get_float(line, j))


@summing
def dot(x, y, count) -> Any:
    """Sum of x y."""
    total = ZERO
    for j in range(count):
        total += get_float(x, j) * get_float(y, j)
    return total


@summing
def squares(x, count, scale) -> Any:
    """Sum of (scale x)^2."""
    total = ZERO
    for j in range(count):
        value = get_float(x, j) * scale
        total += value * value
    return total


@helper
def largest(x, count) -> Any:
    """Largest magnitude."""
    most = ZERO
    for j in range(count):
        most = greater(magnitude(get_float(x, j)), most)
    return most


@helper
def largest_bits(x, count) -> Any:
    """Bits of the largest magnitude, int32; of NaN if there is one."""
    most = np.int32(0)
    for j in range(count):
        most = greater32(most, float_bits(magnitude(get_float(x, j))))
    return most


@helper
def norm_of(x, count) -> Any:
    """Euclidean norm, computed without overflow or underflow of squares."""
    most = greater(largest(x, count), SMALLEST)
    return np.float32(np.sqrt(squares(x, count, ONE / most))) * most


@summing
def add_times(x, y, factor, count) -> Any:
    """x += factor y."""
    for j in range(count):
        put_float(x, j, get_float(x, j) + factor * get_float(y, j))


def sum_over_rows(work: Callable[[int, int, int], object], rows: int, nbytes: int, total: int, count: int) -> None:
    """`over_rows` for work that writes `count` float32 sums over its rows to the address that is its third argument.

    All are added to `total`, an address, in the order of the rows.
    """
    parts: dict[int, Room] = {}

    def part(first: int, last: int) -> None:
        if first:
            parts[first] = Room(4 * count)
        work(first, last, parts[first].at[0] if first else total)

    over_rows(part, rows, nbytes)
    for first in sorted(parts):
        _add(total, parts[first].at[0], count)


@kernel
def _add(x, y, count) -> None:
    for j in range(count):
        put_float(x, j, get_float(x, j) + get_float(y, j))
