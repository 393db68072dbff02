"""How `lowbit bench activations` shows its rows: a table of bytes and errors, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench import charts
from lowbit.bench.activations import PLAIN, summary
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_PLACE = (Column(title="sequence", field="sequence"), Column(title="method", field="method"))
_ERROR = "{:.4f}".format


def table_of(rows: Sequence[Row]) -> Table:
    """Bytes of each method, and errors of the whole gradient."""
    columns = [
        *_PLACE,
        Column(title="saved\nMB", field="saved_bytes", show=lambda size: f"{size / 1e6:.2f}"),
        Column(title="of\nplain", field="saved_vs_plain", show="{:.0%}".format),
        Column(title="error,\nmedian", field="all", show=_ERROR),
        Column(title="\nlowest", field="lowest", show=_ERROR),
        Column(title="\nhighest", field="highest", show=_ERROR),
        Column(title="in training", field="train_loss", show=_ERROR),
    ]
    return table(summary(rows), columns, title="Bytes kept, and relative error of gradients")


def show(report: Report) -> Group:
    """The same, and medians of the errors by layer type and linear layer of attention."""
    from rich.console import Group

    rows: list[dict[str, Any]] = [row for row in summary(report.rows) if row["method"] != PLAIN]
    where = dict.fromkeys(name for row in report.rows for name in row["errors"] if name != "all")
    columns = [*_PLACE, *(Column(title=name, field=name, show=_ERROR) for name in where)]
    by_type = table(rows, columns, title="Medians, by layer type and linear layer of attention")
    return Group(table_of(report.rows), by_type)


def draw(report: Report, path: Path) -> None:
    """Median error of all gradients against tokens of a sample: a line for each method."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in summary(report.rows):
        if row["method"] != PLAIN:
            lines.setdefault(row["method"], []).append((row["sequence"], row["all"]))
    figure = charts.new_figure(panels=1)
    charts.lines(figure.axes[0], lines, x_label="tokens of a sample", label="relative error")
    charts.save(figure, path)
