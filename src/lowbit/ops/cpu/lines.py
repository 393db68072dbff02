"""What kernels take and give: addresses, and lines of float32 numbers.

Kernels read and write float32 and bfloat16; bfloat16 passes through a line of float32 numbers that stays in the cache.
float16, rare on a CPU, passes through a float32 copy of the tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.ops.cpu.jit import helper
from lowbit.ops.cpu.memory import get_float, get_half, put_float, put_half
from lowbit.ops.cpu.operations import from_bf16, to_bf16
from lowbit.ops.exact import store
from lowbit.ops.layout import Layout, tah_geometry

geometry = functools.lru_cache(tah_geometry)


def readable(x: Tensor) -> Tensor:
    """The tensor in a dtype that kernels read."""
    return x.float() if x.dtype == torch.float16 else x


@contextlib.contextmanager
def writable(out: Tensor, accumulate: bool) -> Iterator[tuple[Tensor, bool]]:
    """A tensor that kernels write for `out`, and whether they are to add to it."""
    if out.dtype != torch.float16:
        yield out, accumulate
    else:
        y = torch.empty_like(out, dtype=torch.float32)
        yield y, False
        store(y, out, accumulate)


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
def widen(x, start, count, line) -> None:
    """Convert `count` bfloat16 elements from `start` on to float32."""
    for j in range(count):
        put_float(line, j, from_bf16(get_half(x, start + j)))


@helper
def narrow(line, y, half, start, count, accumulate) -> None:
    """Write `count` float32 numbers to elements from `start` on, bfloat16 ones if `half`, or add them; round once."""
    if accumulate and half:
        for j in range(count):
            put_float(line, j, from_bf16(get_half(y, start + j)) + get_float(line, j))
    elif accumulate:
        for j in range(count):
            put_float(y, start + j, get_float(y, start + j) + get_float(line, j))
    if half:
        for j in range(count):
            put_half(y, start + j, to_bf16(get_float(line, j)))
