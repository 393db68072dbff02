"""How `lowbit plan memory` shows its rows: a table, and a picture of bytes and bits by stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.activations.bit_plan import PLANNED
from lowbit.bench import charts
from lowbit.bench.report import Column, Report, table

if TYPE_CHECKING:
    from rich.console import Group


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.1f}"


COLUMNS = (
    Column(title="stage", field="stage"),
    Column(title="rank", field="rank"),
    Column(title="held", field="held"),
    *(Column(title=f"{kind}\nbits", field=kind) for kind in PLANNED),
    Column(title="saved\nMB", field="saved_bytes", show=_megabytes),
    Column(title="4 bits\nMB", field="int4_bytes", show=_megabytes),
    Column(title="BF16\nMB", field="bf16_bytes", show=_megabytes),
    Column(title="fixed\nMB", field="fixed_bytes", show=_megabytes),
    Column(title="pipeline\nMB", field="pipeline_bytes", show=_megabytes),
    Column(title="device\nMB", field="device_bytes", show=_megabytes),
    Column(title="error", field="error", show="{:.4f}".format),
)


def show(report: Report) -> Group:
    """The plan as a table, and what it comes to."""
    from rich.console import Group

    one = report.rows[0]
    title = (
        f"Saved activations within {_megabytes(one['budget'])} MB a device "
        f"(the least that would do: {_megabytes(one['least'])} MB)"
    )
    outcome = f"relative error of the gradient: {one['error_all']:.4f}, with 4 bits everywhere {one['error_int4']:.4f}"
    return Group(table(report.rows, COLUMNS, title=title), outcome)


def draw(report: Report, path: Path) -> None:
    """What each stage's micro-batches in flight keep, and the bits that the plan gives it."""
    rows = report.rows
    names = [f"stage {row['stage']}\n{row['held']} held" for row in rows]
    figure = charts.new_figure(panels=2, width=5.5)
    bytes_of = {
        "plain BF16": "bf16_bytes",
        "this plan": "saved_bytes",
        "4 bits everywhere": "int4_bytes",
    }
    charts.bars(
        figure.axes[0],
        names,
        {title: [row[field] / 1e6 for row in rows] for title, field in bytes_of.items()},
        label="MB",
        title="Kept between forward and backward, at the peak",
    )
    kinds = [kind for kind in PLANNED if any(row[kind] != 16 for row in rows)] or list(PLANNED)
    charts.bars(
        figure.axes[1],
        names,
        {kind: [row[kind] for row in rows] for kind in kinds},
        label="bits",
        title="Bits by layer type",
    )
    charts.save(figure, path)
