"""Choose a rate of `TransformQuant` from data: by a wanted error, or by what it is expected to cost of the loss."""

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lowbit.codecs.transform_quant.basis import coefficients, leading
from lowbit.codecs.transform_quant.codec import CODED, MOST, TransformQuant, check_above_0, folded
from lowbit.codecs.transform_quant.reference import HIGHEST, LOWEST, NAN, TransformGeometry, costs, fitted, scales
from lowbit.kernels import apart
from lowbit.kernels.exact import SMALLEST

log = logging.getLogger(__name__)

GRAIN = 64  # selectable rates per bit
DECIBELS = 30.0
FINEST = 4 * 24  # the smallest step that is tried, in quarters of an octave below the largest coefficient


@dataclass(frozen=True, kw_only=True)
class RateGoal:
    """What a rate of `TransformQuant` is chosen for: an error, or a cost in loss.

    `lowbit train` names it "TransformQuant(bits='auto', nats=0.005)". `lowbit.pipeline.choose_rate` chooses for all
    ranks of a pipeline.

    Args:
        step: as for `TransformQuant`.
        decibels: wanted signal-to-noise ratio, more than 0 and at most 80. The basis fits later messages less well
            than the one that the rate is chosen for: expect about 2 dB less, and much less while a model changes fast.
        nats: instead of `decibels`: how much higher the loss may be with the coded activations of all boundaries, more
            than 0. The loss is assumed to be the mean over the tokens of a message. Gradients get 1.15 bits less than
            the activations of their boundary, as without `bits`. The cost is a forecast: `lowbit train` measures it and
            raises rates.
    """

    step: Literal["token", "message"] = "token"
    decibels: float = DECIBELS
    nats: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "decibels", check_above_0("decibels", self.decibels, 80.0))
        if self.nats is not None:
            object.__setattr__(self, "nats", check_above_0("nats", self.nats, sys.float_info.max))
            if self.decibels != DECIBELS:
                raise ValueError(f"nats is {self.nats:g}, and decibels is {self.decibels:g}; allowed: one of them")
        self.default()  # checks `step`

    def __str__(self) -> str:
        """Return the name in configuration files."""
        wanted = f"decibels={self.decibels!r}" if self.nats is None else f"nats={self.nats!r}"
        return f"TransformQuant(bits='auto', step={self.step!r}, {wanted})"

    def for_gradients(self) -> "RateGoal":
        """Return the goal of gradients for this goal of activations."""
        return replace(self, step="message")

    def default(self) -> TransformQuant:
        """Return the format without a set rate."""
        return TransformQuant(step=self.step)

    def choose(
        self, x: Tensor, gradient: Tensor | None = None, *, part: float = 1.0, backward: bool = False
    ) -> TransformQuant:
        """Return the format with the rate for tensors like these.

        Zeros, NaN, Inf or no gradient where one is needed give the default rate, with a warning.

        Args:
            x: activations (..., C), float32, bfloat16 or float16.
            gradient: of the loss with respect to `x`. A goal in `decibels` needs it only for `backward`.
            part: share of `nats` for this tensor: 1 / boundaries of the pipeline.
            backward: choose the format of gradients like this one, instead of that of activations.
        """
        rows, channels = folded(x.shape)
        x_RC, gradient_RC = (None if t is None else t.detach().reshape(rows, channels) for t in (x, gradient))
        assert x_RC is not None
        if gradient_RC is None and (backward or self.nats is not None):
            return self._with(x.shape, None, "it had no gradient")
        with apart(x.device):
            if self.nats is None or gradient_RC is None:
                measured_RC = x_RC if gradient_RC is None or not backward else gradient_RC
                coded = coded_bits(measured_RC, self.decibels, self.default().geometry(x.shape))
                return self._with(x.shape, coded, "it is zeros, or has NaN or Inf")
            geo = TransformQuant(step="token" if backward else self.step).geometry(x.shape)
            coded = bits_for_loss(x_RC, gradient_RC, part * self.nats, geo)
        if coded is not None and backward:
            coded = max(0.0, coded - (CODED["token"] - CODED["message"]))
        return self._with(x.shape, coded, "it or its gradient is zeros, or has NaN or Inf")

    def _with(self, shape: Sequence[int], coded: float | None, why: str) -> TransformQuant:
        """Return the format in which the symbols of a message have `coded` bits per element.

        None: the default rate, with a warning that says `why`. No rate is set if the sections besides the symbols alone
        exceed the highest one.
        """
        if coded is None:
            text = "no rate can be chosen for %s: %s; using the default, %g bits and a message's other sections"
            log.warning(text, tuple(shape), why, CODED[self.step])
            coded = CODED[self.step]
        geo, numel = self.default().geometry(shape), math.prod(shape)
        size = geo.overhead() + numel * coded / 8
        if 8 * geo.least() > MOST * numel:
            return self.default()
        return TransformQuant(bits=min(MOST, rounded_up(max(size, geo.least()) * 8 / numel)), step=self.step)


def raised(codec: TransformQuant, bits: float) -> TransformQuant:
    """Return a format with `bits` more per element, at most 16; one without a set rate stays as it is."""
    return codec if codec.bits is None else replace(codec, bits=min(MOST, codec.bits + rounded_up(bits)))


