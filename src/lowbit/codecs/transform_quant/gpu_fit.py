"""Choices of a `TransformQuant` sender on a GPU: scales of channels and tokens, and the step.

The host does not wait for them: choices are int64 numbers in a plan on the device, which later kernels read.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.transform_quant.gpu_symbols import (
    HIGHEST,
    LEAST_STEP,
    LOWEST,
    MOST_STEP,
    UNITS,
    coded,
    loaded,
    symbol_of,
    tables_on,
)
from lowbit.codecs.transform_quant.reference import (
    FINE,
    FURTHEST_BELOW,
    LANES,
    LARGEST,
    NAN,
    ROUNDS,
    ZERO,
    TransformGeometry,
    lowered,
)
from lowbit.kernels.exact import SMALLEST
from lowbit.kernels.gpu.launch import launch
from lowbit.kernels.layout import ceil_div

ATTEMPTS = 4  # to fill the payload; those after one that fits take no time, and the last one always fits
# Positions in a plan: the largest scale and norm; the bits that a larger step saves; for each attempt its step, its
# largest scale and its bytes; and the sample's bits with each of the steps.
LEVEL, NORM, SLOPE, STEPS = (tl.constexpr(i) for i in (0, 1, 2, 4))
LEVELS, TOTALS, COSTS = (tl.constexpr(4 + i * ATTEMPTS) for i in (1, 2, 3))
LAST = tl.constexpr(ATTEMPTS - 1)
CANDIDATES = tl.constexpr(HIGHEST.value - LOWEST.value + 1)  # steps, by quarters of an octave
SAMPLE = 1 << 17  # fewest sampled coefficients, if there are as many
BLOCK = 256  # sampled coefficients per program
RESERVE = 0.004  # share of the payload that the first attempt leaves free
BEYOND_REACH = tl.constexpr(4096)  # quarters of an octave: a scale this much lower marks dead symbols
FINE_ = tl.constexpr(FINE)


class PlannedFit(NamedTuple):
    """Scales as they are sent, uint8, and the plan."""

    levels: Tensor
    tokens: Tensor
    norms: Tensor
    plan: Tensor


def fitted(z: Tensor, geo: TransformGeometry) -> PlannedFit:
    """See the reference; sums are float32, in another order."""
    most_R = z.abs().amax(1)
    finite_R = most_R < LARGEST
    usable_R = finite_R & (most_R >= SMALLEST)
    exponent_R = torch.frexp(torch.where(usable_R, most_R, 1.0))[1] - 1
    factor_R = torch.ldexp(torch.ones_like(most_R), -exponent_R)
    a_RC = torch.where(usable_R[:, None], z * factor_R[:, None], 0.0).square_()
    norm_R = _quarters(a_RC.mean(1)) if geo.by_token else torch.zeros_like(exponent_R)
    if geo.by_token:
        a_RC *= torch.exp2(-0.5 * norm_R)[:, None]
    count = usable_R.sum().clamp(min=1)
    token_R = usable_R.float()
    for _ in range(ROUNDS + 1):
        channel_C = torch.where(token_R > 0, token_R, 1.0).clamp(min=SMALLEST).reciprocal() @ a_RC / count
        token_R = a_RC @ torch.where(channel_C > 0, channel_C, 1.0).clamp(min=SMALLEST).reciprocal() / geo.channels
    norm_R += 4 * exponent_R
    lowered_R = lowered(norm_R, usable_R) if geo.by_token else norm_R
    tokens_R = _quarters(token_R) + (norm_R - lowered_R if geo.by_token else 4 * exponent_R)
    plan = torch.zeros(COSTS.value + CANDIDATES.value, dtype=torch.int64, device=z.device)
    levels, level = _below(_quarters(channel_C), channel_C > 0, 255)
    tokens, token = _below(tokens_R, usable_R, ZERO)
    norms, norm = _below(lowered_R, usable_R, FURTHEST_BELOW)
    if geo.by_token:
        plan[NORM.value] = norm
    plan[LEVEL.value] = level + token
    return PlannedFit(levels, torch.where(finite_R, tokens, NAN).byte(), norms, plan)


def _quarters(square: Tensor) -> Tensor:
    """Logarithm of the square root, in quarters of an octave."""
    return (torch.where(square > 0, square, 1.0).log2() * 2).round().int()


def _below(quarters: Tensor, valid: Tensor, otherwise: int) -> tuple[Tensor, Tensor]:
    """Distances of the valid numbers below their maximum, uint8, and the maximum."""
    most = torch.where(valid, quarters, -(1 << 20)).amax()
    most = torch.where(most > -(1 << 20), most, 0)
    return torch.where(valid, (most - quarters).clamp(max=FURTHEST_BELOW), otherwise).byte(), most


def choose_step(fit: PlannedFit, z: Tensor, header: Tensor, room: int, geo: TransformGeometry) -> None:
    """Put the first attempt's step into the plan, from the bits of a sample that stands for the message."""
    table = tables_on(z.device)
    every = max(1, z.numel() // SAMPLE)
    size = ceil_div(z.numel(), every)
    launch(
        _count, ceil_div(size, BLOCK), 2, {"C": geo.channels, "BLOCK": BLOCK}, z, header, fit.levels, fit.tokens,
        fit.norms, table.inverses, table.costs, fit.plan, z.numel(), every, BY_TOKEN=geo.by_token,
    )  # fmt: skip
    wanted = 8 * (room - 4 * LANES * geo.streams) * (1 - RESERVE)
    launch(_choose, 1, 1, {}, fit.plan, float(max(0.0, wanted)), z.numel() / size)


@triton.jit(do_not_specialize=["count", "every"])
def _count(
    z, header, levels, tokens, norms, inverses, costs, plan, count, every,
    BY_TOKEN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up a sample block's bits with each candidate step: one coefficient at a random place of each run."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = place.to(tl.uint32) * 0x9E3779B1
    h = (h ^ (h >> 15)) * 0x846CA68B
    index = place * every + ((h >> 8) % every.to(tl.uint32)).to(tl.int64)
    exists = index < count
    row, column = (index // C).to(tl.int32), (index % C).to(tl.int32)
    value, below, token, norm, dither = loaded(z, header, levels, tokens, norms, index, row, column, exists, BY_TOKEN)
    level, largest_norm = tl.load(plan + LEVEL).to(tl.int32), tl.load(plan + NORM).to(tl.int32)
    for k in range(CANDIDATES):
        step = tl.minimum(tl.maximum((level - HIGHEST + k) * 16, LEAST_STEP), MOST_STEP)
        code, context, raw = coded(value, below, token, norm, dither, inverses, level, largest_norm, step, False)
        cost = tl.load(costs + symbol_of(code, context, raw)) + UNITS * raw
        tl.atomic_add(plan + COSTS + k, tl.sum(tl.where(exists, cost, 0), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["wanted", "share"])
def _choose(plan, wanted, share):
    """Return the smallest step that takes at most `wanted` bits, by linear interpolation between candidates."""
    k = tl.arange(0, 128)
    bits = tl.load(plan + COSTS + k, mask=k < CANDIDATES, other=0).to(tl.float32) * (share / UNITS)
    at = tl.min(tl.where((bits <= wanted) & (k < CANDIDATES), k, CANDIDATES - 1), axis=0)
    here = tl.sum(tl.where(k == at, bits, 0.0), axis=0)
    before = tl.sum(tl.where(k == at - 1, bits, 0.0), axis=0)
    falling = tl.maximum(before - here, 1.0)
    back = tl.minimum(tl.maximum((wanted - here) * 16 / falling, 0.0), 15.0)
    level = tl.load(plan + LEVEL)
    step = (level - HIGHEST + at) * 16 - tl.where(at > 0, back.to(tl.int32), 0)
    tl.store(plan + SLOPE, tl.maximum(falling * (1 / 16), 1.0).to(tl.int64))
    tl.store(plan + STEPS, tl.minimum(tl.maximum(step, LEAST_STEP), MOST_STEP))
    tl.store(plan + LEVELS, level)


@triton.jit
def attempt(plan, number, room):
    """Whether the attempt of this number is needed; its step, its largest scale, and whether no coefficient is coded.

    The last one sends dead symbols alone.
    """
    before = tl.maximum(number - 1, 0)
    step, level = tl.load(plan + STEPS + before).to(tl.int32), tl.load(plan + LEVELS + before).to(tl.int32)
    excess = tl.load(plan + TOTALS + before) - room
    needed = (number == 0) | (excess > 0)
    if number > 0:
        more = 1 + 8 * tl.maximum(excess, 0) // tl.load(plan + SLOPE)
        more = tl.where(number == 1, tl.minimum(more, FINE_), FINE_).to(tl.int32)
        step = tl.where(needed & (number < LAST), tl.minimum(step + more, MOST_STEP), step)
    dead = needed & (number == LAST)
    return needed, step, tl.where(dead, level - BEYOND_REACH, level), dead


@triton.jit
def note(plan, number, step, level):
    """Put an attempt into the plan; one that is not needed keeps its bytes, 0."""
    tl.store(plan + STEPS + number, step.to(tl.int64))
    tl.store(plan + LEVELS + number, level.to(tl.int64))
