"""Rows of measurements: their values, statistics, and comparisons with a baseline."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
"""One measurement: values by field name."""
Value = str | Callable[[Row], Any]
"""The name of a field of a row, or a function of the row."""


def value_of(row: Row, value: Value) -> Any:
    """Return the value of a row; None if the row lacks the field."""
    return value(row) if callable(value) else row.get(value)


def distinct(rows: Sequence[Row], value: Value) -> list[Any]:
    """Return the distinct values of rows, in order of appearance."""
    return list(dict.fromkeys(value_of(row, value) for row in rows))


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range as a share of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def summary(values: Sequence[float], name: str) -> dict[str, Any]:
    """Return fields for a row: the median as `name`, `{name}_low`, `{name}_high`, `spread` and `rounds` (count)."""
    return {
        name: statistics.median(values),
        f"{name}_low": min(values),
        f"{name}_high": max(values),
        "spread": spread(values),
        "rounds": len(values),
    }


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A comparison of each row with the baseline's row; None without such a row or without a value in either.

    Args:
        field: name of the result.
        value: the field that is compared.
        to: fields and values of the baseline's row.
        alike: fields that the baseline's row shares with the row.
        way: "over" (row / baseline), "under" (baseline / row, for times) or "minus" (row - baseline).
        unless: fields and values of rows that are not compared.
    """

    field: str
    value: str
    to: Mapping[str, Any]
    alike: tuple[str, ...] = ()
    way: Literal["over", "under", "minus"] = "over"
    unless: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def compared(self, row: Row, base: Row | None) -> float | None:
        """Compute the result for one row."""
        this, other = row.get(self.value), base.get(self.value) if base else None
        if this is None or other is None or any(row.get(name) == value for name, value in self.unless.items()):
            return None
        if self.way == "minus":
            return this - other
        above, below = (this, other) if self.way == "over" else (other, this)
        return above / below if below else None


def compare(rows: Sequence[Row], baselines: Sequence[Baseline]) -> list[dict[str, Any]]:
    """Return the rows with the comparisons added."""
    compared = [dict(row) for row in rows]
    for baseline in baselines:
        bases = {
            tuple(row.get(name) for name in baseline.alike): row
            for row in reversed(rows)
            if all(row.get(name) == wanted for name, wanted in baseline.to.items())
        }
        for row in compared:
            base = bases.get(tuple(row.get(name) for name in baseline.alike))
            row[baseline.field] = baseline.compared(row, base)
    return compared
