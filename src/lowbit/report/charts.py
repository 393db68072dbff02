"""Charts, declared by the values of rows that they show. Figures are made without pyplot and its global state."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lowbit.report.rows import Row, Value, distinct, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# Blue and orange first: they differ in brightness, too, and for every kind of colour vision.
COLOURS = ("#3366aa", "#ee7733", "#117733", "#cc3366", "#332288", "#ddaa33", "#88ccee", "#aa4499", "#44aa99", "#882255")
FORMATS = {
    "fp32": "#777777", "bf16": "#aaaaaa", "fp16": "#bbbbbb", "stock-fp32": "#333333", "stock-bf16": "#555555",
    "engine-fp32": "#333333", "engine-bf16": "#555555", "hook-fp16": "#88ccee", "hook-bf16": "#44aa99",
    "powersgd": "#882255", "fp8": "#117733", "int8": "#ddaa33", "int6": "#aa7744", "int4": "#3366aa",
    "feature-int4": "#cc6677", "tah-quant": "#ee7733", "tah-quant-published": "#aa4499", "aq-sgd": "#999933",
    "subspace": "#cc3366", "SubspaceQuant": "#cc3366",
}  # fmt: skip
"""Formats have the same colour in every figure; other series take the next of `COLOURS` that is free."""
MARKERS = "osD^vP*X"


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """Base class of charts.

    Args:
        label: the y axis, with its unit.
        title: above each panel, or a function that makes it from the panel's rows; absent: the panel's value.
        panel: makes a panel for each value of this.
        rows: selects or summarizes rows before anything else.
        width, height: of a panel, inches.
    """

    share_y: ClassVar = False

    label: str
    title: str | Callable[[Sequence[Row]], str] = ""
    panel: Value | None = None
    rows: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    width: float | Callable[[Sequence[Row]], float] = 6.0
    height: float = 4.2

    def panels(self, rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
        """Title and rows of each panel; none if there are no rows."""
        rows = self.rows(rows) if self.rows else rows
        panel = self.panel or (lambda row: "")
        parts = [(str(v), [r for r in rows if value_of(r, panel) == v]) for v in distinct(rows, panel)]
        return [((self.title(part) if callable(self.title) else self.title) or name, part) for name, part in parts]

    def fill(self, figure: SubFigure, rows: Sequence[Row]) -> None:
        """Draw the panels side by side, with one legend below them all."""
        panels, colours = self.panels(rows), Colours()
        legend: dict[str, Any] = {}
        for axes, (title, part) in zip(
            figure.subplots(1, len(panels), squeeze=False, sharey=self.share_y)[0], panels, strict=True
        ):
            axes.set_ylabel(self.label)
            axes.set_title(title, fontsize=10, loc="left")
            axes.grid(visible=True, axis="y", alpha=0.25)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            self.draw(axes, part, colours)
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        if len(legend) > 1:
            figure.legend(
                list(legend.values()), [textwrap.fill(name, 30) for name in legend], loc="outside lower center",
                ncols=min(len(legend), 3 * len(panels)), fontsize=7, frameon=False,
            )  # fmt: skip

    @abstractmethod
    def draw(self, axes: Axes, rows: Sequence[Row], colours: Colours) -> None:
        """Draw one panel."""


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Groups of bars, a bar of each series in a group.

    Args:
        group: the name below a group.
        series: the name of a bar.
        y: its height; None: no bar.
        x_label: the x axis.
    """

    group: Value
    series: Value
    y: Value
    x_label: str = ""

    def draw(self, axes: Axes, rows: Sequence[Row], colours: Colours) -> None:
        groups, series = distinct(rows, self.group), distinct(rows, self.series)
        heights = {(value_of(r, self.group), value_of(r, self.series)): value_of(r, self.y) for r in rows}
        width = 0.84 / len(series)
        for i, name in enumerate(series):
            shown = [(g, h) for g, group in enumerate(groups) if (h := heights.get((group, name))) is not None]
            places = [g + (i - (len(series) - 1) / 2) * width for g, _ in shown]
            bars = axes.bar(places, [h for _, h in shown], width=width * 0.92, color=colours[name], label=str(name))
            axes.bar_label(bars, fmt=_short, fontsize=6, padding=1, rotation=90 if len(series) > 5 else 0)
        axes.margins(y=0.14)
        _name_groups(axes, groups, self.x_label)


