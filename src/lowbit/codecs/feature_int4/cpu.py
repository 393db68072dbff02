"""`FeatureInt4` on the CPU: row by row, in scratch that stays in the first cache.

All features of a row are quantized as if none were an outlier, so that vectors never stop; the codes of the k + 1 runs
between the outliers are then moved together. Moves are whole vectors: what one writes behind its run, the next one
overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.types import boolean, float32, int64, intp, none, uint8  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from lowbit.codecs.feature_int4.reference import BEYOND, LARGEST_BF16, LIMIT, NAN_BF16, NAN_CODE, feature_int4_layout
from lowbit.kernels.cpu import formulas
from lowbit.kernels.cpu.formulas import TO_SIGNED, constant, shaped
from lowbit.kernels.cpu.jit import helper, kernel, operation
from lowbit.kernels.cpu.lines import BFLOAT16, FLOAT16, FLOAT32, KINDS, narrow, sections, widen, zero_gaps
from lowbit.kernels.cpu.memory import (
    F32,
    I8,
    I16,
    I32,
    I64,
    get_byte,
    get_float,
    get_half,
    get_int,
    pointer,
    put_byte,
    put_float,
    put_half,
)
from lowbit.kernels.cpu.operations import from_bf16, greater, lesser, to_bf16
from lowbit.kernels.cpu.threads import over_rows

LANES = 32  # elements in registers together
MOST = np.float32(LARGEST_BF16)
INFINITE = np.float32(np.inf)


def encode(x: Tensor, payload: Tensor, inverse: Tensor, order: Tensor, outliers: int, clipped: Tensor | None) -> None:
    """The reference's bytes."""
    rows, features = x.shape
    layout = feature_int4_layout(rows, features, outliers)
    at = sections(payload, layout)
    zero_gaps(payload, layout)
    counts: list[int] = []

    def work(start: int, stop: int) -> None:
        scratch = _scratch(features)
        counts.append(_encode(
            x.data_ptr(), KINDS[x.dtype], features, inverse.data_ptr(), order.data_ptr(), outliers,
            at["features"], at["codes"], scratch.data_ptr(), start, stop,
        ))  # fmt: skip

    over_rows(work, rows, x.nbytes)
    if clipped is not None:
        clipped.add_(int(np.sum(counts)))


def decode(payload: Tensor, out: Tensor, scale: Tensor, order: Tensor, outliers: int, accumulate: bool) -> None:
    """The reference's numbers."""
    _sum([payload], out, scale, order, outliers, 1, accumulate)


def sum(payloads: Sequence[Tensor], out: Tensor, scales: Tensor, order: Tensor, outliers: int, divisor: int) -> None:
    """The reference's numbers."""
    _sum(payloads, out, scales, order, outliers, divisor, False)


def _sum(
    payloads: Sequence[Tensor], out: Tensor, scales: Tensor, order: Tensor, outliers: int,
    divisor: int, accumulate: bool,
) -> None:  # fmt: skip
    rows, features = out.shape
    layout = feature_int4_layout(rows, features, outliers)
    starts = np.array([payload.data_ptr() for payload in payloads])

    def work(start: int, stop: int) -> None:
        scratch = _scratch(features)
        _decode(
            starts.ctypes.data, len(payloads), layout.offsets["features"], layout.offsets["codes"], scales.data_ptr(),
            order.data_ptr(), outliers, out.data_ptr(), KINDS[out.dtype], features,
            divisor, accumulate, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, rows, out.nbytes * len(payloads))


def _scratch(features: int) -> Tensor:
    """Bytes for a line of float32 numbers, and two rows of codes with room for a vector behind each."""
    return torch.empty(4 * features + 2 * (features + 2 * LANES), dtype=torch.uint8)


def _code(b: Any, x: Any, inverse: Any) -> tuple[Any, Any]:
    """Codes of numbers as bytes, and whether each is beyond them."""
    v = b.fmul(x, inverse)
    beyond = b.fcmp_unordered(">=", formulas.magnitude(b, v), constant(F32, BEYOND, v))
    v = formulas.lesser(b, formulas.greater(b, v, constant(F32, -LIMIT, v)), constant(F32, LIMIT, v))
    finite = b.fcmp_ordered("<", formulas.magnitude(b, x), constant(F32, float("inf"), x))
    v = b.select(finite, v, constant(F32, NAN_CODE, v))
    rounded = formulas.float_bits(b, b.fadd(v, constant(F32, TO_SIGNED, v)))
    return b.trunc(rounded, shaped(I8, rounded)), beyond


