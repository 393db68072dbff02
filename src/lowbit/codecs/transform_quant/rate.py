"""The rate at which messages like one of them have a wanted error."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.codecs.subspace_quant.reference_basis import leading
from lowbit.codecs.transform_quant import tables
from lowbit.codecs.transform_quant.basis import coefficients
from lowbit.codecs.transform_quant.layout import TransformGeometry
from lowbit.codecs.transform_quant.reference import NAN, fitted, scales
from lowbit.codecs.transform_quant.tables import HIGHEST, LOWEST
from lowbit.kernels.exact import SMALLEST


def coded_bits(x_RC: Tensor, decibels: float, geo: TransformGeometry) -> float | None:
    """Bits of an element for the symbols of these tokens alone, by the tables.

    The principal directions of every other token stand for the basis, which follows the tokens of a run with some
    delay, and the others are coded with it. None: they do not tell, because they are zeros or have NaN or Inf.
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
    scale_RC = (scale_RC - step).clamp(LOWEST, HIGHEST)
    cost = torch.from_numpy(tables.costs()).to(x_RC.device)[torch.where(scale_RC >= 0, scale_RC & 3, scale_RC) - LOWEST]
    return float((cost + (scale_RC.clamp(min=0) >> 2)).sum()) / x_RC.numel()


def _step_for(scale_RC: Tensor, error: float) -> int:
    """The largest step, in quarters of an octave, whose mean squared error, drawn towards 0, is at most this."""
    variance_RC = torch.exp2(0.5 * scale_RC.double())
    step = int(scale_RC.amax()) + 8
    while True:
        square = 2.0 ** (0.5 * step)
        # About what the best linear estimate leaves of a coefficient beside uniform noise.
        if float((variance_RC * square / (12 * variance_RC + square)).mean()) <= error:
            return step
        step -= 1
