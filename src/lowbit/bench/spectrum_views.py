"""How `lowbit bench spectrum` shows its rows: a table for each direction, and a picture of accuracy by bits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from rich.console import Group

COLUMNS = (
    Column(title="boundary", field="boundary"),
    Column(title="format", field="shown_format"),
    Column(title="directions", field="shown_directions"),
    Column(title="energy\noutside", field="outside", show="{:.2%}".format),
    Column(title="bits", field="bits_per_element", show="{:.2f}".format),
    Column(title="dB", field="decibels", show="{:.1f}".format),
)


def table_of(rows: Sequence[Row]) -> Group:
    """Bits and accuracy of each format at each boundary; a star marks how many directions the spectrum chose."""
    from rich.console import Group

    shown = [
        {
            **row,
            "shown_format": _name(row),
            "shown_directions": f"{row['directions']}{'*' * row['fitted']}" if row["directions"] else None,
        }
        for row in rows
    ]
    return Group(
        *(
            table(
                [row for row in shown if row["direction"] == direction],
                COLUMNS,
                title=f"{direction.capitalize()}, messages of {' x '.join(map(str, shape))}; *: by the spectrum",
            )
            for direction, shape in {row["direction"]: row["shape"] for row in rows}.items()
        )
    )


def show(report: Report) -> Group:
    """The tables."""
    return table_of(report.rows)


def draw(report: Report, path: Path) -> None:
    """Signal over noise by bits, a panel for each direction: lines of means over the boundaries.

    A number of directions that was tried at some boundaries only, because it suits them, is a point for each of these.
    """
    boundaries = len({row["boundary"] for row in report.rows})
    directions = list(dict.fromkeys(row["direction"] for row in report.rows))
    figure = charts.new_figure(panels=len(directions), width=6.0)
    for axes, direction in zip(figure.axes, directions, strict=True):
        rows = [row for row in report.rows if row["direction"] == direction]
        series: dict[str, dict[float, list[float]]] = {}
        for row in rows:
            series.setdefault(_name(row), {}).setdefault(row["bits_per_element"], []).append(row["decibels"])
        for i, (name, points) in enumerate(series.items()):
            colour = charts.COLOURS[i % len(charts.COLOURS)]
            bits = [b for b in sorted(points) if len(points[b]) == boundaries]
            means = [statistics.fmean(points[b]) for b in bits]
            axes.plot(bits, means, "o-", color=colour, label=name)
            single = [(b, y) for b in points if b not in bits for y in points[b]]
            if single:
                axes.plot(*zip(*single, strict=True), "*", color=colour)
        axes.set_xlabel("bits per element")
        axes.set_ylabel("signal over noise in dB")
        axes.set_title(direction)
        axes.legend(fontsize=7)
    charts.save(figure, path)


def _name(row: Row) -> str:
    return f"{row['format']}, {row['bits']} bits" if row["directions"] else row["format"]
