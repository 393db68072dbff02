"""Codes as bit planes (see `lowbit.ops.packing`), eight bytes of a plane at a time in a 64-bit word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.types import Array, intp, none, uint16, uint64

from lowbit.ops.cpu.jit import get, helper, operation, put

I16, I64 = ir.IntType(16), ir.IntType(64)


@helper
def pack(codes, at, count, bits, payload, to):  # noqa: ANN201
    """Pack `count` codes, a multiple of 8, from `codes[at]` on into bytes from `payload[to]` on.

    `codes` must go on for 8 bytes after the last one. Returns the end of what was written.
    """
    done, width = 0, 8
    while width:
        if bits & width:
            size = (count >> 3) * width
            for first in range(0, size, 8):
                word = gather(codes, at + first, size, width, done)
                if first + 8 <= size:
                    store64(payload, to + first, word)
                else:
                    for byte in range(first, size):
                        put(payload, to + byte, word)
                        word >>= 8
            done, to = done + width, to + size
        width >>= 1
    return to


@helper
def unpack(payload, start, count, bits, codes, at):  # noqa: ANN201
    """Inverse of `pack`; what lies in `codes` after the last code may change, up to the next multiple of 64. Returns the end of
    what was read.
    """
    done, width = 0, 8
    while width:
        if bits & width:
            size = (count >> 3) * width
            for first in range(0, size & -8, 8):
                scatter(codes, at + first, size, width, done, load64(payload, start + first))
            for byte in range(size & -8, size):
                value = get(payload, start + byte)
                for k in range(at + byte, at + count, size):
                    part = (value & ((1 << width) - 1)) << done
                    put(codes, k, part | get(codes, k) if done else part)
                    value >>= width
            done, start = done + width, start + size
        width >>= 1
    return start


@operation(uint16, Array, intp)
def load16(b: Any, data: Any, byte: Any) -> Any:
    """Two bytes of an array of bytes, at any address."""
    return b.load(_at(b, data, byte, I16), align=1)


@operation(none, Array, intp, uint16)
def store16(b: Any, data: Any, byte: Any, value: Any) -> None:
    """Write two bytes."""
    b.store(value, _at(b, data, byte, I16), align=1)


@operation(uint64, Array, intp)
def load64(b: Any, data: Any, byte: Any) -> Any:
    """Eight bytes."""
    return b.load(_at(b, data, byte, I64), align=1)


@operation(none, Array, intp, uint64)
def store64(b: Any, data: Any, byte: Any, value: Any) -> None:
    """Write eight bytes."""
    b.store(value, _at(b, data, byte, I64), align=1)


@operation(uint64, Array, intp, intp, intp, uint64)
def gather(b: Any, codes: Any, first: Any, size: Any, width: Any, done: Any) -> Any:
    """Eight bytes of a plane: bits `done` to `done + width` of the codes at `first`, `first + size`, ..."""
    result = cgutils.alloca_once(b, I64)

    def plane(width: int) -> None:
        word, at = I64(0), first
        for k in range(8 // width):
            part = b.lshr(b.load(_at(b, codes, at, I64), align=1), done)
            word = b.or_(word, b.shl(b.and_(part, _mask(width)), I64(width * k)))
            at = b.add(at, size)
        b.store(word, result)

    _for_width(b, width, plane)
    return b.load(result)


@operation(none, Array, intp, intp, intp, uint64, uint64)
def scatter(b: Any, codes: Any, first: Any, size: Any, width: Any, done: Any, word: Any) -> None:
    """Inverse of `gather`: set these bits, which are zero unless `done` is."""
    fresh = b.icmp_unsigned("==", done, I64(0))

    def plane(width: int) -> None:
        at = first
        for k in range(8 // width):
            part = b.shl(b.and_(b.lshr(word, I64(width * k)), _mask(width)), done)
            target = _at(b, codes, at, I64)
            b.store(b.or_(b.select(fresh, I64(0), b.load(target, align=1)), part), target, align=1)
            at = b.add(at, size)

    _for_width(b, width, plane)


def _for_width(b: Any, width: Any, build: Callable[[int], None]) -> None:
    """One branch for each width, so that shifts and the number of codes in a byte are constants."""
    for known in (8, 4, 2, 1):
        with b.if_then(b.icmp_signed("==", width, I64(known))):
            build(known)


def _at(b: Any, data: Any, byte: Any, kind: ir.Type) -> Any:
    return b.bitcast(b.gep(data, [byte], inbounds=True), ir.PointerType(kind))


def _mask(width: int) -> Any:
    return I64(((1 << width) - 1) * 0x0101010101010101)
