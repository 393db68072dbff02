"""How `lowbit bench tensor-parallel` shows its rows: a table, and a picture of speed by size of the message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table
from lowbit.bench.speeds import link_name

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    Column(title="ranks", field="ranks"),
    Column(title="link", field="link"),
    Column(title="tokens", field="tokens", show="{:,}".format),
    Column(title="format", field="format"),
    Column(title="algorithm", field="algorithm"),
    Column(title="ms", field="ms", show="{:.2f}".format),
    Column(title="±", field="spread", show="{:.0%}".format),
    Column(title="over\nbf16", field="speedup_bf16", show="{:.2f}x".format),
    Column(title="bits", field="bits_per_value", show="{:.2f}".format),
    Column(title="faster\nfrom", field="crossover", show="{:,}".format),
)


def table_of(rows: Sequence[Row]) -> Table:
    """How fast each format sums."""
    width = rows[0]["numel"] // rows[0]["tokens"] if rows else 0
    shown = [{**row, "link": link_name(row["link_mbit"])} for row in rows]
    return table(shown, COLUMNS, title=f"All-reduce of partial sums, {width} features a token")


def show(report: Report) -> Table:
    """How fast each format sums."""
    return table_of(report.rows)


def draw(report: Report, path: Path) -> None:
    """Speed over the engine's bfloat16 for each size: a panel for each number of ranks and link."""
    panels = list(dict.fromkeys((row["ranks"], row["link_mbit"]) for row in report.rows))
    figure = charts.new_figure(panels=len(panels), width=7.0)
    for axes, (count, rate) in zip(figure.axes, panels, strict=True):
        rows = [row for row in report.rows if (row["ranks"], row["link_mbit"]) == (count, rate)]
        sizes = list(dict.fromkeys(row["tokens"] for row in rows))
        names = list(dict.fromkeys((row["format"], row["algorithm"]) for row in rows))
        found = {(r["format"], r["algorithm"], r["tokens"]): r["speedup_bf16"] for r in rows}
        charts.bars(
            axes,
            [f"{size:,}" for size in sizes],
            {
                " ".join(name): [found.get((*name, size)) for size in sizes]
                for name in names
                if name[0] != "bf16"
            },
            label="speed over the engine's BF16",
            title=f"Tokens of an all-reduce, {count} ranks, {link_name(rate)}",
        )
    charts.save(figure, path)
