"""How `lowbit bench pipeline` shows its rows: a table, and a picture with a group of bars for each link."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table
from lowbit.codecs.names import pair_name
from lowbit.network import Link

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def link_name(text: str) -> str:
    """A row's link as people write it: "100 Mbit/s, 40 ms", "1 Gbit/s" or "unlimited"."""
    return Link.parse(text).title


SPEED = (
    Column(title="link", field="link"),
    Column(title="split", field="split"),
    Column(title="boundary", field="boundary"),
    Column(title="tokens/s", field="tokens_per_second", show="{:,.0f}".format),
    Column(title="±", field="spread", show="{:.0%}".format),
    Column(title="over\nstock fp32", field="speedup_stock_fp32", show="{:.2f}x".format),
    Column(title="over\nfp32", field="speedup_fp32", show="{:.2f}x".format),
    Column(title="over best\nstock fp32", field="speedup_best_stock_fp32", show="{:.2f}x".format),
    Column(title="of un-\nlimited", field="share_of_unlimited", show="{:.0%}".format),
)
COST = (
    Column(title="link", field="link"),
    Column(title="split", field="split"),
    Column(title="boundary", field="boundary"),
    Column(title="bits\nfwd", field="bits_forward", show="{:.2f}".format),
    Column(title="bits\nbwd", field="bits_backward", show="{:.2f}".format),
    Column(title="MB a\nstep", field="megabytes", show="{:.2f}".format),
    Column(title="com-\npute", field="compute_seconds", show="{:.2f}".format),
    Column(title="codec", field="codec_seconds", show="{:.2f}".format),
    Column(title="wait", field="wait_seconds", show="{:.2f}".format),
    Column(title="eval", field="evaluation_seconds", show="{:.2f}".format),
    Column(title="loss", field="loss", show="{:.3f}".format),
    Column(title="state\nMB", field="state", show="{:.1f}".format),
)


def table_of(rows: Sequence[Row]) -> Table:
    """How fast each boundary is."""
    return _table(rows, SPEED, "Training speed")


def show(report: Report) -> Group:
    """How fast each boundary is, and what its steps consist of."""
    from rich.console import Group

    cost = _table(report.rows, COST, "What travels, and the seconds of a step on a rank")
    return Group(table_of(report.rows), cost)


def _table(rows: Sequence[Row], columns: Sequence[Column], title: str) -> Table:
    """Rows with a gap between links."""
    shown = [
        row
        | {
            "link": link_name(row["link"]),
            "boundary": pair_name(row["boundary"]),
            "spread": _spread(row),
            "megabytes": row["bytes_per_step"] / 1e6,
            "state": row["state_bytes"] / 1e6,
        }
        for row in map(dict, rows)
    ]
    splits = len({row["split"] for row in shown}) > 1
    hidden = set() if splits else {"split", "speedup_best_stock_fp32"}
    if all(row["evaluation_seconds"] is None for row in shown):
        hidden.add("evaluation_seconds")
    result = table(shown, [c for c in columns if c.field not in hidden], title=title)
    for i, (row, following) in enumerate(itertools.pairwise(shown)):
        result.rows[i].end_section = row["link"] != following["link"]
    return result


def _spread(row: Row) -> float:
    """Half the way from the slowest to the fastest step, as a share of the median."""
    low, high = row["tokens_per_second_low"], row["tokens_per_second_high"]
    return (high - low) / 2 / row["tokens_per_second"]


def draw(report: Report, path: Path | str) -> None:
    """Tokens per second, and their ratio to PyTorch's own stage in FP32 where that was measured."""
    links = list(dict.fromkeys(row["link"] for row in report.rows))
    splits = len({row["split"] for row in report.rows}) > 1
    found = {(row["link"], f"{row['split']} " * splits + pair_name(row["boundary"])): row for row in report.rows}
    boundaries = list(dict.fromkeys(boundary for _, boundary in found))

    def series(field: str) -> dict[str, list[float | None]]:
        return {b: [found.get((link, b), {}).get(field) for link in links] for b in boundaries}

    figure = charts.new_figure(panels=2, width=1.2 + 1.9 * len(links))
    names = [link_name(link) for link in links]
    left, right = figure.axes
    charts.bars(left, names, series("tokens_per_second"), label="tokens/s", title="Training speed")
    ratios = series("speedup_stock_fp32")
    title = "Ratio to PyTorch's own stage in FP32"
    charts.bars(right, names, ratios, label="times", title=title)
    charts.save(figure, path)
