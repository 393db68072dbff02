"""What training runs over several seeds say together: means, spreads, a table, and a picture of loss by bits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table
from lowbit.codecs.names import pair_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group

TITLES = {
    "scratch-warmup": "from scratch, after warm-up",
    "scratch": "from scratch, no warm-up",
    "finetune": "fine-tuning",
}
REFERENCE = "fp32"
LINEAR = 0.01  # nats up to which the picture's scale is linear
COLUMNS = (
    Column(title="boundary", field="boundary"),
    Column(title="bits\nfwd", field="bits_forward", show="{:.2f}".format),
    Column(title="bits\nbwd", field="bits_backward", show="{:.2f}".format),
    Column(title="bits\nboth", field="bits_total", show="{:.2f}".format),
    Column(title="loss", field="loss", show="{:.4f}".format),
    Column(title="over\nfp32", field="over_fp32", show="{:+.4f}".format),
    Column(title="±", field="over_fp32_spread", show="{:.4f}".format),
    Column(title="seeds", field="seeds"),
    Column(title="state\nMB", field="state_mb", show="{:.1f}".format),
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
            "boundary": pair_name(boundary),
            "seeds": len(group),
            **_mean_and_spread("loss", group),
            **_mean_and_spread("over_fp32", group),
            "bits_forward": statistics.fmean(row["bits_forward"] for row in group),
            "bits_backward": statistics.fmean(row["bits_backward"] for row in group),
            "bits_total": statistics.fmean(r["bits_forward"] + r["bits_backward"] for r in group),
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
    """Held-out loss over fp32's of the same seed against the bits of both ways, a panel for each regime.

    Points are means over the seeds; bars reach from the lowest to the highest seed. From scratch, small differences and
    large ones are of interest: the scale is linear to 0.01 nats and logarithmic beyond.
    """
    every = sorted((row for row in report.rows if row["over_fp32"] is not None), key=_place)
    regimes = list(dict.fromkeys(row["regime"] for row in every))
    colours = {name: i for i, name in enumerate(dict.fromkeys(_name(row) for row in every))}
    figure = charts.new_figure(panels=max(1, len(regimes)), width=5.5, height=4.5)
    panels = []
    for axes, regime in zip(figure.axes, regimes, strict=False):
        rows = [row for row in every if row["regime"] == regime and row["boundary"] != REFERENCE]
        panels.append((axes, regime, _places(rows)))
        _scale(axes, [bits for bits, _ in panels[-1][2].values()])
    heights = [y for _, _, places in panels for _, range_ in places.values() for y in range_]
    for axes, regime, places in panels:
        axes.set_ylim(_beyond(min(heights, default=0), -1), _beyond(max(heights, default=0), 1))
        charts.points(
            figure,
            axes,
            places,
            colours=colours,
            x_label="bits an element, forward + backward",
            label="held-out loss over fp32, nats",
            title=TITLES[regime],
        )
    charts.save(figure, path)


def _places(rows: Sequence[Row]) -> dict[str, tuple[float, tuple[float, float, float]]]:
    """Bits of both ways, and the lowest, mean and highest difference over the seeds, by boundary."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_name(row), []).append(row)
    found = {}
    for name, group in groups.items():
        over = [row["over_fp32"] for row in group]
        bits = statistics.fmean(row["bits_forward"] + row["bits_backward"] for row in group)
        found[name] = bits, (min(over), statistics.fmean(over), max(over))
    return found


def _scale(axes: Axes, bits: Sequence[float]) -> None:
    """Room for all bits, with a tick wherever people look for one."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
    axes.axhline(0, color="black", linewidth=0.8)
    low, high = min(bits, default=8.0) / 1.15, max(bits, default=8.0) * 1.15
    axes.set_xlim(low, high)
    ticks = [tick for tick in (4, 6, 8, 10, 12, 16, 24, 32, 48, 64) if low <= tick <= high]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    fine = [scale * step for scale in (0.001, 0.01, 0.1, 1.0) for step in (2, 5, 10)]
    ticks = [*(-y for y in reversed(fine)), 0.0, *fine]
    axes.set_yticks(ticks, [f"{y:+g}" if y else "0" for y in ticks])


def _beyond(height: float, sign: int) -> float:
    """A little further from zero on this side, where the picture ends."""
    return sign * max(1.25 * sign * height, LINEAR / 5)


def _name(row: Row) -> str:
    return pair_name(row["boundary"])


def _place(row: Row) -> int:
    return list(TITLES).index(row["regime"])


def _mean_and_spread(field: str, rows: Sequence[Row]) -> dict[str, float | None]:
    values = [row[field] for row in rows if row.get(field) is not None]
    return {
        field: statistics.fmean(values) if values else None,
        f"{field}_spread": statistics.stdev(values) if len(values) > 1 else None,
    }
