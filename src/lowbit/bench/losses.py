"""What training runs over several seeds say together: means, spreads, a table and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group

TITLES = {
    "scratch-warmup": "from scratch, after warm-up",
    "scratch": "from scratch, no warm-up",
    "finetune": "fine-tuning",
}
REFERENCE = "fp32"
Curve = Sequence[tuple[float, float]]
COLUMNS = (
    Column(title="boundary", field="boundary"),
    Column(title="bits fwd", field="bits_forward", show="{:.2f}".format),
    Column(title="bwd", field="bits_backward", show="{:.2f}".format),
    Column(title="loss", field="loss", show="{:.4f}".format),
    Column(title="over fp32", field="over_fp32", show="{:+.4f}".format),
    Column(title="±", field="over_fp32_spread", show="{:.4f}".format),
    Column(title="seeds", field="seeds"),
    Column(title="state MB", field="state_mb", show="{:.1f}".format),
)


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each regime and boundary: means over the seeds, and sample standard deviations as spreads.

    `over_fp32` is the mean of the differences from the fp32 run of the same seed, whose spread is smaller than that of
    the losses: what a seed is lucky with, all formats are lucky with.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=_place):
        groups.setdefault((row["regime"], row["boundary"]), []).append(row)
    return [
        {
            "regime": regime,
            "boundary": boundary,
            "seeds": len(group),
            **_mean_and_spread("loss", group),
            **_mean_and_spread("over_fp32", group),
            "bits_forward": statistics.fmean(row["bits_forward"] for row in group),
            "bits_backward": statistics.fmean(row["bits_backward"] for row in group),
            "state_mb": statistics.fmean(row["state_bytes"] for row in group) / 1e6,
        }
        for (regime, boundary), group in groups.items()
    ]


def show(report: Report) -> Group:
    """The summary as a table for each regime."""
    from rich.console import Group

    every = summary(report.rows)
    regimes = dict.fromkeys(row["regime"] for row in every)
    titles = {regime: f"Held-out loss, nats a token: {TITLES[regime]}" for regime in regimes}
    return Group(
        *(
            table([row for row in every if row["regime"] == regime], COLUMNS, title=title)
            for regime, title in titles.items()
        )
    )


def draw(report: Report, path: Path | str) -> None:
    """Training loss over fp32's of the same seed against steps: a curve for each boundary, a panel for each regime.

    Curves are means over the seeds; bands reach from the lowest to the highest seed.
    """
    every = sorted(report.rows, key=_place)
    regimes = list(dict.fromkeys(row["regime"] for row in every))
    boundaries = list(dict.fromkeys(row["boundary"] for row in every))
    figure = charts.new_figure(panels=max(1, len(regimes)))
    for axes, regime in zip(figure.axes, regimes, strict=False):
        curves = _over_reference([row for row in every if row["regime"] == regime])
        _draw_curves(axes, {name: curves.get(name, []) for name in boundaries if name != REFERENCE})
        axes.set_title(TITLES[regime], fontsize=10, loc="left")
    charts.save(figure, path)


def _over_reference(rows: Sequence[Row]) -> dict[str, list[Curve]]:
    """Curves of each boundary, one for each seed, less those of the reference with the same seed."""
    reference = {row["seed"]: row["curve"] for row in rows if row["boundary"] == REFERENCE}
    curves: dict[str, list[Curve]] = {}
    for row in rows:
        if row["seed"] in reference:
            points = zip(row["curve"], reference[row["seed"]], strict=True)
            over = [(step, loss - other) for (step, loss), (_, other) in points]
            curves.setdefault(row["boundary"], []).append(over)
    return curves


def _draw_curves(axes: Axes, curves: dict[str, list[Curve]]) -> None:
    # A boundary that did not run here keeps its place, so that colours mean the same in every panel.
    means = {
        name: [_mean(points) for points in zip(*runs, strict=True)] for name, runs in curves.items()
    }
    shown = {name: points or [(0, math.nan)] for name, points in means.items()}
    charts.lines(axes, shown, x_label="step", label="training loss over fp32, nats")
    for line, runs in zip(list(axes.lines), curves.values(), strict=True):
        heights = [[y for _, y in points] for points in zip(*runs, strict=True)]
        low, high = [min(ys) for ys in heights], [max(ys) for ys in heights]
        steps = [step for step, _ in runs[0]] if runs else []
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.8)


def _place(row: Row) -> int:
    return list(TITLES).index(row["regime"])


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return points[0][0], statistics.fmean(loss for _, loss in points)


def _mean_and_spread(field: str, rows: Sequence[Row]) -> dict[str, float | None]:
    values = [row[field] for row in rows if row.get(field) is not None]
    return {
        field: statistics.fmean(values) if values else None,
        f"{field}_spread": statistics.stdev(values) if len(values) > 1 else None,
    }
