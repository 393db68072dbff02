"""Norms on a GPU: one launch for each operator.

A program holds whole rows in registers, cut into groups and eighths of groups, so that each element is read once.
Gradients of weight and bias are summed by programs that each process many rows, and their sums by PyTorch. If groups
span two rows, payloads are made and decoded in a separate launch.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.activations.norm import reference
from lowbit.codecs.group_int import gpu as group_int
from lowbit.codecs.group_int.gpu import decode_parts, encode_parts, zero_gaps
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.kernels.gpu import eighths
from lowbit.kernels.gpu.launch import ends, launch, power_of_two_from, starts, warn_once
from lowbit.kernels.gpu.numbers import widened
from lowbit.kernels.layout import ceil_div

PLAIN, ENCODE, DECODE = (tl.constexpr(i) for i in range(3))
WIDEST = 32768  # channels that the registers of a program hold
TOO_WIDE = f"norms over {{}} channels take the slow reference path: a GPU's program holds {WIDEST} of them"
LEAST = 2048  # elements of a program
PROGRAMS = 512  # that sum up gradients of parameters: a few for each multiprocessor
ANY_GROUP = 64  # by which rows are cut that do not consist of whole groups


def encode(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, payload: Tensor, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """The reference's payload; out = norm(x)."""
    if _is_wide(x):
        reference.encode.definition(x, weight, bias, payload, out, eps, centred, offset, bits, group, seed)
        return
    whole = _is_whole(x, group)
    if not whole:
        group_int.encode(x.view(-1), payload, bits, group, False, seed)
    layout = group_int_layout(x.numel(), bits, group, symmetric=False)
    _forward_of(
        ENCODE if whole else PLAIN, x, weight, bias, payload, out, (seed or 0) % 2**32,
        *starts(layout, "mids", "codes"), *ends(layout, "scales", "mids"), eps, offset,
        CENTRED=centred, BITS=bits, GROUP=group if whole else ANY_GROUP, STOCHASTIC=seed is not None,
    )  # fmt: skip


