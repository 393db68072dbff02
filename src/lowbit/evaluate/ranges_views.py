"""How `lowbit calibrate` shows what it found: a line for each boundary, and a picture of ranges and chosen features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from rich.table import Table

MAIN = (
    Column(title="boundary", field="boundary"),
    Column(title="median\nrange", field="range_median", show="{:.3g}".format),
    Column(title="largest", field="range_largest", show="{:.3g}".format),
    Column(title="over\nmedian", field="ratio", show="{:.1f}".format),
    Column(title="in\nbf16", field="k"),
    Column(title="which", field="which"),
)
_SHOWN = 4


def table_of(rows: Sequence[Row]) -> Table:
    """Ranges and chosen features of each boundary."""
    shown = [
        {
            **row,
            "boundary": row["boundary"].removeprefix("model."),
            "ratio": row["range_largest"] / row["range_median"],
            "which": _few(row["features"]),
        }
        for row in rows
    ]
    values = sum(row["width"] for row in rows)
    bits = sum(row["bits_per_value"] * row["width"] for row in rows) / values if values else 0
    return table(shown, MAIN, title=f"Ranges of partial sums; {bits:.4f} bits a value")


def show(report: Report) -> Table:
    """The table."""
    return table_of(report.rows)


def draw(report: Report, path: Path) -> None:
    """A panel for each kind of boundary: ranges by layer and feature, over the layer's median."""
    kinds = list(dict.fromkeys(_kind(row) for row in report.rows))
    figure = charts.new_figure(panels=len(kinds), width=7.0)
    for axes, kind in zip(figure.axes, kinds, strict=True):
        rows = [row for row in report.rows if _kind(row) == kind]
        charts.heights(
            figure,
            axes,
            [[value / row["range_median"] for value in row["aggregated"]] for row in rows],
            marks=[row["features"] for row in rows],
            x_label="feature",
            y_label="layer",
            label="range over the layer's median",
            title=kind,
        )
    charts.save(figure, path)


def _kind(row: Row) -> str:
    """`mlp.down_proj` of model.layers.3.mlp.down_proj."""
    parts = str(row["boundary"]).split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


def _few(features: Sequence[int]) -> str:
    more = ", ..." if len(features) > _SHOWN else ""
    return ", ".join(map(str, features[:_SHOWN])) + more
