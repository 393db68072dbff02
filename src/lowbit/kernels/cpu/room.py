"""Scratch memory and tables as addresses for kernels: asking NumPy for an address costs more than a small kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

LINE = 64  # bytes of a cache line


class Room:
    """Scratch memory in one piece.

    Attributes:
        at: an address for each of the sizes, in bytes; valid as long as the object lives.
    """

    def __init__(self, *sizes: int) -> None:
        starts = [LINE]
        for size in sizes:
            starts.append(starts[-1] + (size + LINE - 1 & -LINE))
        self._bytes = np.empty(starts[-1] + LINE, np.uint8)
        first = self._bytes.ctypes.data & -LINE
        self.at = [first + start for start in starts[:-1]]


@functools.cache
def address(table: Callable[[], np.ndarray]) -> int:
    """Address of a table, which a cached function returns."""
    return table().ctypes.data
