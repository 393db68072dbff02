"""`GroupInt` on a GPU: one launch each, a lane for each group."""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.group_int.reference import NAN_SCALE, group_int_layout
from lowbit.kernels.exact import LARGEST, SMALLEST
from lowbit.kernels.gpu import eighths
from lowbit.kernels.gpu.launch import ends, launch, power_of_two_from, starts, warps_for
from lowbit.kernels.gpu.numbers import (
    bits_of,
    code_below,
    inverse_of,
    number_of,
    of_bits,
    round_bf16,
    round_signed,
    section,
    uniform,
    zero_gap,
)
from lowbit.kernels.layout import ceil_div

LARGEST_, SMALLEST_, NAN_SCALE_ = (tl.constexpr(v) for v in (LARGEST, SMALLEST, NAN_SCALE))
AT_ONCE = 16384  # elements that a program holds in registers


def encode(x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool, seed: int | None) -> None:
    """Encode; the bytes equal those of `reference.encode`."""
    layout = group_int_layout(x.numel(), bits, group, symmetric)
    launch(
        _encode, *shape_of(x.numel(), group), x, payload, x.numel(), seed or 0,
        *starts(layout, "mids", "codes"), *ends(layout, "scales", "mids"),
        BITS=bits, GROUP=group, SYMMETRIC=symmetric, STOCHASTIC=seed is not None,
    )  # fmt: skip


def decode(payload: Tensor, out: Tensor, bits: int, group: int, symmetric: bool, accumulate: bool) -> None:
    """The reference's numbers."""
    layout = group_int_layout(out.numel(), bits, group, symmetric)
    launch(
        _decode, *shape_of(out.numel(), group), payload, out, out.numel(), *starts(layout, "mids", "codes"),
        BITS=bits, GROUP=group, SYMMETRIC=symmetric, ACCUMULATE=accumulate,
    )  # fmt: skip


