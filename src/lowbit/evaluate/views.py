"""How `lowbit evaluate` shows its rows: perplexity and errors by format and ranks, tasks, and pictures of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def _percent(value: float) -> str:
    return f"{value:.2%}"


MAIN = (
    Column(title="format", field="format"),
    Column(title="tp", field="tp"),
    Column(title="bits a\nvalue", field="bits_per_value", show="{:.6g}".format),
    Column(title="coded", field="coded", show="{:.0%}".format),
    Column(title="all-\nreduce", field="algorithm"),
    Column(title="perplex-\nity", field="perplexity", show="{:.4f}".format),
    Column(title="kept", field="kept", show=_percent),
)
ERRORS = (
    *MAIN[:2],
    Column(title="clipped", field="clipped", show=_percent),
    Column(title="error of\nsums", field="boundary_error", show=_percent),
    Column(title="error of\nlogits", field="logits_error", show=_percent),
    Column(title="bits of\nlogits", field="logits", show=lambda digits: digits[:8]),
)


def table_of(rows: Sequence[Row]) -> Table:
    """What each format makes of the text."""
    if not rows:
        return table(rows, MAIN)
    if all(row["coded"] in (None, 1) for row in rows):
        rows = [{**row, "coded": None} for row in rows]  # leaves the column out
    ranks = "real ranks" if rows[0]["real"] else "ranks played in one process"
    return table(rows, MAIN, title=f"Perplexity of {rows[0]['tokens']:,} tokens, {ranks}")


def line_of(row: Row) -> str:
    """One row, while others are still measured."""
    return f"{row['format']}, tp {row['tp']}: perplexity {row['perplexity']:.4f}, kept {row['kept']:.2%}"


def show(report: Report) -> Group:
    """Perplexity, errors on the way, and the scores of tasks if there are any."""
    from rich.console import Group

    errors = table(report.rows, ERRORS, title="What sums and logits lose; equal bits: equal logits")
    tables = [table_of(report.rows), errors]
    scored = [{**row, **row["scores"]} for row in report.rows if row.get("scores")]
    if scored:
        names = list(report.rows[0]["scores"])
        columns = (
            *MAIN[:2],
            *(Column(title=name.replace(" ", "\n"), field=name, show="{:.4f}".format) for name in names),
            Column(title="kept", field="scores_kept", show=_percent),
        )
        tables.append(table(scored, columns, title="Zero-shot scores"))
    return Group(*tables)


def draw(report: Report, path: Path) -> None:
    """Perplexity kept, and the error of the sums, against the number of ranks."""
    rows = [row for row in report.rows if row["tp"] > 1]
    measured = [row for row in rows if row["boundary_error"] is not None]
    names = list(dict.fromkeys(row["format"] for row in rows))
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in measured:  # a format may go by another algorithm on more ranks, and errs otherwise then
        name = ", ".join(filter(None, (row["format"], row["algorithm"])))
        curves.setdefault(name, []).append((row["tp"], 100 * row["boundary_error"]))
    figure = charts.new_figure(panels=2 if measured else 1)
    groups = list(dict.fromkeys(row["tp"] for row in rows))
    kept = {(row["format"], row["tp"]): 100 * (row["kept"] - 1) for row in rows}
    charts.bars(
        figure.axes[0],
        [f"tp {tp}" for tp in groups],
        {name: [kept.get((name, tp)) for tp in groups] for name in names},
        label="perplexity kept, difference to bf16 in %",
        title="Perplexity",
    )
    if measured:
        charts.lines(
            figure.axes[1],
            curves,
            x_label="tensor-parallel ranks",
            label="relative error of the sums, %",
            title="Error against the number of ranks",
        )
        figure.axes[1].set_ylim(bottom=0)
        figure.axes[1].set_xticks(groups)
    charts.save(figure, path)
