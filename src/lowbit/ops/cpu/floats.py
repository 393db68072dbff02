"""float32, bfloat16 and float16 tensors as arrays.

A kernel takes every tensor as three arguments, so that one compiled version serves all dtypes: a float32 array, a
uint16 array (one of the two is empty) and a kind. What is not float32 passes through a line of float32 numbers that
stays in the cache.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.ops.cpu.jit import get, helper, put
from lowbit.ops.cpu.operations import from_bf16, from_fp16, to_bf16, to_fp16
from lowbit.ops.layout import Layout

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
NO_FLOATS = np.empty(0, np.float32)
NO_HALVES = np.empty(0, np.uint16)


def as_arrays(x: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """The tensor's elements as (float32 array, uint16 array, kind), without a copy."""
    flat, kind = x.detach().view(-1), KINDS[x.dtype]
    if kind == FLOAT32:
        return flat.numpy(), NO_HALVES, kind
    return NO_FLOATS, flat.view(torch.int16).numpy().view(np.uint16), kind


def zero_gaps(payload: np.ndarray, layout: Layout) -> None:
    """Clear the bytes between sections."""
    end = 0
    for name, start in layout.offsets.items():
        payload[end:start] = 0
        end = start + layout.sizes[name]


@helper
def widen(halves, kind, start, count, line):  # noqa: ANN201
    """Convert `count` elements from `start` on to float32, exactly."""
    if kind == BFLOAT16:
        for j in range(count):
            put(line, j, from_bf16(get(halves, start + j)))
    else:
        for j in range(count):
            put(line, j, from_fp16(get(halves, start + j)))


@helper
def store_line(line, floats, halves, kind, start, count, accumulate):  # noqa: ANN201
    """Write `count` float32 numbers to the elements from `start` on, or add them, rounding once."""
    if accumulate:
        if kind == FLOAT32:
            for j in range(count):
                put(line, j, get(floats, start + j) + get(line, j))
        elif kind == BFLOAT16:
            for j in range(count):
                put(line, j, from_bf16(get(halves, start + j)) + get(line, j))
        else:
            for j in range(count):
                put(line, j, from_fp16(get(halves, start + j)) + get(line, j))
    if kind == FLOAT32:
        for j in range(count):
            put(floats, start + j, get(line, j))
    elif kind == BFLOAT16:
        for j in range(count):
            put(halves, start + j, to_bf16(get(line, j)))
    else:
        for j in range(count):
            put(halves, start + j, to_fp16(get(line, j)))
