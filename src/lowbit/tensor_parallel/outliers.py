"""Which features of a layer are sent in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit.codecs.base import check_choice, check_int

LAYOUTS = ("fixed", "distributed")
SHARE = 64
"""By default one feature in this many is sent as bfloat16: (16 + 4 * 63) / 64 = 4.1875 bits per value."""
_MOST = 4  # "distributed" gives a layer at most a quarter of its features

Features = dict[str, tuple[int, ...]]
"""Outlier features by layer, ascending."""


def select(
    ranges: Mapping[str, Tensor], totals: Mapping[str, Tensor], *, k: int | None = None, layout: str = "fixed"
) -> Features:
    """Return the features of each layer with the largest range over all ranks.

    The range of a feature is aggregated as the sum of its squares over the ranks, because the expected squared error of
    uniform 4-bit codes is range^2 / (7^2 12) on each rank, and the errors of the ranks are independent. (The paper,
    arXiv 2411.07942, selects by "the largest aggregated range" without a formula.)

    Args:
        ranges: by layer, (ranks, E). totals: by layer, (E,), of the sum over the ranks.
        k: features of each layer; None: E // 64.
        layout: "fixed": k for each layer. "distributed": the same number in all, hence the same bits, but chosen over
            all layers by the expected error that each takes away, relative to the layer's sum (the sum of `totals`
            squared); at most E // 4 of a layer.

    Raises:
        ValueError: k is not smaller than the features of a layer.
    """
    check_choice("features", layout, LAYOUTS)
    counts = {name: outlier_count(name, k, by_rank.shape[1]) for name, by_rank in ranges.items()}
    gains = {name: by_rank.double().square().sum(0) for name, by_rank in ranges.items()}
    if layout == "distributed":
        relative = {name: gains[name] / totals[name].double().square().sum() for name in gains}
        counts = _distribute(relative, sum(counts.values()))
    return {
        name: tuple(sorted(gain.argsort(descending=True, stable=True)[: counts[name]].tolist()))
        for name, gain in gains.items()
    }


def outlier_count(name: str, k: int | None, width: int) -> int:
    """Return k, or the default for a layer of this width.

    Raises:
        ValueError: k is not smaller than the width.
    """
    if k is None:
        return width // SHARE
    check_int("k", k, 0, 1 << 30)
    if k >= width:
        raise ValueError(f"k is {k}; allowed: 0 to {width - 1}, fewer than the features of {name}")
    return k


def _distribute(gains: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """Return how many of the `count` largest gains each layer has."""
    names = list(gains)
    best = {name: gain.sort(descending=True).values[: max(1, len(gain) // _MOST)] for name, gain in gains.items()}
    owners = torch.cat([torch.full((len(best[name]),), i) for i, name in enumerate(names)])
    order = torch.cat([best[name] for name in names]).argsort(descending=True, stable=True)
    taken = torch.bincount(owners[order[:count]], minlength=len(names))
    return dict(zip(names, taken.tolist(), strict=True))
