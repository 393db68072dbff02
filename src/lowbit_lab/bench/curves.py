"""Curves of a loss over seconds of training, and how long runs take to reach the same loss."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.report import Row

_SMOOTHED_SECONDS = 2.0


def curve(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return points of (seconds of training, mean training loss of the steps of the last two seconds)."""
    points, seconds, recent = [], 0.0, deque[tuple[float, float]]()
    for step in metrics:
        seconds += step["seconds"]
        recent.append((seconds, step["loss"]))
        while recent[0][0] < seconds - _SMOOTHED_SECONDS:
            recent.popleft()
        points.append((seconds, statistics.fmean(loss for _, loss in recent)))
    return points


def reached(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Add to rows `target_loss`, the lowest loss that all curves have reached, and `seconds_to_loss`."""
    target = max(min(loss for _, loss in row["curve"]) for row in rows)
    return [{**row, "target_loss": target, "seconds_to_loss": seconds_until(row["curve"], target)} for row in rows]


def seconds_until(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when a curve of (seconds, loss) first reaches the target, interpolating linearly between its points."""
    before = curve[0]
    for seconds, loss in curve:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + share * (seconds - before[0])
        before = (seconds, loss)
    return None
