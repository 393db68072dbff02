"""`BlockFloat8` on the CPU: one pass, block by block."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.types import boolean, float32, int32, intp, none, uint64  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from lowbit.codecs.block_float8.reference import (
    EXPONENT,
    FORMATS,
    NAN_SCALE,
    QUARTER_BELOW,
    Format,
    block_float8_layout,
)
from lowbit.kernels.cpu import formulas
from lowbit.kernels.cpu.formulas import INTEGER_BITS, MAGNITUDE, TO_INTEGER, constant, shaped
from lowbit.kernels.cpu.jit import helper, kernel, operation, over_rows
from lowbit.kernels.cpu.lines import FLOAT32, KINDS, add, narrow, sections, widen, zero_gaps
from lowbit.kernels.cpu.memory import F32, I8, I32, I64, get_byte, get_float, put_byte, put_float
from lowbit.kernels.cpu.operations import bits_float
from lowbit.kernels.layout import ceil_div

LANES = 32  # elements in registers at a time; blocks are multiples of it
INFINITY = 0x7F800000


def encode(x: Tensor, payload: Tensor, format: str, block: int, seed: int | None, accumulate: bool) -> None:
    """Encode; the bytes equal those of `reference.encode`."""
    layout, form = block_float8_layout(x.numel(), block), FORMATS[format]
    at = sections(payload, layout)
    zero_gaps(payload, layout)

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(5 * block, dtype=torch.uint8)
        _encode(
            x.data_ptr(), KINDS[x.dtype], x.numel(), at["scales"], at["codes"], form.bits, form.top,
            block, seed is not None, (seed or 0) % 2**32, accumulate,
            scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(x.numel(), block), x.nbytes)


def decode(payload: Tensor, out: Tensor, format: str, block: int, accumulate: bool) -> None:
    """The reference's numbers."""
    at, form = sections(payload, block_float8_layout(out.numel(), block)), FORMATS[format]

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(5 * block, dtype=torch.uint8)
        _decode(
            at["scales"], at["codes"], out.data_ptr(), KINDS[out.dtype], out.numel(), form.bits,
            block, accumulate, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(out.numel(), block), out.nbytes)


@operation(int32, intp, intp)
def _largest(b: Any, x: Any, count: Any) -> Any:
    """The bits of the largest magnitude of `count` numbers, a multiple of `LANES`; NaN and Inf are the largest."""
    kind = ir.VectorType(I32, LANES)
    largest = cgutils.alloca_once_value(b, ir.Constant(kind, [0] * LANES))
    with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
        bits = formulas.float_bits(b, formulas.load(b, x, b.mul(loop.index, I64(LANES)), F32, LANES))
        bits = b.and_(bits, constant(I32, MAGNITUDE, bits))
        b.store(formulas.greater32(b, bits, b.load(largest)), largest)
    name = f"llvm.vector.reduce.smax.v{LANES}i32"
    reduce = cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, [kind]), name)
    return b.call(reduce, [b.load(largest)])


@operation(none, intp, intp, float32, uint64, uint64, intp, boolean)
def _encode_lanes(b: Any, x: Any, to: Any, inverse: Any, first: Any, seed: Any, bits: Any, stochastic: Any) -> None:
    """Encode `LANES` numbers times `inverse`; `first` is the tensor index of the first one."""
    y = formulas.load(b, x, I64(0), F32, LANES)

    def build(form: Format, drawn: bool) -> None:
        limit = constant(F32, 1.75 * 2.0**form.top, y)
        v = formulas.lesser(b, b.fmul(formulas.magnitude(b, y), formulas.spread(b, inverse, LANES)), limit)
        exponent = b.lshr(formulas.float_bits(b, v), constant(I32, EXPONENT, v))
        exponent = formulas.greater32(b, exponent, constant(I32, form.lowest, v))
        unit = b.sub(constant(I32, 254 + form.bits, v), exponent)
        r = b.fmul(v, formulas.bits_float(b, b.shl(unit, constant(I32, EXPONENT, v))))
        if drawn:
            integer = b.fptosi(b.fadd(r, _uniform(b, first, seed)), shaped(I32, v))
        else:
            rounded = formulas.float_bits(b, b.fadd(r, constant(F32, TO_INTEGER, r)))
            integer = b.sub(rounded, constant(I32, INTEGER_BITS, r))
        binade = b.sub(exponent, constant(I32, form.lowest, v))
        code = b.add(b.shl(binade, constant(I32, form.bits, v)), integer)
        sign = b.lshr(formulas.float_bits(b, y), constant(I32, 24, v))
        code = b.or_(code, b.and_(sign, constant(I32, 0x80, v)))
        formulas.store(b, b.trunc(code, shaped(I8, code)), to)

    with b.if_else(b.icmp_signed("==", bits, I64(FORMATS["e4m3"].bits))) as branches:
        for branch, form in zip(branches, FORMATS.values(), strict=True):
            with branch, b.if_else(stochastic) as (random, nearest):
                with random:
                    build(form, True)
                with nearest:
                    build(form, False)


