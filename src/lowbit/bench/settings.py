"""What settings of several benchmarks have in common: links, checks and columns."""

from __future__ import annotations

from typing import Any

from lowbit.network import Link
from lowbit.report import Column, Row

ALGORITHMS = ("one_shot", "two_shot")


def check_at_least(settings: Any, **least: int) -> None:
    """Check lower limits of whole numbers.

    Raises:
        ValueError: a field below its limit.
    """
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise ValueError(f"{name} is {getattr(settings, name)}; allowed: at least {low}")


def check_lists(settings: Any, *names: str) -> None:
    """Check lists of what is compared.

    Raises:
        ValueError: an empty list, or one that has something twice.
    """
    for name in names:
        values = getattr(settings, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} is {values}; allowed: one or more, each once")


def link_name(row: Row) -> str:
    """A row's link as people write it: "100 Mbit/s, 40 ms", "1 Gbit/s" or "unlimited"."""
    return Link.parse(row["link"]).title


LINK = Column("link", link_name)


def megabytes(size: float) -> str:
    """Bytes in MB, with a decimal where there are few."""
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.1f}"