def _coder(kind: int) -> Any:
    """Code `count` numbers, a multiple of `LANES`, into a byte each; how many are beyond the codes."""
    stored = I16 if kind == BFLOAT16 else F32

    @operation(int64, intp, intp, intp, intp)
    def code(b: Any, x: Any, inverse: Any, count: Any, to: Any) -> Any:
        total = cgutils.alloca_once_value(b, I64(0))
        with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
            first = b.mul(loop.index, I64(LANES))
            numbers = formulas.load(b, x, first, stored, LANES)
            if kind == BFLOAT16:
                bits = b.zext(numbers, shaped(I32, numbers))
                numbers = formulas.bits_float(b, b.shl(bits, constant(I32, 16, bits)))
            codes, beyond = _code(b, numbers, formulas.load(b, inverse, first, F32, LANES))
            formulas.store(b, codes, b.add(to, first))
            flags = b.ctpop(b.bitcast(beyond, ir.IntType(LANES)))
            b.store(b.add(b.load(total), b.zext(flags, I64)), total)
        return b.load(total)

    return code


_code_bf16, _code_float32 = _coder(BFLOAT16), _coder(FLOAT32)


@operation(uint8, float32, float32)
def _code_one(b: Any, x: Any, inverse: Any) -> Any:
    return _code(b, x, inverse)[0]


@operation(boolean, float32, float32)
def _beyond_one(b: Any, x: Any, inverse: Any) -> Any:
    return _code(b, x, inverse)[1]


@operation(none, intp, intp, intp)
def _move(b: Any, source: Any, to: Any, count: Any) -> None:
    """Copy `count` bytes and up to `LANES` - 1 more."""
    rounds = b.udiv(b.add(count, I64(LANES - 1)), I64(LANES))
    with cgutils.for_range(b, rounds) as loop:
        first = b.mul(loop.index, I64(LANES))
        formulas.store(b, formulas.load(b, source, first, I8, LANES), b.add(to, first))


@operation(none, intp, intp, intp, intp)
def _pack(b: Any, codes: Any, half: Any, count: Any, to: Any) -> None:
    """Bytes of `count` codes and those `half` further on; `count` a multiple of `LANES`."""
    with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
        first = b.mul(loop.index, I64(LANES))
        low, high = (formulas.load(b, codes, i, I8, LANES) for i in (first, b.add(first, half)))
        low = b.and_(low, constant(I8, 15, low))
        formulas.store(b, b.or_(low, b.shl(high, constant(I8, 4, high))), b.add(to, first))


@operation(none, intp, intp, intp, intp)
def _unpack(b: Any, packed: Any, half: Any, count: Any, to: Any) -> None:
    """Inverse of `_pack`."""
    with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
        first = b.mul(loop.index, I64(LANES))
        both = formulas.load(b, packed, first, I8, LANES)
        low, high = b.and_(both, constant(I8, 15, both)), b.lshr(both, constant(I8, 4, both))
        at = b.add(to, first)
        for part, address in ((low, at), (high, b.add(at, half))):
            part = b.xor(part, constant(I8, 8, part))
            formulas.store(b, b.sub(part, constant(I8, 8, part)), address)


def _number(b: Any, code: Any, scale: Any) -> Any:
    """What a code, an 8-bit integer, stands for."""
    value = b.fmul(b.sitofp(b.sext(code, shaped(I32, code)), shaped(F32, code)), scale)
    bad = b.icmp_signed("==", code, constant(I8, NAN_CODE, code))
    return b.select(bad, constant(F32, float("nan"), value), value)


@operation(none, intp, intp, intp, intp, boolean)
def _numbers(b: Any, codes: Any, scale: Any, count: Any, line: Any, first: Any) -> None:
    """Write what `count` codes, a multiple of `LANES`, stand for to a line, or add it to what is there."""
    with b.if_else(first) as (write, add):
        for branch, adds in ((write, False), (add, True)):
            with branch, cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
                at = b.mul(loop.index, I64(LANES))
                value = _number(b, formulas.load(b, codes, at, I8, LANES), formulas.load(b, scale, at, F32, LANES))
                if adds:
                    value = b.fadd(formulas.load(b, line, at, F32, LANES), value)
                formulas.store(b, value, b.add(line, b.mul(at, I64(4))))


