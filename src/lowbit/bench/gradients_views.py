"""How `lowbit bench gradients` shows its rows: tables, and a picture with a group of bars for each link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table
from lowbit.bench.speeds import link_name

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

AVERAGE = (
    Column(title="ranks", field="ranks"),
    Column(title="link", field="link"),
    Column(title="format", field="short"),
    Column(title="ms", field="ms", show="{:.0f}".format),
    Column(title="±", field="spread", show="{:.0%}".format),
    Column(title="over\nfp32", field="speedup_fp32", show="{:.2f}x".format),
    Column(title="over\nbf16", field="speedup_bf16", show="{:.2f}x".format),
    Column(title="of the\nlink", field="link_share", show="{:.0%}".format),
    Column(title="bits", field="bits_per_element", show="{:.1f}".format),
    Column(title="rel.\nerror", field="relative_error", show="{:.0e}".format),
)
TRAINING = (
    Column(title="ranks", field="ranks"),
    Column(title="link", field="link"),
    Column(title="format", field="short"),
    Column(title="tokens/s", field="tokens_per_second", show="{:,.0f}".format),
    Column(title="over\nfp32", field="training_speedup_fp32", show="{:.2f}x".format),
    Column(title="gradients\nMB", field="megabytes", show="{:.1f}".format),
)


def table_of(rows: Sequence[Row]) -> Table:
    """How fast each format averages."""
    shown = [_shown(row) for row in rows]
    title = f"Averaging {rows[0]['numel'] * 4 / 2**20:.0f} MB of gradients" if rows else ""
    return table(shown, AVERAGE, title=title)


def show(report: Report) -> Group:
    """How fast each format averages, and what training makes of it."""
    from rich.console import Group

    trained = [_shown(row) for row in report.rows if row["tokens_per_second"]]
    tables = [table_of(report.rows)]
    if trained:
        tables.append(table(trained, TRAINING, title="Data-parallel training"))
    return Group(*tables)


def draw(report: Report, path: Path) -> None:
    """Times over those of the engine's FP32: a panel for each number of ranks."""
    counts = list(dict.fromkeys(row["ranks"] for row in report.rows))
    figure = charts.new_figure(panels=len(counts), width=7.0)
    for axes, count in zip(figure.axes, counts, strict=True):
        rows = [row for row in report.rows if row["ranks"] == count]
        links = list(dict.fromkeys(row["link"] for row in rows))
        names = list(dict.fromkeys(row["format"] for row in rows))
        found = {(row["format"], row["link"]): row["speedup_fp32"] for row in rows}
        charts.bars(
            axes,
            [link_name(link) for link in links],
            {name: [found.get((name, link)) for link in links] for name in names},
            label="speed over the engine's FP32",
            title=f"All-reduce of gradients, {count} ranks",
        )
    charts.save(figure, path)


def _shown(row: Row) -> dict[str, object]:
    held = row["gradient_bytes"]
    return {
        **row,
        "link": link_name(row["link"]),
        "short": row["format"].partition("(")[0],
        "megabytes": held / 1e6 if held else None,
    }
