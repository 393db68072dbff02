"""`BlockFloat8` on the CPU: one pass, block by block."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.block_float8.reference import (
    EXPONENT,
    FORMATS,
    NAN_SCALE,
    QUARTER_BELOW,
    block_float8_layout,
)
from lowbit.kernels.cpu.jit import helper, kernel, over_rows
from lowbit.kernels.cpu.lines import FLOAT32, KINDS, add, largest_bits, narrow, sections, widen, zero_gaps
from lowbit.kernels.cpu.memory import get_byte, get_float, put_byte, put_float
from lowbit.kernels.cpu.operations import (
    INTEGER_BITS,
    TO_INTEGER,
    bits_float,
    float_bits,
    greater32,
    lesser,
    magnitude,
    uniform,
)
from lowbit.kernels.layout import ceil_div

INFINITY = 0x7F800000
E4M3_BITS, E4M3_LOWEST = FORMATS["e4m3"].bits, FORMATS["e4m3"].lowest
E5M2_BITS, E5M2_LOWEST = FORMATS["e5m2"].bits, FORMATS["e5m2"].lowest


def encode(x: Tensor, payload: Tensor, format: str, block: int, seed: int | None, accumulate: bool) -> None:
    """Encode; the bytes equal those of `reference.encode`."""
    layout, form = block_float8_layout(x.numel(), block), FORMATS[format]
    at = sections(payload, layout)
    zero_gaps(payload, layout)

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(4 * block, dtype=torch.uint8)
        _encode(
            x.data_ptr(), KINDS[x.dtype], x.numel(), at["scales"], at["codes"], form.bits, form.top,
            form.lowest, block, seed is not None, (seed or 0) % 2**32, accumulate,
            scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(x.numel(), block), x.nbytes)


def decode(payload: Tensor, out: Tensor, format: str, block: int, accumulate: bool) -> None:
    """The reference's numbers."""
    at, form = sections(payload, block_float8_layout(out.numel(), block)), FORMATS[format]

    def work(start: int, stop: int) -> None:
        scratch = torch.empty(4 * block, dtype=torch.uint8)
        _decode(
            at["scales"], at["codes"], out.data_ptr(), KINDS[out.dtype], out.numel(), form.bits,
            form.lowest, block, accumulate, scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, ceil_div(out.numel(), block), out.nbytes)


@kernel
def _encode(
    source, kind, total, scales, codes, bits, top, lowest, block, stochastic, seed, accumulate,
    line, start, stop,
) -> None:  # fmt: skip
    limit = bits_float(top + 127 << EXPONENT) * np.float32(1.75)
    for g in range(start, stop):
        begin = g * block
        count, to, x = min(block, total - begin), codes + begin, source + 4 * begin
        if accumulate:
            _decode_block(to, get_byte(scales, g), count, bits, lowest, line)
            add(source, kind, begin, count, line)
            x = line
        elif kind != FLOAT32:
            widen(source, kind, begin, count, line)
            x = line
        largest = largest_bits(x, count)
        scale = min(max(((largest + QUARTER_BELOW) >> EXPONENT) - top, 1), 254 - top)
        if largest >= INFINITY:
            put_byte(scales, g, NAN_SCALE)
            for j in range(count):
                put_byte(to, j, 0)
            continue
        put_byte(scales, g, scale)
        inverse = bits_float((254 - scale) << EXPONENT)
        if stochastic:
            for j in range(count):
                put_byte(to, j, _code(get_float(x, j), inverse, limit, bits, lowest, uniform(begin + j, seed), True))
        else:
            for j in range(count):
                put_byte(to, j, _code(get_float(x, j), inverse, limit, bits, lowest, TO_INTEGER, False))


@helper
def _code(x, inverse, limit, bits, lowest, addend, stochastic) -> Any:
    """The code of a number; the addend is a random number below 1, or rounds to nearest."""
    v = lesser(magnitude(x) * inverse, limit)
    exponent = greater32(float_bits(v) >> EXPONENT, lowest)
    r = v * bits_float((254 + bits - exponent) << EXPONENT) + addend
    integer = np.int32(r) if stochastic else np.int32(float_bits(r) - INTEGER_BITS)
    code = np.int32((exponent - lowest) << (bits & 7)) + integer
    return np.int32(code) | (np.int32(float_bits(x) >> 24) & 0x80)


@kernel
def _decode(scales, codes, target, kind, total, bits, lowest, block, accumulate, line, start, stop) -> None:
    for g in range(start, stop):
        begin = g * block
        count, direct = min(block, total - begin), kind == FLOAT32 and not accumulate
        to = target + 4 * begin if direct else line
        _decode_block(codes + begin, get_byte(scales, g), count, bits, lowest, to)
        if not direct:
            narrow(line, target, kind, begin, count, accumulate)


@helper
def _decode_block(codes, scale, count, bits, lowest, to) -> None:
    """Decode a block to float32 numbers."""
    if bits == E4M3_BITS:  # with constants, shifts take fewer steps
        _put_numbers(codes, scale, count, E4M3_BITS, E4M3_LOWEST, to)
    else:
        _put_numbers(codes, scale, count, E5M2_BITS, E5M2_LOWEST, to)


@helper
def _put_numbers(codes, scale, count, bits, lowest, to) -> None:
    step = bits_float(np.int32(scale) << EXPONENT)
    for j in range(count):
        code = np.int32(get_byte(codes, j))
        least = np.int32(code & 0x7F)
        binade = greater32(least >> (bits & 7), 1)
        r = np.float32(np.int32(least - np.int32((binade - 1) << (bits & 7))))
        value = r * bits_float((binade + (lowest - 1 - bits)) << EXPONENT)
        sign = np.int32(code & 0x80) << 24
        put_float(to, j, bits_float(float_bits(value) | sign) * step)