def recompute(
    payload: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """out = norm(x')."""
    if _is_wide(out):
        reference.recompute.definition(payload, weight, bias, out, eps, centred, offset, bits, group)
        return
    layout = group_int_layout(out.numel(), bits, group, symmetric=False)
    x, mode, group = _source(payload, out, bits, group)
    _forward_of(
        mode, x, weight, bias, payload, out, 0,
        *starts(layout, "mids", "codes"), *ends(layout, "scales", "mids"), eps, offset,
        CENTRED=centred, BITS=bits, GROUP=group, STOCHASTIC=False,
    )  # fmt: skip


def backward(
    payload: Tensor, weight: Tensor | None, grad_out: Tensor,
    grad_x: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of norm at x'."""
    if _is_wide(grad_x):
        tensors = payload, weight, grad_out, grad_x, grad_weight, grad_bias
        reference.backward.definition(*tensors, eps, centred, offset, bits, group)
        return
    layout = group_int_layout(grad_x.numel(), bits, group, symmetric=False)
    x, mode, group = _source(payload, grad_x, bits, group)
    rows, channels = grad_x.shape
    blocks, warps, shape = _shape(rows, channels, group)
    programs = min(blocks, PROGRAMS)
    wanted = grad_weight is not None, grad_bias is not None
    sums = [
        torch.empty(programs if want else 1, channels, dtype=torch.float32, device=grad_x.device) for want in wanted
    ]
    launch(
        _backward, programs, warps, shape, grad_out, x, payload, grad_out if weight is None else weight,
        grad_x, *sums, rows, channels, blocks, *starts(layout, "mids", "codes"), eps, offset,
        MODE=mode.value, WEIGHT=weight is not None, CENTRED=centred,
        BITS=bits, GROUP=group, OF_WEIGHT=wanted[0], OF_BIAS=wanted[1],
    )  # fmt: skip
    if grad_weight is not None:
        grad_weight.copy_(sums[0].sum(0))
    if grad_bias is not None:
        grad_bias.copy_(sums[1].sum(0))


def _forward_of(
    mode: tl.constexpr, x: Tensor, weight: Tensor | None, bias: Tensor | None, payload: Tensor,
    out: Tensor, *numbers: Any, GROUP: int, **settings: Any,
) -> None:  # fmt: skip
    rows, channels = out.shape
    given = out if weight is None else weight, out if bias is None else bias  # a missing one needs a valid pointer
    launch(
        _forward, *_shape(rows, channels, GROUP), x, *given, payload, out, rows, channels,
        *numbers, MODE=mode.value, WEIGHT=weight is not None, BIAS=bias is not None, GROUP=GROUP,
        **settings,
    )  # fmt: skip


def _source(payload: Tensor, like: Tensor, bits: int, group: int) -> tuple[Tensor, tl.constexpr, int]:
    """The tensor from which rows are read, the mode of reading, and the group by which they are cut."""
    if _is_whole(like, group):
        return like, DECODE, group
    x = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    group_int.decode(payload, x.view(-1), bits, group, False, False)
    return x, PLAIN, ANY_GROUP


def _is_whole(x: Tensor, group: int) -> bool:
    """Whether a row consists of whole groups, and fits into registers when cut in this way."""
    channels = x.shape[1]
    lanes = power_of_two_from(ceil_div(channels, group)) * power_of_two_from(group // 8)
    return channels % group == 0 and 8 * lanes <= WIDEST


def _is_wide(x: Tensor) -> bool:
    channels = x.shape[1]
    if channels > WIDEST:
        warn_once(TOO_WIDE.format(channels))
    return channels > WIDEST


def _shape(rows: int, channels: int, group: int) -> tuple[int, int, dict[str, int | bool]]:
    """Number of blocks of rows, number of warps, and the shape of a program's tensors."""
    width, groups = power_of_two_from(group // 8), power_of_two_from(ceil_div(channels, group))
    at_once = max(1, LEAST // (8 * width * groups))
    shape = {"ROWS": at_once, "GROUPS": groups, "WIDTH": width, "RAGGED": channels % group > 0}
    return ceil_div(rows, at_once), min(32, max(1, at_once * groups * width // 128)), shape


@triton.jit
def _lanes(
    block, rows, channels, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Indices for a block of rows: groups, which exist; columns, elements, lanes that exist, elements of groups."""
    slot = tl.arange(0, ROWS * GROUPS)
    row, part = (slot // GROUPS).to(tl.int64) + block * ROWS, slot % GROUPS
    exists = (row < rows) & (part * GROUP < channels)
    j = tl.arange(0, WIDTH)[None, :]
    column = (part * GROUP)[:, None] + j
    count = tl.minimum(channels - part * GROUP, GROUP)[:, None]
    keep = exists[:, None] & (j < GROUP // 8) & (j < count)
    return (row * (channels // GROUP) + part, exists, column, (row * channels)[:, None] + column, keep, count, j)


@triton.jit
def _over_row(values, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Sums over rows of (groups, lanes), for each group (groups, 1)."""
    sums = tl.sum(tl.reshape(tl.sum(values, axis=1), (ROWS, GROUPS)), axis=1)
    spread = tl.broadcast_to(sums[:, None], (ROWS, GROUPS))
    return tl.reshape(spread, (ROWS * GROUPS,))[:, None]


@triton.jit
def _normal(
    parts, channels, eps, keep, count, j, CENTRED: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Normalized rows, 0 outside of them, and the reciprocals of what they were divided by."""
    size = channels.to(tl.float32)
    if CENTRED:
        total = tl.zeros(keep.shape, tl.float32)
        for k in tl.static_range(8):
            total += parts[k]
        mean = _over_row(total, ROWS, GROUPS) / size
        centred = ()
        for k in tl.static_range(8):
            exists = eighths.present(k, GROUP // 8, keep, count, j, RAGGED)
            centred = centred + (tl.where(exists, parts[k] - mean, 0.0),)
    else:
        centred = parts
    squares = tl.zeros(keep.shape, tl.float32)
    for k in tl.static_range(8):
        squares = tl.fma(centred[k], centred[k], squares)
    inverse = tl.rsqrt(_over_row(squares, ROWS, GROUPS) / size + eps)
    return [part * inverse for part in centred], inverse


@triton.jit
def _decoded(payload, group, exists, j, keep, mids_16, codes_16, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Decode groups to eight float32 tensors, 0 outside of the rows."""
    parts = decode_parts(payload, group, exists, j, GROUP // 8, keep, mids_16, codes_16, BITS, GROUP, False)
    return [tl.where(keep, part, 0.0) for part in parts]


@triton.jit
def _affine(
    normal, weight, bias, offset, column, keep, count, j, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    out = ()
    for k in tl.static_range(8):
        y, to = normal[k], column + k * (GROUP // 8)
        exists = eighths.present(k, GROUP // 8, keep, count, j, RAGGED)
        if WEIGHT:
            y = y * (widened(tl.load(weight + to, mask=exists, other=0.0)) + offset)
        if BIAS:
            y = y + widened(tl.load(bias + to, mask=exists, other=0.0))
        out = out + (y,)
    return out


@triton.jit(do_not_specialize=[
    "rows", "channels", "seed", "mids_16", "codes_16", "scales_end", "mids_end", "eps", "offset",
])  # fmt: skip
def _forward(
    x, weight, bias, payload, out, rows, channels,
    seed, mids_16, codes_16, scales_end, mids_end, eps, offset,
    MODE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CENTRED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    group, exists, column, at, keep, count, j = _lanes(tl.program_id(0), rows, channels, GROUP, ROWS, GROUPS, WIDTH)
    if MODE == DECODE:
        parts = _decoded(payload, group, exists, j, keep, mids_16, codes_16, BITS, GROUP)
    else:
        parts = eighths.load(x, at, GROUP // 8, keep, count, j, RAGGED)
    if MODE == ENCODE:
        encode_parts(
            parts, payload, group, exists, at, count, j, GROUP // 8, keep, seed, mids_16, codes_16,
            BITS, GROUP, False, STOCHASTIC, False,
        )  # fmt: skip
        zero_gaps(payload, mids_16, codes_16, scales_end, mids_end)
    normal, _ = _normal(parts, channels, eps, keep, count, j, CENTRED, GROUP, ROWS, GROUPS, RAGGED)
    y = _affine(normal, weight, bias, offset, column, keep, count, j, WEIGHT, BIAS, GROUP, RAGGED)
    eighths.store(y, out, at, GROUP // 8, keep, count, j, RAGGED)


@triton.jit(do_not_specialize=[
    "rows", "channels", "blocks", "mids_16", "codes_16", "eps", "offset",
])  # fmt: skip
def _backward(
    grad_out, x, payload, weight, grad_x, weight_sums, bias_sums,
    rows, channels, blocks, mids_16, codes_16, eps, offset,
    MODE: tl.constexpr, WEIGHT: tl.constexpr, CENTRED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OF_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    size = channels.to(tl.float32)
    zeros = tl.zeros((ROWS * GROUPS, WIDTH), tl.float32)
    of_weight = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    of_bias = of_weight
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        group, exists, column, at, keep, count, j = _lanes(block, rows, channels, GROUP, ROWS, GROUPS, WIDTH)
        if MODE == DECODE:
            parts = _decoded(payload, group, exists, j, keep, mids_16, codes_16, BITS, GROUP)
        else:
            parts = eighths.load(x, at, GROUP // 8, keep, count, j, RAGGED)
        normal, inverse = _normal(parts, channels, eps, keep, count, j, CENTRED, GROUP, ROWS, GROUPS, RAGGED)
        grads = eighths.load(grad_out, at, GROUP // 8, keep, count, j, RAGGED)
        if OF_WEIGHT:
            of_weight = _added(of_weight, grads, normal)
        if OF_BIAS:
            of_bias = _added(of_bias, grads, None)
        scaled = _affine(grads, weight, weight, offset, column, keep, count, j, WEIGHT, False, GROUP, RAGGED)
        along, level = zeros, zeros
        for k in tl.static_range(8):
            along = tl.fma(scaled[k], normal[k], along)
            level += scaled[k]
        along = _over_row(along, ROWS, GROUPS) / size
        of_x = ()
        for k in tl.static_range(8):
            of_x = of_x + (scaled[k] - normal[k] * along,)
        if CENTRED:
            level = _over_row(level, ROWS, GROUPS) / size
            of_x = [part - level for part in of_x]
        eighths.store([part * inverse for part in of_x], grad_x, at, GROUP // 8, keep, count, j, RAGGED)
    if OF_WEIGHT:
        _put_sums(of_weight, weight_sums, channels, GROUP, ROWS, GROUPS, WIDTH)
    if OF_BIAS:
        _put_sums(of_bias, bias_sums, channels, GROUP, ROWS, GROUPS, WIDTH)


@triton.jit
def _added(sums, grads, normal):
    """Sums plus products, or plus gradients as they are."""
    out = ()
    for k in tl.static_range(8):
        if normal is None:
            out = out + (sums[k] + grads[k],)
        else:
            out = out + (tl.fma(grads[k], normal[k], sums[k]),)
    return out


@triton.jit
def _put_sums(
    sums, to, channels, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a program's sums of columns."""
    part, j = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, WIDTH)[None, :]
    for k in tl.static_range(8):
        total = tl.sum(tl.reshape(sums[k], (ROWS, GROUPS, WIDTH)), axis=0)
        column = part + k * (GROUP // 8) + j
        mask = (j < GROUP // 8) & (column < channels)
        tl.store(to + tl.program_id(0).to(tl.int64) * channels + column, total, mask=mask)