@operation(float32, uint8, float32)
def _number_one(b: Any, code: Any, scale: Any) -> Any:
    return _number(b, code, scale)


@helper
def _bf16_of(x, kind, j):
    """The bits of a number as it travels: saturated, and with one kind of NaN."""
    if kind == BFLOAT16:
        bits = get_half(x, j)
        return bits if (bits & 0x7FFF) <= 0x7F80 else NAN_BF16
    value = get_float(x, j)
    if value < INFINITE and value > -INFINITE:
        value = lesser(greater(value, -MOST), MOST)
    return to_bf16(value)


@kernel
def _encode(source, kind, features, inverse, order, outliers, to_features, to_codes, scratch, start, stop) -> int:
    line, codes = scratch, scratch + 4 * features
    kept = codes + features + 2 * LANES
    chosen, rest = order + 4 * (features - outliers), features - outliers
    half, whole = (rest + 1) >> 1, features // LANES * LANES
    in_vectors = half // LANES * LANES
    beyond = 0
    for n in range(start, stop):
        size = 2 if kind == BFLOAT16 else 4
        x = source + size * n * features
        if kind == FLOAT16:
            widen(source, kind, n * features, features, line)
            x = line
        if kind == BFLOAT16:
            beyond += _code_bf16(x, inverse, whole, codes)
        else:
            beyond += _code_float32(x, inverse, whole, codes)
        for j in range(whole, features):
            value = from_bf16(get_half(x, j)) if kind == BFLOAT16 else get_float(x, j)
            put_byte(codes, j, _code_one(value, get_float(inverse, j)))
            beyond += np.int64(_beyond_one(value, get_float(inverse, j)))
        begin = 0
        for i in range(outliers + 1):
            end = np.int64(get_int(chosen, i)) if i < outliers else features
            _move(codes + begin, kept + begin - i, end - begin)
            begin = end + 1
        put_byte(kept, rest, 0)
        to = to_codes + n * half
        _pack(kept, half, in_vectors, to)
        for j in range(in_vectors, half):
            put_byte(to, j, (get_byte(kept, j) & 15) | (get_byte(kept, j + half) << 4))
        for i in range(outliers):
            put_half(to_features, n * outliers + i, _bf16_of(x, kind, np.int64(get_int(chosen, i))))
    return beyond


@kernel
def _decode(
    payloads, ranks, at_features, at_codes, scales, order, outliers, target, kind, features,
    divisor, accumulate, scratch, start, stop,
) -> None:  # fmt: skip
    spare, codes = scratch, scratch + 4 * features
    kept = codes + features + 2 * LANES
    chosen, rest = order + 4 * (features - outliers), features - outliers
    half, whole = (rest + 1) >> 1, features // LANES * LANES
    in_vectors = half // LANES * LANES
    parts = np.float32(divisor)
    for n in range(start, stop):
        line = spare
        if kind == FLOAT32 and not accumulate:
            line = target + 4 * n * features
        for r in range(ranks):
            payload = _word(payloads, r)
            scale, packed = scales + 4 * r * features, payload + at_codes + n * half
            _unpack(packed, half, in_vectors, kept)
            for j in range(in_vectors, half):
                both = get_byte(packed, j)
                put_byte(kept, j, ((both & 15) ^ 8) - 8)
                put_byte(kept, j + half, ((both >> 4) ^ 8) - 8)
            begin = 0
            for i in range(outliers + 1):
                end = np.int64(get_int(chosen, i)) if i < outliers else features
                _move(kept + begin - i, codes + begin, end - begin)
                begin = end + 1
            _numbers(codes, scale, whole, line, r == 0)
            for j in range(whole, features):
                value = _number_one(get_byte(codes, j), get_float(scale, j))
                put_float(line, j, value if r == 0 else get_float(line, j) + value)
        for i in range(outliers):
            at = n * outliers + i
            value = from_bf16(get_half(_word(payloads, 0) + at_features, at))
            for r in range(1, ranks):
                value += from_bf16(get_half(_word(payloads, r) + at_features, at))
            put_float(line, np.int64(get_int(chosen, i)), value)
        if divisor > 1:
            for j in range(features):
                put_float(line, j, get_float(line, j) / parts)
        if line == spare:
            narrow(line, target, kind, n * features, features, accumulate)


@operation(intp, intp, intp)
def _word(b: Any, address: Any, index: Any) -> Any:
    """An address in a list of them."""
    return b.load(pointer(b, address, index, I64), align=1)
