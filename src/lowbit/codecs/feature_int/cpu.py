"""`FeatureInt` on the CPU: row by row, in scratch memory that stays in the first caches.

All features of a row are scaled and coded as if none were an outlier, so that vector loops are not interrupted; then
the codes of the k + 1 runs between the outliers are moved together. Moves copy whole vectors: what one writes beyond
its run, the next one overwrites.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.types import boolean, float32, int64, intp, none  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from lowbit.codecs.feature_int.reference import LARGEST_BF16, NAN_BF16, center_of, feature_int_layout
from lowbit.kernels.cpu import formulas
from lowbit.kernels.cpu.formulas import constant, load, shaped, spread, store
from lowbit.kernels.cpu.jit import helper, kernel, operation, over_rows
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
from lowbit.kernels.cpu.operations import (
    bits_float,
    code,
    float_bits,
    from_bf16,
    greater,
    lesser,
    magnitude,
    restored,
    to_bf16,
)
from lowbit.kernels.cpu.runs import ONE, SMALLEST, ZERO
from lowbit.kernels.layout import planes_nbytes

LANES = 32  # elements in registers at a time
PLANES = (1, 2, 4, 8)  # bits of a plane
LOCALITY = 2  # prefetch to the second cache: the first one is full
WORDS = ir.VectorType(I64, LANES // 8)
BYTES = ir.VectorType(I8, LANES)


@operation(intp, intp, intp)
def word(b: Any, address: Any, index: Any) -> Any:
    """Read an address from a list of addresses."""
    return b.load(pointer(b, address, index, I64), align=1)


@operation(int64, intp, intp, intp, intp, intp, boolean)
def scale_line(b: Any, x: Any, offset: Any, inverse: Any, count: Any, to: Any, halves: Any) -> Any:
    """Write (x - offset) inverse of `count` numbers, a multiple of `LANES`; return the largest magnitude.

    Numbers are float32, or bfloat16 if they are `halves`.
    """
    most = cgutils.alloca_once_value(b, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))

    def build(kind: ir.Type) -> None:
        with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
            first = b.mul(loop.index, I64(LANES))
            numbers = load(b, x, first, kind, LANES)
            if kind == I16:
                bits = b.zext(numbers, shaped(I32, numbers))
                numbers = formulas.bits_float(b, b.shl(bits, constant(I32, 16, bits)))
            v = b.fmul(b.fsub(numbers, load(b, offset, first, F32, LANES)), load(b, inverse, first, F32, LANES))
            store(b, v, b.add(to, b.mul(first, I64(4))))
            bits = formulas.float_bits(b, formulas.magnitude(b, v))
            b.store(formulas.greater32(b, bits, b.load(most)), most)

    with b.if_else(halves) as (bfloat16, single):
        with bfloat16:
            build(I16)
        with single:
            build(F32)
    name = f"llvm.vector.reduce.smax.v{LANES}i32"
    kind = ir.FunctionType(I32, [ir.VectorType(I32, LANES)])
    return b.zext(b.call(cgutils.get_or_insert_function(b.module, kind, name), [b.load(most)]), I64)


@operation(none, intp, float32, float32, float32, intp, intp, intp, intp)
def code_line(
    b: Any, line: Any, factor: Any, center: Any, top: Any, count: Any, to: Any, ahead: Any, size: Any
) -> None:
    """Write the codes of `count` numbers of a line, a multiple of `LANES`, as bytes.

    Meanwhile prefetch the next row, `count` elements of `size` bytes from address `ahead` on.
    """
    factor, center, top = (spread(b, v, LANES) for v in (factor, center, top))
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
        first = b.mul(loop.index, I64(LANES))
        b.call(prefetch, [pointer(b, ahead, b.mul(first, size), I8), I32(0), I32(LOCALITY), I32(1)])
        v = b.fadd(b.fmul(load(b, line, first, F32, LANES), factor), center)
        store(b, formulas.code(b, v, top), b.add(to, first))


@operation(none, intp, intp, intp)
def move(b: Any, source: Any, to: Any, count: Any) -> None:
    """Copy `count` bytes and up to `LANES` - 1 more."""
    with cgutils.for_range(b, b.udiv(b.add(count, I64(LANES - 1)), I64(LANES))) as loop:
        first = b.mul(loop.index, I64(LANES))
        store(b, load(b, source, first, I8, LANES), b.add(to, first))


@operation(none, intp, float32, float32, intp, intp, intp, intp, boolean, boolean)
def numbers(
    b: Any, codes: Any, center: Any, gain: Any, scale: Any, offset: Any, count: Any, line: Any, first: Any, last: Any
) -> None:
    """Decode `count` codes, a multiple of `LANES`, to a line, or add them to it.

    The last summand also adds the offsets.
    """
    center, gain = spread(b, b.fneg(center), LANES), spread(b, gain, LANES)

    def build(adds: bool, ends: bool) -> None:
        with cgutils.for_range(b, b.udiv(count, I64(LANES))) as loop:
            at = b.mul(loop.index, I64(LANES))
            value = formulas.restored(b, load(b, codes, at, I8, LANES), center, gain)
            value = b.fmul(value, load(b, scale, at, F32, LANES))
            if adds:
                value = b.fadd(load(b, line, at, F32, LANES), value)
            if ends:
                value = b.fadd(value, load(b, offset, at, F32, LANES))
            store(b, value, b.add(line, b.mul(at, I64(4))))

    with b.if_else(first) as (write, add):
        for branch, adds in ((write, False), (add, True)):
            with branch, b.if_else(last) as (end, go_on):
                for inner, ends in ((end, True), (go_on, False)):
                    with inner:
                        build(adds, ends)


@contextlib.contextmanager
def _vectors(b: Any, width: Any) -> Iterator[Any]:
    """Emit a loop over vectors that cover `width` bytes, at least `LANES`; yields the start of each."""
    with cgutils.for_range(b, b.udiv(b.add(width, I64(LANES - 1)), I64(LANES))) as loop:
        first, most = b.mul(loop.index, I64(LANES)), b.sub(width, I64(LANES))
        yield b.select(b.icmp_signed("<", first, most), first, most)


def _fields(p: int) -> ir.Constant:
    """Mask of the low p bits of every byte."""
    return ir.Constant(WORDS, [((1 << p) - 1) * 0x0101010101010101] * (LANES // 8))


@operation(none, intp, intp, intp, intp, intp)
def _pack_plane(b: Any, codes: Any, p: Any, width: Any, done: Any, to: Any) -> None:
    """Write a plane of p bits that is `width` bytes long, from codes with `done` bits below it."""
    below = spread(b, done, LANES // 8)
    for bits in PLANES:
        with b.if_then(b.icmp_signed("==", p, I64(bits))), _vectors(b, width) as first:
            plane = None
            for s in range(8 // bits):
                at = b.add(first, b.mul(width, I64(s)))
                part = b.bitcast(load(b, codes, at, I8, LANES), WORDS)
                part = b.shl(b.and_(b.lshr(part, below), _fields(bits)), constant(I64, bits * s, part))
                plane = part if plane is None else b.or_(plane, part)
            store(b, b.bitcast(plane, BYTES), b.add(to, first))


@operation(none, intp, intp, intp, intp, intp)
def _unpack_plane(b: Any, plane: Any, p: Any, width: Any, done: Any, codes: Any) -> None:
    """Inverse of `_pack_plane`: write codes, or add the plane's bits to codes that have lower bits."""
    below = spread(b, done, LANES // 8)

    def build(bits: int, adds: bool) -> None:
        with _vectors(b, width) as first:
            fields = b.bitcast(load(b, plane, first, I8, LANES), WORDS)
            for s in range(8 // bits):
                at = b.add(first, b.mul(width, I64(s)))
                part = b.and_(b.lshr(fields, constant(I64, bits * s, fields)), _fields(bits))
                if adds:
                    before = b.bitcast(load(b, codes, at, I8, LANES), WORDS)
                    part = b.or_(b.shl(part, below), before)
                store(b, b.bitcast(part, BYTES), b.add(codes, at))

    above = b.icmp_signed(">", done, I64(0))
    for bits in PLANES:
        with b.if_then(b.icmp_signed("==", p, I64(bits))), b.if_else(above) as (add, write):
            with add:
                build(bits, True)
            with write:
                build(bits, False)


@helper
def pack(codes, count, bits, to) -> None:
    """Write the planes of a row's codes; there must be room for 7 more."""
    for j in range(count, count + 7):
        put_byte(codes, j, 0)
    done, p = 0, 8
    while p:
        if bits & p:
            width = (count * p + 7) >> 3
            if width < LANES:
                for j in range(width):
                    value = 0
                    for s in range(8 // p):
                        value |= ((get_byte(codes, j + s * width) >> done) & ((1 << p) - 1)) << (p * s)
                    put_byte(to, j, value)
            else:
                _pack_plane(codes, p, width, done, to)
            done, to = done + p, to + width
        p >>= 1


@helper
def unpack(planes, count, bits, codes) -> None:
    """Inverse of `pack`: a byte for each of a row's codes, and up to 7 more."""
    done, p = 0, 8
    while p:
        if bits & p:
            width = (count * p + 7) >> 3
            if width < LANES:
                for j in range(width):
                    value = np.int64(get_byte(planes, j))
                    for s in range(8 // p):
                        field, at = (value >> (p * s)) & ((1 << p) - 1), j + s * width
                        put_byte(codes, at, field if done == 0 else (field << done) | get_byte(codes, at))
            else:
                _unpack_plane(planes, p, width, done, codes)
            done, planes = done + p, planes + width
        p >>= 1


MOST = np.float32(LARGEST_BF16)
INFINITE, NAN = np.float32(np.inf), np.float32(np.nan)
INFINITE_BITS = 0x7F800000


def encode(
    x: Tensor, payload: Tensor, inverse: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    share: float, by_token: bool,
) -> None:  # fmt: skip
    """Encode; the bytes equal those of `reference.encode`."""
    rows, features = x.shape
    layout = feature_int_layout(rows, features, outliers, bits, by_token)
    at = sections(payload, layout)
    zero_gaps(payload, layout)
    per_row = planes_nbytes(features - outliers, bits)

    def work(start: int, stop: int) -> None:
        scratch = _scratch(features)
        _encode(
            x.data_ptr(), KINDS[x.dtype], features, inverse.data_ptr(), offset.data_ptr(), order.data_ptr(), outliers,
            bits, per_row, np.float32(center_of(bits, by_token)), np.float32(share), by_token,
            at["gains"], at["features"], at["codes"], scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, rows, x.nbytes)


def decode(
    payloads: Sequence[Tensor], out: Tensor, scales: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    gain: float, divisor: int, accumulate: bool,
) -> None:  # fmt: skip
    """The reference's numbers."""
    rows, features = out.shape
    layout = feature_int_layout(rows, features, outliers, bits, not gain)
    starts = np.array([payload.data_ptr() for payload in payloads])
    per_row = planes_nbytes(features - outliers, bits)

    def work(start: int, stop: int) -> None:
        scratch = _scratch(features)
        _decode(
            starts.ctypes.data, len(payloads), *(layout.offsets[name] for name in ("gains", "features", "codes")),
            scales.data_ptr(), offset.data_ptr(), order.data_ptr(), outliers,
            bits, per_row, np.float32(center_of(bits, not gain)), np.float32(gain), out.data_ptr(), KINDS[out.dtype],
            features, divisor, accumulate, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, rows, out.nbytes * len(payloads))


def _scratch(features: int) -> Tensor:
    """Allocate a line of float32 numbers, and two rows of codes, each with room for another vector."""
    return torch.empty(4 * features + 2 * (features + 2 * LANES), dtype=torch.uint8)


@helper
def _bf16_of(x, kind, j):
    """Bits of a number as bfloat16: saturated, and with a single NaN."""
    if kind == BFLOAT16:
        bits = get_half(x, j)
        return bits if (bits & 0x7FFF) <= 0x7F80 else NAN_BF16
    value = get_float(x, j)
    if value < INFINITE and value > -INFINITE:
        value = lesser(greater(value, -MOST), MOST)
    return to_bf16(value)


@kernel
def _encode(
    source, kind, features, inverse, offset, order, outliers, bits, per_row, center, share, by_token,
    to_gains, to_features, to_codes, scratch, start, stop,
) -> None:  # fmt: skip
    line, codes = scratch, scratch + 4 * features
    kept = codes + features + 2 * LANES
    chosen, rest = order + 4 * (features - outliers), features - outliers
    whole, top = features // LANES * LANES, center + center
    for n in range(start, stop):
        size = 2 if kind == BFLOAT16 else 4
        x = source + size * n * features
        if kind == FLOAT16:
            widen(source, kind, n * features, features, line)
            x = line
        for i in range(outliers):  # before scaled numbers overwrite float16 ones
            put_half(to_features, n * outliers + i, _bf16_of(x, kind, np.int64(get_int(chosen, i))))
        most = scale_line(x, offset, inverse, whole, line, kind == BFLOAT16)
        for j in range(whole, features):
            value = from_bf16(get_half(x, j)) if kind == BFLOAT16 else get_float(x, j)
            value = (value - get_float(offset, j)) * get_float(inverse, j)
            put_float(line, j, value)
            most = max(most, np.int64(float_bits(magnitude(value))))
        if most >= INFINITE_BITS:  # possibly of an outlier, which does not count
            begin, most = 0, np.int64(0)
            for i in range(outliers + 1):
                end = np.int64(get_int(chosen, i)) if i < outliers else features
                for j in range(begin, end):
                    most = max(most, np.int64(float_bits(magnitude(get_float(line, j)))))
                begin = end + 1
        finite, factor = most < INFINITE_BITS, ONE / share
        if by_token:
            largest = bits_float(most)
            gain = to_bf16(greater(largest * share, SMALLEST)) if largest > ZERO else np.uint16(0)
            put_half(to_gains, n, gain if finite else NAN_BF16)
            factor = ONE / from_bf16(gain) if finite and gain > 0 else ONE
        code_line(line, factor, center, top, whole, codes, x + size * features, size)
        for j in range(whole, features):
            put_byte(codes, j, code(get_float(line, j) * factor + center, top))
        if not by_token and not finite:
            for j in range(features):
                put_byte(codes, j, (1 << bits) - 1)
        begin = 0
        for i in range(outliers + 1):
            end = np.int64(get_int(chosen, i)) if i < outliers else features
            move(codes + begin, kept + begin - i, end - begin)
            begin = end + 1
        pack(kept, rest, bits, to_codes + n * per_row)


@kernel
def _decode(
    payloads, ranks, at_gains, at_features, at_codes, scales, offset, order, outliers, bits, per_row, center, static,
    target, kind, features, divisor, accumulate, scratch, start, stop,
) -> None:  # fmt: skip
    spare, codes = scratch, scratch + 4 * features
    kept = codes + features + 2 * LANES
    chosen, rest = order + 4 * (features - outliers), features - outliers
    whole, parts = features // LANES * LANES, np.float32(divisor)
    for n in range(start, stop):
        line = spare
        if kind == FLOAT32 and not accumulate:
            line = target + 4 * n * features
        for r in range(ranks):
            payload, scale, last = word(payloads, r), scales + 4 * r * features, r == ranks - 1
            unpack(payload + at_codes + n * per_row, rest, bits, kept)
            begin = 0
            for i in range(outliers + 1):
                end = np.int64(get_int(chosen, i)) if i < outliers else features
                move(kept + begin - i, codes + begin, end - begin)
                begin = end + 1
            if static == ZERO:
                gain = from_bf16(get_half(payload + at_gains, n))
            else:
                gain = static if get_byte(kept, 0) < (1 << bits) - 1 else NAN
            numbers(codes, center, gain, scale, offset, whole, line, r == 0, last)
            for j in range(whole, features):
                value = restored(get_byte(codes, j), -center, gain) * get_float(scale, j)
                value = value if r == 0 else get_float(line, j) + value
                put_float(line, j, value + get_float(offset, j) if last else value)
        for i in range(outliers):
            at = n * outliers + i
            value = from_bf16(get_half(word(payloads, 0) + at_features, at))
            for r in range(1, ranks):
                value += from_bf16(get_half(word(payloads, r) + at_features, at))
            put_float(line, np.int64(get_int(chosen, i)), value)
        if divisor > 1:
            for j in range(features):
                put_float(line, j, get_float(line, j) / parts)
        if line == spare:
            narrow(line, target, kind, n * features, features, accumulate)