@dataclass(frozen=True, kw_only=True)
class Stacks(Chart):
    """A bar for each row, made of parts, the first at the bottom; sums stand above.

    Args:
        group: the name below a bar.
        parts: heights by name of the part.
    """

    group: Value
    parts: Mapping[str, Value]

    def draw(self, axes: Axes, rows: Sequence[Row], colours: Colours) -> None:
        tops, bars = [0.0] * len(rows), None
        for name, value in self.parts.items():
            heights = [value_of(row, value) for row in rows]
            bars = axes.bar(range(len(rows)), heights, bottom=tops, width=0.7, color=colours[name], label=name)
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
        if bars is not None:
            axes.bar_label(bars, [_short(top) for top in tops], fontsize=7, padding=1)
        _name_groups(axes, [value_of(row, self.group) for row in rows], "")


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Curves.

    Args:
        series: the name of a curve.
        x: place on the x axis of a point of it, for each row.
        y: place on the y axis of the same point.
        curve: in place of `x` and `y`, all points of it in one row, as pairs.
        x_label: the x axis, with its unit.
        alone: says which points stand for themselves and are not joined.
    """

    series: Value
    x: Value = ""
    y: Value = ""
    curve: Value | None = None
    x_label: str
    alone: Value | None = None

    def draw(self, axes: Axes, rows: Sequence[Row], colours: Colours) -> None:
        marker = "" if self.curve else "o"
        for name in distinct(rows, self.series):
            points: dict[bool, list[Any]] = {True: [], False: []}
            for row in (row for row in rows if value_of(row, self.series) == name):
                place = value_of(row, self.x), value_of(row, self.y)
                alone = self.alone is not None and bool(value_of(row, self.alone))
                points[alone] += value_of(row, self.curve) if self.curve else [place]
            axes.plot(*_columns(points[False]), marker=marker, markersize=3, color=colours[name], label=str(name))
            if points[True]:
                axes.plot(*_columns(points[True]), linestyle="", marker="*", color=colours[name])
        axes.set_xlabel(self.x_label)
        axes.grid(visible=True, axis="x", alpha=0.25)


@dataclass(frozen=True, kw_only=True)
class Points(Chart):
    """A point for each row, with a bar over its range.

    Args:
        series: the name of the point.
        x: its place, on a logarithmic axis.
        y: a mean.
        low: the lower end of its range.
        high: the upper end of its range.
        x_label: the x axis, with its unit.
        linear: up to this far from zero, the y axis is linear, and logarithmic beyond.
        x_ticks: where the x axis may have ticks.
        y_ticks: where the y axis may have ticks, on either side of zero.
    """

    share_y: ClassVar = True

    series: Value
    x: Value
    y: Value
    low: Value
    high: Value
    x_label: str
    linear: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    def draw(self, axes: Axes, rows: Sequence[Row], colours: Colours) -> None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("symlog", linthresh=self.linear, linscale=1.5)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhspan(-self.linear / 5, self.linear / 5, alpha=0)  # always visible
        for row in rows:
            name, x, low, y, high = (value_of(row, v) for v in (self.series, self.x, self.low, self.y, self.high))
            colour, marker = colours[name], MARKERS[colours.place(name) % len(MARKERS)]
            axes.errorbar(x, y, [[y - low], [high - y]], color=colour, capsize=2, linewidth=1)
            axes.plot(x, y, marker, color=colour, markersize=5, label=str(name))
        xs = [value_of(row, self.x) for row in rows]
        low, high = min(xs) / 1.15, max(xs) * 1.15
        axes.set_xlim(low, high)
        ticks = [tick for tick in self.x_ticks if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        bottom, top = axes.get_ylim()
        ticks = [y for y in (*(-y for y in reversed(self.y_ticks)), 0.0, *self.y_ticks) if bottom <= y <= top]
        axes.set_yticks(ticks, [f"{y:+g}" if y else "0" for y in ticks])
        axes.set_xlabel(self.x_label)
        axes.grid(visible=True, axis="x", alpha=0.25)


@dataclass(frozen=True, kw_only=True)
class Heights(Chart):
    """Positive numbers in lines, a line for each row, as colours on a logarithmic scale.

    Args:
        values: the numbers of a row, equally many in all.
        marks: places in the row that get an arrow.
        x_label: the x axis.
        y_label: what the rows are. `label` is that of the colours.
    """

    values: Value
    marks: Value
    x_label: str
    y_label: str

    def draw(self, axes: Axes, rows: Sequence[Row], colours: Colours) -> None:
        from matplotlib.colors import LogNorm

        numbers = [value_of(row, self.values) for row in rows]
        image = axes.imshow(numbers, aspect="auto", norm=LogNorm(), cmap="viridis", interpolation="nearest")
        marks = [(x, y + 0.42) for y, row in enumerate(rows) for x in value_of(row, self.marks)]
        axes.plot(*_columns(marks), linestyle="", marker="^", markersize=4, color=COLOURS[1])
        axes.figure.colorbar(image, ax=axes, label=self.label)
        axes.set(xlabel=self.x_label, ylabel=self.y_label, yticks=range(len(rows)))
        axes.grid(visible=False)


def draw(charts: Sequence[Chart], rows: Sequence[Row], path: Path | str) -> None:
    """Draw charts side by side and write the picture, in the format of the file's suffix.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    shown = [(chart, panels) for chart in charts if (panels := len(chart.panels(rows)))]
    widths = [n * (chart.width(rows) if callable(chart.width) else chart.width) for chart, n in shown] or [6.0]
    height = max((chart.height for chart, _ in shown), default=4.2)
    figure = Figure(figsize=(sum(widths), height), dpi=150, layout="constrained")
    parts = figure.subfigures(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for part, (chart, _) in zip(parts, shown, strict=False):
        chart.fill(part, rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


class Colours:
    """Colours by name of a series: that of the format, or else the next free one."""

    def __init__(self) -> None:
        self._taken: dict[Any, str] = {}

    def __getitem__(self, name: Any) -> str:
        if name not in self._taken:
            taken = self._taken.values()
            own = FORMATS.get(str(name).partition(" ")[0].partition("(")[0])
            free = [c for c in COLOURS if c not in taken] or [COLOURS[len(taken) % len(COLOURS)]]
            self._taken[name] = own if own and own not in taken else free[0]
        return self._taken[name]

    def place(self, name: Any) -> int:
        """Number of a series, in the order in which the series appeared."""
        return list(self._taken).index(name)


def _name_groups(axes: Axes, groups: Sequence[Any], x_label: str) -> None:
    """Names below bars; long ones are turned."""
    turned = sum(len(str(group)) for group in groups) > 40
    more = {"rotation": 25, "ha": "right"} if turned else {}
    axes.set_xticks(range(len(groups)), [str(group) for group in groups], fontsize=8, **more)
    axes.set_xlabel(x_label)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