def rounded_up(bits: float) -> float:
    """Return the next rate that can be selected."""
    return math.ceil(bits * GRAIN) / GRAIN


def coded_bits(x_RC: Tensor, decibels: float, geo: TransformGeometry) -> float | None:
    """Bits per element, for the symbols of these tokens alone, as the tables predict.

    The principal directions of every second token stand for the basis, which follows the tokens of a run with some
    delay, and the other tokens are coded with it. None: unusable, because they are zeros or have NaN or Inf.
    """
    x_RC = x_RC.float()
    most = float(x_RC.abs().amax())
    if not SMALLEST <= most < math.inf:
        return None
    seen_RC, x_RC = (x_RC[::2], x_RC[1::2]) if len(x_RC) > 1 else (x_RC, x_RC)
    z_RC = coefficients(x_RC, leading(seen_RC, geo.directions, x_RC.new_tensor(1 / most)))
    level_C, token_R, _, level, _ = fitted(z_RC, geo)
    scale_RC = scales(level_C, token_R, int(level))[token_R < NAN]
    if not scale_RC.numel():
        return None
    if geo.by_token:
        variance_RC, step = torch.exp2(0.5 * scale_RC.double()), int(scale_RC.amax()) + 8
        while float(_errors(variance_RC, step).mean()) > 10 ** (-decibels / 10):
            step -= 1
    else:
        power = float((z_RC / most).square().mean()) * most**2
        step = round(2 * math.log2(12 * power) - 4 * decibels / (20 * math.log10(2)))
    return _bits(scale_RC, step) / x_RC.numel()


def bits_for_loss(x_RC: Tensor, gradient_RC: Tensor, nats: float, geo: TransformGeometry) -> float | None:
    """Bits per element, for the symbols of these tokens alone, at which their error is expected to cost `nats`.

    An error e of a boundary's activations, whose mean is zero, changes a loss by e' H e / 2. The empirical Fisher
    matrix stands for H: with the gradient g of a loss that is the mean over N tokens, and errors that are independent
    between tokens and alike in all channels, with the variance s_t^2 in token t,

        cost = N / 2 * sum over t of (g_t . e_t)^2 = N / 2 * sum over t of |g_t|^2 s_t^2.

    Each half of the tokens is coded with the principal directions of the other. None: activations or gradients are
    unusable, because they are zeros or have NaN or Inf.
    """
    x_RC, gradient_RC = x_RC.float(), gradient_RC.float()
    most, steepest = float(x_RC.abs().amax()), float(gradient_RC.abs().amax())
    if not (SMALLEST <= most < math.inf and 0 < steepest < math.inf):
        return None
    halves = [(x_RC[::2], x_RC[1::2]), (x_RC[1::2], x_RC[::2])] if len(x_RC) > 1 else [(x_RC, x_RC)]
    size = x_RC.new_tensor(1 / most)
    z_RC = torch.cat([coefficients(coded, leading(seen, geo.directions, size)) for seen, coded in halves])
    felt_RC = torch.cat([gradient_RC[1::2], gradient_RC[::2]]) if len(x_RC) > 1 else gradient_RC
    level_C, token_R, norm_R, level, norm = fitted(z_RC, geo)
    known_R = token_R < NAN
    scale_RC = scales(level_C, token_R, int(level))[known_R]
    # Steps are relative to norms, if there are any.
    square_R = torch.exp2(0.5 * (norm - norm_R[known_R].double()) * geo.by_token)
    weight_R = len(x_RC) / 2 * felt_RC[known_R].double().square().sum(1) * square_R
    if not float(weight_R.sum()) > 0:
        return None
    variance_RC, first = torch.exp2(0.5 * scale_RC.double()), int(scale_RC.amax()) + 8
    coarser = cost = 0.0
    for step in range(first, first - FINEST, -1):
        if geo.by_token:
            cost = float(weight_R @ _errors(variance_RC, step).mean(1))
        else:
            cost = float(weight_R.sum()) * 2.0 ** (0.5 * step) / 12
        if cost <= nats:
            bits = _bits(scale_RC, step) / x_RC.numel()
            if not coarser:
                return bits
            # Between two steps, costs and bits are both about linear in the step's logarithm.
            share = math.log(nats / cost) / math.log(coarser / cost) if cost > 0 else 0.0
            return bits + share * (_bits(scale_RC, step + 1) / x_RC.numel() - bits)
        coarser = cost
    return _bits(scale_RC, first - FINEST) / x_RC.numel()


def _errors(variance_RC: Tensor, step: int) -> Tensor:
    """Mean squares of the errors of coefficients of these variances, with a step in quarters of an octave.

    Approximately: those of the best linear estimates under uniform noise.
    """
    square = 2.0 ** (0.5 * step)
    return variance_RC * square / (12 * variance_RC + square)


def _bits(scale_RC: Tensor, step: int) -> float:
    """Bits of all symbols with this step, by the tables."""
    cost = torch.from_numpy(costs()).to(scale_RC.device)
    return float(cost[(scale_RC - step).clamp(LOWEST, HIGHEST) - LOWEST].sum())
