"""Operations on float32 vectors at an address, for kernels whose sums may be computed in any order."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.kernels.cpu.jit import helper, summing
from lowbit.kernels.cpu.memory import get_float, put_float
from lowbit.kernels.cpu.operations import greater, magnitude
from lowbit.kernels.cpu.runs import ONE, SMALLEST, ZERO


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
def norm_of(x, count) -> Any:
    """Euclidean norm, computed without overflow or underflow of squares."""
    most = greater(largest(x, count), SMALLEST)
    return np.float32(np.sqrt(squares(x, count, ONE / most))) * most


@summing
def add(x, y, factor, count) -> Any:
    """x += factor y."""
    for j in range(count):
        put_float(x, j, get_float(x, j) + factor * get_float(y, j))
