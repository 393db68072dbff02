"""How `lowbit bench activations` shows its rows: a table of bytes and errors, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench import charts
from lowbit.bench.activations import PLAIN, summary
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from rich.table import Table

_FIRST = ("all", "norm", "mlp")
_LAST = ("linear", "embedding", "other")


def table_of(rows: Sequence[Row]) -> Table:
    """Bytes and errors of each method: medians over the samples."""
    found = [dict.fromkeys(row["errors"]) for row in rows]
    every = list(dict.fromkeys(where for one in found for where in one))
    between = [where for where in every if where not in (*_FIRST, *_LAST)]
    columns = [
        Column(title="sequence", field="sequence"),
        Column(title="method", field="method"),
        Column(title="saved\nMB", field="saved_bytes", show=lambda size: f"{size / 1e6:.2f}"),
        Column(title="of\nplain", field="saved_vs_plain", show="{:.0%}".format),
        *(
            Column(title=where, field=where, show="{:.4f}".format)
            for where in (*_FIRST, *between, *_LAST)
        ),
        Column(title="all: lowest\nand highest", field="spread", show=_spread),
    ]
    title = "Relative error of gradients, by layer type and linear layer of attention: medians"
    shown: list[dict[str, Any]] = [row for row in summary(rows) if row["method"] != PLAIN]
    return table(shown, columns, title=title)


def show(report: Report) -> Table:
    """The table."""
    return table_of(report.rows)


def draw(report: Report, path: Path) -> None:
    """Median error of all gradients against bytes of the sequence: a line for each method."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in summary(report.rows):
        if row["method"] != PLAIN:
            lines.setdefault(row["method"], []).append((row["sequence"], row["all"]))
    figure = charts.new_figure(panels=1)
    charts.lines(figure.axes[0], lines, x_label="tokens of a sample", label="relative error")
    charts.save(figure, path)


def _spread(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.4f} {ends[1]:.4f}"
