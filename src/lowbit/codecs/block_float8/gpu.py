"""`BlockFloat8` on a GPU: one launch each."""

# pyright: reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.block_float8.reference import FORMATS, NAN_SCALE, QUARTER_BELOW, block_float8_layout
from lowbit.kernels.gpu.launch import launch, power_of_two_from, starts, warps_for
from lowbit.kernels.gpu.numbers import (
    INTEGER,
    INTEGER_BITS,
    bits_of,
    narrowed,
    number_of,
    of_bits,
    section,
    uniform,
    widened,
    zero_gap,
)
from lowbit.kernels.layout import ceil_div

NAN_SCALE_, QUARTER_BELOW_ = tl.constexpr(NAN_SCALE), tl.constexpr(QUARTER_BELOW)
AT_ONCE = 8192  # elements that a program holds in registers


def encode(x: Tensor, payload: Tensor, format: str, block: int, seed: int | None, accumulate: bool) -> None:
    """Encode; the bytes equal those of `reference.encode`."""
    launch(
        _encode, *_shape(x.numel(), format, block), x, payload, x.numel(), seed or 0,
        *starts(block_float8_layout(x.numel(), block), "scales"), TOP=FORMATS[format].top,
        STOCHASTIC=seed is not None, ACCUMULATE=accumulate,
    )  # fmt: skip


def decode(payload: Tensor, out: Tensor, format: str, block: int, accumulate: bool) -> None:
    """The reference's numbers."""
    launch(
        _decode, *_shape(out.numel(), format, block), payload, out, out.numel(),
        *starts(block_float8_layout(out.numel(), block), "scales"), ACCUMULATE=accumulate,
    )  # fmt: skip


def _shape(numel: int, format: str, block: int) -> tuple[int, int, dict[str, int]]:
    """Programs, warps, and the shape of a program's tensors."""
    form, width = FORMATS[format], power_of_two_from(block)
    groups = max(1, AT_ONCE // width)
    shape = {"BLOCK": block, "GROUPS": groups, "WIDTH": width, "BITS": form.bits, "LOWEST": form.lowest}
    return ceil_div(ceil_div(numel, block), groups), warps_for(groups * width // 8), shape


@triton.jit
def _lanes(numel, BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's blocks, their elements' positions, and masks of those that exist."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    j = tl.arange(0, WIDTH)[None, :]
    at = (group * BLOCK)[:, None] + j
    return group, group * BLOCK < numel, at, (j < BLOCK) & (at < numel)


@triton.jit
def _decoded(payload, at, keep, scale, BITS: tl.constexpr, LOWEST: tl.constexpr):
    """Decode codes with their blocks' scales to float32."""
    code = tl.load(payload + at, mask=keep, other=0).to(tl.int32)
    magnitude = code & 0x7F
    exponent = tl.maximum(magnitude >> BITS, 1)
    r = number_of(magnitude - ((exponent - 1) << BITS))
    value = r * of_bits((exponent + (LOWEST - 1 - BITS)) << 23)
    value = of_bits(bits_of(value) | ((code & 0x80) << 24))
    return value * of_bits(scale << 23)[:, None]


@triton.jit(do_not_specialize=["numel", "seed", "scales_16"])
def _encode(
    x, payload, numel, seed, scales_16,
    TOP: tl.constexpr, STOCHASTIC: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    group, exists, at, keep = _lanes(numel, BLOCK, GROUPS, WIDTH)
    scales = section(payload, scales_16)
    y = widened(tl.load(x + at, mask=keep, other=0.0))
    if ACCUMULATE:
        before = tl.load(scales + group, mask=exists, other=0).to(tl.int32)
        y = tl.where(keep, _decoded(payload, at, keep, before, BITS, LOWEST) + y, 0.0)
    largest = tl.max(bits_of(y) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    scale = ((largest + QUARTER_BELOW_) >> 23) - TOP
    scale = tl.minimum(tl.maximum(scale, 1), 254 - TOP)
    v = tl.minimum(tl.abs(y) * of_bits((254 - scale) << 23)[:, None], 1.75 * 2.0**TOP)
    exponent = tl.maximum(bits_of(v) >> 23, LOWEST)
    r = v * of_bits((254 + BITS - exponent) << 23)
    if STOCHASTIC:
        integer = (r + uniform(at, seed)).to(tl.int32)
    else:
        integer = bits_of(r + INTEGER) - INTEGER_BITS
    code = ((exponent - LOWEST) << BITS) + integer
    code = tl.where(finite[:, None], code | ((bits_of(y) >> 24) & 0x80), 0)
    tl.store(payload + at, code.to(tl.uint8), mask=keep)
    tl.store(scales + group, tl.where(finite, scale, NAN_SCALE_).to(tl.uint8), mask=exists)
    if tl.program_id(0) == 0:
        zero_gap(payload, numel, scales_16)


@triton.jit(do_not_specialize=["numel", "scales_16"])
def _decode(
    payload, out, numel, scales_16, ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    group, exists, at, keep = _lanes(numel, BLOCK, GROUPS, WIDTH)
    scale = tl.load(section(payload, scales_16) + group, mask=exists, other=0).to(tl.int32)
    y = _decoded(payload, at, keep, scale, BITS, LOWEST)
    if ACCUMULATE:
        y = widened(tl.load(out + at, mask=keep, other=0.0)) + y
    tl.store(out + at, narrowed(y, out.dtype.element_ty), mask=keep)
