"""Reflections on the CPU, row after row, for directions that are nearly orthogonal to each other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.kernels.cpu.jit import kernel
from lowbit.kernels.cpu.memory import get_float, put_float
from lowbit.kernels.cpu.runs import ONE
from lowbit.kernels.cpu.vectors import add, dot

ZERO = np.float32(0)


def reflections(directions: Tensor, y: Tensor, ty: Tensor, back: bool) -> None:
    """See `basis`."""
    rank, channels = directions.shape
    scale = torch.empty(rank, dtype=torch.float32, device="cpu")
    y.copy_(directions)
    _reflect(y.data_ptr(), scale.data_ptr(), rank, channels)
    _times(y.data_ptr(), scale.data_ptr(), ty.data_ptr(), rank, channels, back)


@kernel
def _reflect(y, scale, rank, channels) -> None:
    """Replace directions by the reflections that map each, after the earlier reflections, to its own axis."""
    for i in range(rank):
        line, left = y + 4 * (i * channels + i), channels - i
        first, rest = get_float(line, 0), dot(line + 4, line + 4, left - 1)
        factor = ZERO
        if rest > 0:
            length = np.float32(np.sqrt(first * first + rest))
            length = -length if first > 0 else length
            factor = (length - first) / length
            inverse = ONE / (first - length)
            for j in range(1, left):
                put_float(line, j, get_float(line, j) * inverse)
        put_float(line, 0, ONE)
        put_float(scale, i, factor)
        for k in range(i + 1, rank):
            other = y + 4 * (k * channels + i)
            add(other, line, -factor * dot(line, other, left), left)
        for j in range(i):
            put_float(y, i * channels + j, ZERO)
        if factor == 0:
            put_float(line, 0, ZERO)
            for j in range(1, left):
                put_float(line, j, ZERO)


@kernel
def _times(y, scale, out, rank, channels, back) -> None:
    """Compute rows of T Y, from the last to the first, or of T' Y, from the first to the last."""
    for turn in range(rank):
        i = turn if back else rank - 1 - turn
        line, source, factor = out + 4 * i * channels, y + 4 * i * channels, get_float(scale, i)
        for j in range(channels):
            put_float(line, j, get_float(source, j))
        for other in range(turn):
            k = other if back else rank - 1 - other
            start = max(i, k)  # zeros before
            along = dot(source + 4 * start, y + 4 * (k * channels + start), channels - start)
            add(line, out + 4 * k * channels, -along, channels)
        for j in range(channels):
            put_float(line, j, get_float(line, j) * factor)
