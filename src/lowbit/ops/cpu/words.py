"""Eight codes at a time: quantizing and packing them, and back, as vector instructions of LLVM.

A run of n elements shares a scale, and its codes lie in bit planes (see `lowbit.ops.packing`). Cut into `8 / p` parts,
p being its narrowest plane's width, all codes of a part lie at one shift in every plane; so eight neighbours of each
part make up eight bytes of every plane, one 64-bit word each, without a detour through memory. LLVM turns vectors
of eight into what the machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.types import float32, intp, none

from lowbit.ops.cpu.jit import operation
from lowbit.ops.cpu.memory import F32, I8, I32, I64, pointer
from lowbit.ops.cpu.operations import TO_INTEGER

FLOATS, INTEGERS, BYTES = (ir.VectorType(kind, 8) for kind in (F32, I32, I8))


@operation(none, intp, intp, float32, float32, float32, float32, intp, intp)
def encode_words(
    b: Any, x: Any, part: Any, step: Any, inverse: Any, shift: Any, top: Any, bits: Any, to: Any
) -> None:
    """Codes of x[0], x[part], x[2 * part], ... and their seven neighbours each, written to planes from byte `to` on."""
    scale = [_spread(b, v) for v in (step, inverse, shift, top)]

    def build(bits: int) -> None:
        parts = 8 // (bits & -bits)
        codes = [_quantize(b, _eight(b, x, b.mul(part, I64(k))), *scale) for k in range(parts)]
        for width, done, words, first in _planes(bits, parts):
            for j in range(words):
                word = I64(0)
                for s, c in enumerate(codes[j::words]):
                    field = b.and_(b.lshr(c, I64(done)), _mask(width))
                    word = b.or_(word, b.shl(field, I64(width * s)))
                at = b.add(to, b.mul(part, I64(first + j)))
                b.store(word, b.inttoptr(at, ir.PointerType(I64)), align=1)

    _for_bits(b, bits, build)


@operation(none, intp, intp, intp, float32, float32, intp)
def decode_words(
    b: Any, start: Any, part: Any, bits: Any, offset: Any, step: Any, y: Any
) -> None:
    """The inverse: (code + offset) * step for y[0], y[part], y[2 * part], ... and their neighbours."""
    scale = [_spread(b, v) for v in (offset, step)]

    def build(bits: int) -> None:
        parts = 8 // (bits & -bits)
        codes = [I64(0)] * parts
        for width, done, words, first in _planes(bits, parts):
            for j in range(words):
                at = b.add(start, b.mul(part, I64(first + j)))
                word = b.load(b.inttoptr(at, ir.PointerType(I64)), align=1)
                for s in range(8 // width):
                    field = b.and_(b.lshr(word, I64(width * s)), _mask(width))
                    k = j + s * words
                    codes[k] = b.or_(codes[k], b.shl(field, I64(done)))
        for k, c in enumerate(codes):
            target = _eight(b, y, b.mul(part, I64(k)))
            b.store(_restore(b, c, *scale), target, align=4)

    _for_bits(b, bits, build)


def _planes(bits: int, parts: int) -> list[tuple[int, int, int, int]]:
    """Of each plane: width, bits of a code below it, its length and its start in bytes for each byte of a part."""
    done, found = 0, []
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((width, done, parts * width // 8, parts * done // 8))
            done += width
    return found


def _quantize(b: Any, address: Any, step: Any, inverse: Any, shift: Any, top: Any) -> Any:
    """Eight codes as one integer.

    The quotient is the correctly rounded one, in a third of a division's time: an estimate by the reciprocal, then one
    Newton step whose remainder a fused multiply-add computes exactly. That this rounds correctly for steps of at most
    8 significant bits was proven by trying all mantissas. For exponents far from zero the remainder could underflow.
    """
    x = b.load(address, align=4)
    estimate = b.fmul(x, inverse)
    remainder = _fma(b, b.fneg(estimate), step, x)
    v = b.fadd(_fma(b, remainder, inverse, estimate), shift)
    v = b.select(b.fcmp_ordered(">", v, _all(FLOATS, 0.0)), v, _all(FLOATS, 0.0))
    v = b.select(b.fcmp_ordered("<", v, top), v, top)
    rounded = b.bitcast(b.fadd(v, _all(FLOATS, TO_INTEGER)), INTEGERS)
    return b.bitcast(b.trunc(rounded, BYTES), I64)


def _restore(b: Any, codes: Any, offset: Any, step: Any) -> Any:
    numbers = b.sitofp(b.zext(b.bitcast(codes, BYTES), INTEGERS), FLOATS)
    return b.fmul(b.fadd(numbers, offset), step)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.fma.v8f32"), [x, y, z])


def _spread(b: Any, value: Any) -> Any:
    one = b.insert_element(ir.Constant(FLOATS, ir.Undefined), value, I32(0))
    return b.shuffle_vector(one, one, _all(INTEGERS, 0))


def _all(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * 8)


def _for_bits(b: Any, bits: Any, build: Callable[[int], None]) -> None:
    """One branch for each width of codes, in which shifts and the number of parts are constants."""
    done = b.append_basic_block("done")
    switch = b.switch(bits, done)
    for known in range(2, 9):
        block = b.append_basic_block(f"bits{known}")
        switch.add_case(I64(known), block)
        with b.goto_block(block):
            build(known)
            b.branch(done)
    b.position_at_end(done)


def _eight(b: Any, x: Any, index: Any) -> Any:
    return b.bitcast(pointer(b, x, index, F32), ir.PointerType(FLOATS))


def _mask(width: int) -> Any:
    return I64(((1 << width) - 1) * 0x0101010101010101)
