"""Chooses the bits and the clip of each layer's codes by the error of sampled partial sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit.codecs import FeatureInt
from lowbit.codecs.feature_int.codec import CLIPS

WIDTHS = (3, 4, 5, 6, 8)
"""Bits of codes among which a budget chooses."""
GRID = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Candidate clips: shares of a token's largest magnitude at which codes may end."""

Curve = dict[int, tuple[float, float]]
"""By bits of codes: the best clip, and the squared error of the sum over the ranks, averaged over rows."""


def curve_of(codec: FeatureInt, rows: Tensor) -> Curve:
    """Measure the error of a layer's sum for each width of codes, each with the clip for which it is least.

    Args:
        codec: with the layer's tables. rows: sampled partial sums, (ranks, rows, E).
    """
    exact = rows.double().sum(0)
    return {bits: _best(codec, bits, rows, exact) for bits in WIDTHS}


def _best(codec: FeatureInt, bits: int, rows: Tensor, exact: Tensor) -> tuple[float, float]:
    """Descend from the usual clip, because the error has one minimum over the grid. Static ranges are not clipped."""
    errors: dict[int, float] = {}

    def error(i: int) -> float:
        if i not in errors:
            each = codec.like(bits=bits, clip=GRID[i])
            payloads = [each.part(rank).encode(part) for rank, part in enumerate(rows)]
            total = each.sum(payloads, out=torch.empty(exact.shape))
            errors[i] = float((total - exact).square().sum(1).mean())
        return errors[i]

    at = GRID.index(CLIPS[bits] if codec.gain == "token" else 1.0)
    for step in (-1, 1) if codec.gain == "token" else ():
        while 0 <= at + step < len(GRID) and error(at + step) < error(at):
            at += step
    return GRID[at], error(at)


def spend(
    curves: Mapping[str, Curve],
    costs: Mapping[str, Mapping[int, float]],
    budget: float,
    effects: Mapping[str, float],
) -> dict[str, int]:
    """Return the bits of each layer's codes within a budget for which the errors of all sums add up to the least.

    An error counts by its effect on the model's outputs (`effects`), which is assumed to be proportional to the squared
    error of the sum.

    Args:
        curves: of each layer. costs: bits per row of each layer, by the bits of its codes. budget: bits per row of all
            layers together. effects: by layer, of 4-bit codes.

    Raises:
        ValueError: a budget that does not suffice for the narrowest codes.
    """
    chosen = dict.fromkeys(curves, WIDTHS[0])
    spent = sum(costs[name][bits] for name, bits in chosen.items())

    def error(name: str, bits: int) -> float:
        return effects[name] * curves[name][bits][1] / (curves[name][4][1] or 1.0)

    while True:
        best: tuple[float, str, int] | None = None
        for name, bits in chosen.items():
            for more in WIDTHS[WIDTHS.index(bits) + 1 :]:
                cost = costs[name][more] - costs[name][bits]
                gain = (error(name, bits) - error(name, more)) / cost
                if spent + cost <= budget and gain > 0 and (best is None or gain > best[0]):
                    best = gain, name, more
        if best is None:
            return chosen
        spent += costs[best[1]][best[2]] - costs[best[1]][chosen[best[1]]]
        chosen[best[1]] = best[2]
