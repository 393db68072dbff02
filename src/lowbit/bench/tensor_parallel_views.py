"""How `lowbit bench tensor-parallel` shows its rows: a table, and a picture of speed by size of the message."""

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

COLUMNS = (
    Column(title="link", field="link"),
    Column(title="tokens", field="tokens", show="{:,}".format),
    Column(title="format", field="what"),
    Column(title="ms", field="ms", show="{:.2f}".format),
    Column(title="±", field="spread", show="{:.0%}".format),
    Column(title="over\nbf16", field="speedup_bf16", show="{:.2f}x".format),
    Column(title="bits", field="bits_per_value", show="{:.2f}".format),
    Column(title="faster\nfrom", field="from_tokens", show="{:,}".format),
)


PREFILL = (
    Column(title="ranks", field="ranks"),
    Column(title="link", field="link"),
    Column(title="format", field="format"),
    Column(title="ms", field="ms", show="{:.0f}".format),
    Column(title="±", field="spread", show="{:.0%}".format),
    Column(title="tokens/s", field="tokens_per_second", show="{:,.0f}".format),
    Column(title="over\nbf16", field="speedup_bf16", show="{:.2f}x".format),
)


def table_of(rows: Sequence[Row]) -> Group:
    """How fast each format sums: a table for each number of ranks."""
    from rich.console import Group

    counts = dict.fromkeys(row["ranks"] for row in sums_of(rows))
    return Group(*(_table_of([r for r in sums_of(rows) if r["ranks"] == n]) for n in counts))


def _table_of(rows: Sequence[Row]) -> Table:
    width = rows[0]["numel"] // rows[0]["tokens"]
    shown = [
        {
            **row,
            "link": link_name(row["link"]),
            "what": f"{row['format']} {row['algorithm'].replace('_', '-')}",
            "from_tokens": row["crossover"] // width if row["crossover"] else None,
        }
        for row in rows
    ]
    title = f"All-reduce of partial sums, {width} features a token, {rows[0]['ranks']} ranks"
    return table(shown, COLUMNS, title=title)


def show(report: Report) -> Group:
    """How fast each format sums, and what prefill makes of it."""
    from rich.console import Group

    tables: list[Group | Table] = [table_of(report.rows)]
    rows = [row for row in report.rows if row.get("tokens_per_second")]
    if rows:
        shown = [{**row, "link": link_name(row["link"])} for row in rows]
        title = f"Prefill of {rows[0]['tokens']} tokens by a Llama with random weights"
        tables.append(table(shown, PREFILL, title=title))
    return Group(*tables)


def sums_of(rows: Sequence[Row]) -> list[Row]:
    """Those of all-reduces."""
    return [row for row in rows if not row.get("tokens_per_second")]


def draw(report: Report, path: Path) -> None:
    """Speed over the engine's bfloat16 for each size: a panel for each number of ranks and link."""
    sums = sums_of(report.rows)
    panels = list(dict.fromkeys((row["ranks"], row["link"]) for row in sums))
    figure = charts.new_figure(panels=len(panels), width=7.0)
    for axes, (count, link) in zip(figure.axes, panels, strict=True):
        rows = [row for row in sums if (row["ranks"], row["link"]) == (count, link)]
        sizes = list(dict.fromkeys(row["tokens"] for row in rows))
        names = list(dict.fromkeys((row["format"], row["algorithm"]) for row in rows))
        found = {(r["format"], r["algorithm"], r["tokens"]): r["speedup_bf16"] for r in rows}
        charts.bars(
            axes,
            [f"{size:,}" for size in sizes],
            {" ".join(name): [found.get((*name, size)) for size in sizes] for name in names if name[0] != "bf16"},
            label="speed over the engine's BF16",
            title=f"Tokens of an all-reduce, {count} ranks, {link_name(link)}",
        )
    charts.save(figure, path)