@operation(none, intp, intp, float32, intp)
def _decode_lanes(b: Any, codes: Any, to: Any, scale: Any, bits: Any) -> None:
    """Decode `LANES` codes to float32 numbers."""
    code = formulas.load(b, codes, I64(0), I8, LANES)
    code = b.zext(code, shaped(I32, code))
    magnitude, one = b.and_(code, constant(I32, 0x7F, code)), constant(I32, 1, code)
    sign = b.shl(b.and_(code, constant(I32, 0x80, code)), constant(I32, 24, code))
    for form in FORMATS.values():
        with b.if_then(b.icmp_signed("==", bits, I64(form.bits))):
            mantissa = constant(I32, form.bits, code)
            exponent = formulas.greater32(b, b.lshr(magnitude, mantissa), one)
            r = b.sub(magnitude, b.shl(b.sub(exponent, one), mantissa))
            unit = b.add(exponent, constant(I32, form.lowest - 1 - form.bits, code))
            unit = formulas.bits_float(b, b.shl(unit, constant(I32, EXPONENT, code)))
            value = b.fmul(b.sitofp(r, shaped(F32, code)), unit)
            value = formulas.bits_float(b, b.or_(formulas.float_bits(b, value), sign))
            formulas.store(b, b.fmul(value, formulas.spread(b, scale, LANES)), to)


@kernel
def _encode(
    source, kind, total, scales, codes, bits, top, block, stochastic, seed, accumulate,
    scratch, start, stop,
) -> None:  # fmt: skip
    line, spare = scratch, scratch + 4 * block
    for g in range(start, stop):
        begin = g * block
        count, to = min(block, total - begin), codes + begin
        padded = (count + LANES - 1) // LANES * LANES
        x = source + 4 * begin
        if accumulate:
            _decode_block(scales, codes, g, begin, count, padded, bits, line, spare)
            add(source, kind, begin, count, line)
        elif kind != FLOAT32:
            widen(source, kind, begin, count, line)
        elif padded != count:
            for j in range(count):
                put_float(line, j, get_float(x, j))
        if accumulate or kind != FLOAT32 or padded != count:
            x = line
        for j in range(count, padded):
            put_float(line, j, np.float32(0))
        largest = _largest(x, padded)
        scale = min(max(((largest + QUARTER_BELOW) >> EXPONENT) - top, 1), 254 - top)
        if largest >= INFINITY:
            put_byte(scales, g, NAN_SCALE)
            for j in range(count):
                put_byte(to, j, 0)
            continue
        put_byte(scales, g, scale)
        inverse = bits_float((254 - scale) << EXPONENT)
        target = to if padded == count else spare
        for j in range(0, padded, LANES):
            _encode_lanes(x + 4 * j, target + j, inverse, begin + j, seed, bits, stochastic)
        if padded != count:
            for j in range(count):
                put_byte(to, j, get_byte(spare, j))


@kernel
def _decode(scales, codes, target, kind, total, bits, block, accumulate, scratch, start, stop) -> None:
    line, spare = scratch, scratch + 4 * block
    for g in range(start, stop):
        begin = g * block
        count = min(block, total - begin)
        padded = (count + LANES - 1) // LANES * LANES
        if kind == FLOAT32 and not accumulate and padded == count:
            to = target + 4 * begin
            _decode_block(scales, codes, g, begin, count, padded, bits, to, spare)
        else:
            _decode_block(scales, codes, g, begin, count, padded, bits, line, spare)
            narrow(line, target, kind, begin, count, accumulate)


@helper
def _decode_block(scales, codes, g, begin, count, padded, bits, to, spare):
    """Decode a block to `padded` float32 numbers, of which those after `count` have no meaning."""
    scale = bits_float(get_byte(scales, g) << EXPONENT)
    at = codes + begin
    if padded != count:
        for j in range(count):
            put_byte(spare, j, get_byte(at, j))
        at = spare
    for j in range(0, padded, LANES):
        _decode_lanes(at + j, to + 4 * j, scale, bits)


def _uniform(b: Any, first: Any, seed: Any) -> Any:
    """`lowbit.kernels.exact.uniform` of `LANES` neighbours, among whose indices only the low 32 bits differ."""
    kind = ir.VectorType(I32, LANES)
    lanes = ir.Constant(kind, list(range(LANES)))
    above = b.mul(b.trunc(b.lshr(first, I64(32)), I32), I32(0x9E3779B9))
    h = b.add(formulas.spread(b, b.trunc(first, I32), LANES), lanes)
    h = b.xor(h, formulas.spread(b, b.add(b.trunc(seed, I32), above), LANES))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = b.mul(b.xor(h, b.lshr(h, constant(I32, shift, h))), constant(I32, factor, h))
    h = b.xor(h, b.lshr(h, constant(I32, 16, h)))
    number = b.sitofp(b.lshr(h, constant(I32, 8, h)), shaped(F32, h))
    return b.fmul(number, constant(F32, 2.0**-24, h))
