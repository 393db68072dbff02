"""Rates for messages like a given one: for a wanted error, or for an expected increase of the loss.

An error e of a boundary's activations, whose mean is zero, changes a loss by e' H e / 2. The empirical Fisher matrix
stands for H: with the gradient g of a loss that is the mean over N tokens, and errors that are independent between
tokens and alike in all channels,

    cost = N / 2 * sum over tokens t of (g_t . e_t)^2 = N / 2 * sum over t of |g_t|^2 s_t^2,

where s_t^2 is the variance of an element's error. Shape suffixes: R rows (tokens), C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.codecs.transform_quant import tables
from lowbit.codecs.transform_quant.basis import coefficients, leading
from lowbit.codecs.transform_quant.reference import NAN, TransformGeometry, fitted, scales
from lowbit.codecs.transform_quant.tables import HIGHEST, LOWEST
from lowbit.kernels.exact import SMALLEST

FINEST = 4 * 24  # the smallest step that is tried, in quarters of an octave below the largest coefficient


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
    z_RC = coefficients(x_RC, leading(seen_RC, geo.directions, torch.tensor(1 / most)))
    level_C, token_R, _, (level, *_) = fitted(z_RC, geo)
    scale_RC = scales(level_C, token_R, level)[token_R < NAN]
    if not scale_RC.numel():
        return None
    if geo.by_token:
        step = _step_for(scale_RC, 10 ** (-decibels / 10))
    else:
        power = float((z_RC / most).square().mean()) * most**2
        step = round(2 * math.log2(12 * power) - 4 * decibels / (20 * math.log10(2)))
    return _bits(scale_RC, step) / x_RC.numel()


def bits_for_loss(x_RC: Tensor, gradient_RC: Tensor, nats: float, geo: TransformGeometry) -> float | None:
    """Bits per element, for the symbols of these tokens alone, at which their error is expected to cost `nats`.

    Each half of the tokens is coded with the principal directions of the other. None: activations or gradients are
    unusable, because they are zeros or have NaN or Inf.
    """
    x_RC, gradient_RC = x_RC.float(), gradient_RC.float()
    most, steepest = float(x_RC.abs().amax()), float(gradient_RC.abs().amax())
    if not (SMALLEST <= most < math.inf and 0 < steepest < math.inf):
        return None
    halves = [(x_RC[::2], x_RC[1::2]), (x_RC[1::2], x_RC[::2])] if len(x_RC) > 1 else [(x_RC, x_RC)]
    size = torch.tensor(1 / most)
    z_RC = torch.cat([coefficients(coded, leading(seen, geo.directions, size)) for seen, coded in halves])
    felt_RC = torch.cat([gradient_RC[1::2], gradient_RC[::2]]) if len(x_RC) > 1 else gradient_RC
    level_C, token_R, norm_R, (level, norm, *_) = fitted(z_RC, geo)
    known_R = token_R < NAN
    scale_RC = scales(level_C, token_R, level)[known_R]
    # Steps are relative to norms, if there are any.
    square_R = torch.exp2(0.5 * (norm - norm_R[known_R]).double() * geo.by_token)
    weight_R = len(x_RC) / 2 * felt_RC[known_R].double().square().sum(1) * square_R
    if not float(weight_R.sum()) > 0:
        return None
    first = int(scale_RC.amax()) + 8
    coarser = cost = 0.0
    for step in range(first, first - FINEST, -1):
        cost = _cost(scale_RC, step, weight_R, geo.by_token)
        if cost <= nats:
            bits = _bits(scale_RC, step) / x_RC.numel()
            if not coarser:
                return bits
            # Between two steps, costs and bits are both about linear in the step's logarithm.
            share = math.log(nats / cost) / math.log(coarser / cost) if cost > 0 else 0.0
            return bits + share * (_bits(scale_RC, step + 1) / x_RC.numel() - bits)
        coarser = cost
    return _bits(scale_RC, first - FINEST) / x_RC.numel()


def _step_for(scale_RC: Tensor, error: float) -> int:
    """Largest step, in quarters of an octave, whose mean squared error after shrinking is at most `error`."""
    variance_RC = torch.exp2(0.5 * scale_RC.double())
    step = int(scale_RC.amax()) + 8
    while True:
        square = 2.0 ** (0.5 * step)
        # Approximate error of the best linear estimate of a coefficient under uniform noise.
        if float((variance_RC * square / (12 * variance_RC + square)).mean()) <= error:
            return step
        step -= 1


def _cost(scale_RC: Tensor, step: int, weight_R: Tensor, drawn: bool) -> float:
    """The expected cost with this step, in quarters of an octave; weights by token turn an element's error into it."""
    square = 2.0 ** (0.5 * step)
    if not drawn:
        return float(weight_R.sum()) * square / 12
    variance_RC = torch.exp2(0.5 * scale_RC.double())
    # Error of the best linear estimate of a coefficient under uniform noise of variance square / 12.
    return float(weight_R @ (variance_RC * square / (12 * variance_RC + square)).mean(1))


def _bits(scale_RC: Tensor, step: int) -> float:
    """Bits of all symbols with this step, by the tables."""
    scale_RC = (scale_RC - step).clamp(LOWEST, HIGHEST)
    cost = torch.from_numpy(tables.costs()).to(scale_RC.device)
    class_RC = torch.where(scale_RC >= 0, scale_RC & 3, scale_RC) - LOWEST
    return float((cost[class_RC] + (scale_RC.clamp(min=0) >> 2)).sum())
