"""How `lowbit bench memory` shows its rows: tables of bytes, of their parts and of errors, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

PARTS = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_bytes",
    "saved": "saved_bytes",
    "copies of weights": "weight_copies_bytes",
    "rest": "rest_bytes",
}
TYPES = ("norm", "mlp", "linear", "attention", "embedding", "other", "loss")


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.1f}"


MAIN = (
    Column(title="sequence", field="sequence"),
    Column(title="method", field="method"),
    Column(title="saved\nMB", field="saved_bytes", show=_megabytes),
    Column(title="of\nbf16", field="saved_vs_bf16", show="{:.0%}".format),
    Column(title="peak\nMB", field="peak_bytes", show=_megabytes),
    Column(title="of\nbf16", field="peak_vs_bf16", show="{:.0%}".format),
    Column(title="s a\nstep", field="step_seconds", show="{:.2f}".format),
    Column(title="of\nbf16", field="time_vs_bf16", show="{:.0%}".format),
    Column(title="loss", field="loss", show="{:.4f}".format),
)


def table_of(rows: Sequence[Row]) -> Table:
    """Bytes, time and loss of each method."""
    return table(rows, MAIN, title="Memory of a training step")


def show(report: Report) -> Group:
    """Bytes and time; what the peak is made of; what is kept, and the gradient's error, by layer type."""
    from rich.console import Group

    places = (Column(title="sequence", field="sequence"), Column(title="method", field="method"))
    parts = [Column(title=f"{part}\nMB", field=field, show=_megabytes) for part, field in PARTS.items()]
    saved = [{**row, **row["saved"]} for row in report.rows]
    kinds = [kind for kind in TYPES if any(kind in row for row in saved)]
    bytes_of = [Column(title=f"{kind}\nMB", field=kind, show=_megabytes) for kind in kinds]
    errors = [{**row, **row["gradient_error"]} for row in report.rows]
    of = [kind for kind in ("all", *TYPES) if any(kind in row["gradient_error"] for row in report.rows)]
    error_of = [Column(title=kind, field=kind, show="{:.4f}".format) for kind in of]
    return Group(
        table_of(report.rows),
        table(report.rows, [*places, *parts], title="What the peak is made of"),
        table(saved, [*places, *bytes_of], title="Kept by autograd for a micro-batch, by layer type"),
        table(
            errors,
            [*places, *error_of],
            title="Relative error of gradients, by layer type of the parameters",
        ),
    )


def draw(report: Report, path: Path) -> None:
    """What the peak is made of: a stack of bars for each method, a panel for each sequence length."""
    sequences = list(dict.fromkeys(row["sequence"] for row in report.rows))
    figure = charts.new_figure(panels=len(sequences))
    for axes, sequence in zip(figure.axes, sequences, strict=True):
        rows = [row for row in report.rows if row["sequence"] == sequence]
        charts.stacks(
            axes,
            [row["method"] for row in rows],
            {part: [max(0.0, row[field] / 1e6) for row in rows] for part, field in PARTS.items()},
            label="MB",
            title=f"Peak of a training step, {sequence} tokens",
        )
    charts.save(figure, path)
