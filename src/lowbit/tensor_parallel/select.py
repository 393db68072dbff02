"""Which features of a boundary travel in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit.codecs.checks import check_choice, check_int

SHARE = 64
"""One of so many features travels in bfloat16: (16 + 4 * 63) / 64 = 4.1875 bits a value."""
_MOST = 4  # where they are distributed, at most a quarter of a boundary's features

Features = dict[str, tuple[int, ...]]


def select(
    ranges: Mapping[str, Tensor],
    totals: Mapping[str, Tensor],
    *,
    k: int | None = None,
    layout: str = "fixed",
) -> Features:
    """The features of each boundary with the largest range over all ranks, ascending.

    The range of a feature is aggregated as the sum over the ranks of its square, because that is what the expected
    squared error of uniform 4-bit codes grows with: range^2 / (7^2 12) on each rank, and errors of the ranks are
    independent. (The paper, arXiv 2411.07942, selects by "the largest aggregated range" without a formula.)

    Args:
        ranges: by boundary, (ranks, E). totals: by boundary, (E,), of the sum over the ranks.
        k: features of each boundary; None: E // 64.
        layout: "fixed": k for each boundary. "distributed": as many in all, hence as many bits, but each to the
            boundary where it takes away the most expected error, relative to what is added up there (the sum of
            `totals` squared): the features with the largest gains win, wherever they are. At most E // 4 of one.

    Raises:
        ValueError: k is not smaller than the features of a boundary.
    """
    check_choice("features", layout, ("fixed", "distributed"))
    counts = {name: _count(name, k, ranked.shape[1]) for name, ranked in ranges.items()}
    gains = {name: ranked.double().square().sum(0) for name, ranked in ranges.items()}
    if layout == "distributed":
        relative = {name: gains[name] / totals[name].double().square().sum() for name in gains}
        counts = _distributed(relative, sum(counts.values()))
    return {
        name: tuple(sorted(gain.argsort(descending=True, stable=True)[: counts[name]].tolist()))
        for name, gain in gains.items()
    }


def _count(name: str, k: int | None, width: int) -> int:
    if k is None:
        return width // SHARE
    check_int("k", k, 0, 1 << 30)
    if k >= width:
        raise ValueError(f"k is {k} and {name} has {width} features; allowed: 0 to {width - 1}")
    return k


def _distributed(gains: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """How many of the `count` largest gains each boundary has."""
    names = list(gains)
    best = {name: gain.sort(descending=True).values[: max(1, len(gain) // _MOST)] for name, gain in gains.items()}
    owners = torch.cat([torch.full((len(best[name]),), i) for i, name in enumerate(names)])
    order = torch.cat([best[name] for name in names]).argsort(descending=True, stable=True)
    taken = torch.bincount(owners[order[:count]], minlength=len(names))
    return dict(zip(names, taken.tolist(), strict=True))
