"""Access to memory by address and index, for kernels: `get_float(x, j)` is x[j] of the float32 numbers at address x.

Addresses need not be aligned, because the sections of a payload may start at any byte of a message. Scratch memory and
tables are passed as addresses, too: asking NumPy for one costs more than a small kernel.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.types import float32, float64, int32, intp, none, uint8, uint16, uint64

from lowbit.kernels.cpu.jit import operation

I8, I16, I32, I64, F32, F64 = (*(ir.IntType(n) for n in (8, 16, 32, 64)), ir.FloatType(), ir.DoubleType())


def pointer(b: Any, address: Any, index: Any, kind: ir.Type) -> Any:
    """Make an LLVM pointer to element `index` of an array of the type `kind` at an address."""
    return b.gep(b.inttoptr(address, ir.PointerType(kind)), [index], inbounds=True)


def _reader(kind: Any, stored: ir.Type) -> Any:
    @operation(kind, intp, intp)
    def get(b: Any, address: Any, index: Any) -> Any:
        return b.load(pointer(b, address, index, stored), align=1)

    return get


def _writer(kind: Any, stored: ir.Type) -> Any:
    @operation(none, intp, intp, kind)
    def put(b: Any, address: Any, index: Any, value: Any) -> None:
        b.store(value, pointer(b, address, index, stored), align=1)

    return put


get_byte, put_byte = _reader(uint8, I8), _writer(uint8, I8)
get_half, put_half = _reader(uint16, I16), _writer(uint16, I16)
get_int, put_int = _reader(int32, I32), _writer(int32, I32)
get_float, put_float = _reader(float32, F32), _writer(float32, F32)
get_word, put_word = _reader(uint64, I64), _writer(uint64, I64)
get_double, put_double = _reader(float64, F64), _writer(float64, F64)


CACHE_LINE = 64  # bytes


class Room:
    """Scratch memory in one piece.

    Attributes:
        at: an address for each of the sizes, in bytes; valid as long as the object lives.
    """

    def __init__(self, *sizes: int) -> None:
        starts = [CACHE_LINE]
        for size in sizes:
            starts.append(starts[-1] + (size + CACHE_LINE - 1 & -CACHE_LINE))
        self._bytes = np.empty(starts[-1] + CACHE_LINE, np.uint8)
        first = self._bytes.ctypes.data & -CACHE_LINE
        self.at = [first + start for start in starts[:-1]]


@functools.cache
def address(table: Callable[[], np.ndarray]) -> int:
    """Address of a table, which a cached function returns."""
    return table().ctypes.data