def shape_of(numel: int, group: int, at_once: int = AT_ONCE) -> tuple[int, int, dict[str, int | bool]]:
    """Programs, warps, and the shape of a program's tensors."""
    width = power_of_two_from(group // 8)
    groups = max(1, at_once // (8 * width))
    shape = {"GROUPS": groups, "WIDTH": width, "RAGGED": numel % group > 0}
    return ceil_div(ceil_div(numel, group), groups), warps_for(groups * width), shape


@triton.jit
def lanes(numel, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """A program's groups (GROUPS,) and, with a second dimension for an eighth, existing lanes, elements, eighths."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    begin = group * GROUP
    count = tl.minimum(numel - begin, GROUP)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    v = tl.full((1, 1), GROUP // 8, tl.int64)
    if RAGGED:
        v = (count + 7) // 8
    return group, begin[:, None] + j, count, j, v, (count > 0) & (j < v)


@triton.jit
def encode_parts(
    parts, payload, group, exists, at, count, j, v, keep, seed, mids_16, codes_16,
    BITS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Write the scales, middles and codes of groups whose elements are eight float32 tensors (groups, eighth).

    Args:
        group: indices of the groups; `there`: mask of those that exist; the rest as from `lanes`.
    """
    low, high, finite = eighths.extremes(parts, v, keep, count, j, RAGGED)
    low, high = tl.maximum(low, -LARGEST_), tl.minimum(high, LARGEST_)
    if SYMMETRIC:
        center: tl.constexpr = 2.0 ** (BITS - 1) - 1
        top: tl.constexpr = 2 * center
        mid = tl.zeros_like(low)
        extent = tl.maximum(high, -low)
    else:
        center: tl.constexpr = (2.0**BITS - 1) / 2
        top: tl.constexpr = 2.0**BITS - 1
        mid = high * 0.5 + low * 0.5
        extent = tl.maximum(high * 0.5 - low * 0.5, tl.abs(mid) * (center / (127 * 2.0**BITS)))
    scale = round_bf16(tl.maximum(extent * (1 / center), SMALLEST_))
    scale = tl.where(extent > 0, scale, 0.0)
    inverse = inverse_of(scale)
    m = round_signed(mid * inverse * (256 * 2.0**-BITS))
    m = tl.minimum(tl.maximum(m, -32767.0), 32767.0)
    shift = center - m * (2.0**BITS / 256)
    limit = tl.where(finite, top, 0.0)

    scales = payload.to(tl.pointer_type(tl.int16))
    tl.store(scales + group, tl.where(finite, bits_of(scale) >> 16, NAN_SCALE_).to(tl.int16), mask=exists)
    if not SYMMETRIC:
        mids = section(payload, mids_16).to(tl.pointer_type(tl.int16))
        tl.store(mids + group, tl.where(finite, m, 0.0).to(tl.int16), mask=exists)
    if STOCHASTIC:
        codes = ()
        for k in tl.static_range(8):
            random = uniform(at + k * v, seed)
            code = code_below(parts[k], inverse[:, None], shift[:, None], limit[:, None], random)
            if RAGGED:
                code = tl.where(k * v + j < count, code, 0)
            codes = codes + (code,)
    else:
        codes = eighths.codes_of(parts, inverse[:, None], shift[:, None], limit[:, None], v, count, j, RAGGED)
    to = section(payload, codes_16) + (group * BITS * (GROUP // 8))[:, None] + j
    eighths.store_codes(to, codes, v, tl.full((1, 1), BITS, tl.int32), keep, BITS)


@triton.jit
def decode_parts(
    payload, group, exists, j, v, keep, mids_16, codes_16,
    BITS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Inverse of `encode_parts`: eight float32 tensors."""
    scales = payload.to(tl.pointer_type(tl.int16))
    scale = of_bits(tl.load(scales + group, mask=exists, other=0).to(tl.int32) << 16)
    if SYMMETRIC:
        offset = tl.full(group.shape, -(2.0 ** (BITS - 1) - 1), tl.float32)
    else:
        mids = section(payload, mids_16).to(tl.pointer_type(tl.int16))
        m = tl.load(mids + group, mask=exists, other=0).to(tl.float32)
        offset = m * (2.0**BITS / 256) - (2.0**BITS - 1) / 2
    start = section(payload, codes_16) + (group * BITS * (GROUP // 8))[:, None] + j
    codes = eighths.load_codes(start, v, tl.full((1, 1), BITS, tl.int32), keep, BITS)
    return [(number_of(code) + offset[:, None]) * scale[:, None] for code in codes]


@triton.jit
def zero_gaps(payload, mids_16, codes_16, scales_end, mids_end):
    """Clear the bytes between sections, in the first program."""
    if tl.program_id(0) == 0:
        zero_gap(payload, scales_end, mids_16)
        zero_gap(payload, mids_end, codes_16)


@triton.jit(do_not_specialize=["numel", "seed", "mids_16", "codes_16", "scales_end", "mids_end"])
def _encode(
    x, payload, numel, seed, mids_16, codes_16, scales_end, mids_end,
    BITS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    group, at, count, j, v, keep = lanes(numel, GROUP, GROUPS, WIDTH, RAGGED)
    exists = group * GROUP < numel
    parts = eighths.load(x, at, v, keep, count, j, RAGGED)
    encode_parts(
        parts, payload, group, exists, at, count, j, v, keep, seed, mids_16, codes_16,
        BITS, GROUP, SYMMETRIC, STOCHASTIC, RAGGED,
    )  # fmt: skip
    zero_gaps(payload, mids_16, codes_16, scales_end, mids_end)


@triton.jit(do_not_specialize=["numel", "mids_16", "codes_16"])
def _decode(
    payload, out, numel, mids_16, codes_16,
    BITS: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, ACCUMULATE: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    group, at, count, j, v, keep = lanes(numel, GROUP, GROUPS, WIDTH, RAGGED)
    exists = group * GROUP < numel
    y = decode_parts(payload, group, exists, j, v, keep, mids_16, codes_16, BITS, GROUP, SYMMETRIC)
    eighths.store_numbers(y, out, at, v, keep, count, j, RAGGED, ACCUMULATE)
