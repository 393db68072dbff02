"""Charts, declared by what of a row stands where. Figures are made without pyplot: no display, no global state."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    "feature-int4": "#ee7733", "tah-quant": "#ee7733", "tah-quant-published": "#aa4499", "aq-sgd": "#117733",
    "subspace": "#cc3366", "low-bit": "#ee7733", "checkpoint": "#332288",
}  # fmt: skip
"""Formats have the same colour in every figure; other series take the next of `COLOURS`."""
MARKERS = "osD^vP*X"


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """What all kinds of charts have in common.

    Args:
        label: the y axis, with its unit.
        title: above each panel, or a function that makes it from the panel's rows; absent: the panel's value.
        panel: makes a panel for each value of this.
        rows: selects or summarizes rows before anything else.
        width, height: of a panel, inches.
    """

    label: str
    title: str | Callable[[Sequence[Row]], str] = ""
    panel: Value | None = None
    rows: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    width: float | Callable[[Sequence[Row]], float] = 6.0
    height: float = 4.2

    def panels(self, rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
        """Title and rows of each panel; none if there are no rows."""
        rows = self.rows(rows) if self.rows else rows
        panel = self.panel
        if panel is None:
            parts = [("", rows)] if rows else []
        else:
            parts = [(str(v), [r for r in rows if value_of(r, panel) == v]) for v in distinct(rows, panel)]
        return [((self.title(part) if callable(self.title) else self.title) or name, part) for name, part in parts]

    def fill(self, figure: SubFigure, rows: Sequence[Row]) -> None:
        """Draw the panels side by side, with one legend below them all."""
        panels = self.panels(rows)
        colours = _Colours()
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, part) in zip(every, panels, strict=True):
            axes.set_ylabel(self.label)
            axes.set_title(title, fontsize=10, loc="left")
            axes.grid(visible=True, axis="y", alpha=0.25)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            self.draw(axes, part, colours)
        named = {
            label: handle for axes in every for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if len(named) > 1:
            columns = max(1, min(len(named), 3 * len(panels)))
            names = [textwrap.fill(name, 30) for name in named]
            figure.legend(
                list(named.values()), names, loc="outside lower center", ncols=columns, fontsize=7, frameon=False
            )

    @abstractmethod
    def draw(self, axes: Axes, rows: Sequence[Row], colours: _Colours) -> None:
        """Draw one panel."""


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Groups of bars, a bar of each series in a group.

    Args:
        group: the name below a group.
        series: the name of a bar.
        y: its height; None: no bar.
        x_label: what the groups are.
    """

    group: Value
    series: Value
    y: Value
    x_label: str = ""

    def draw(self, axes: Axes, rows: Sequence[Row], colours: _Colours) -> None:
        groups, series = distinct(rows, self.group), distinct(rows, self.series)
        heights = {(value_of(r, self.group), value_of(r, self.series)): value_of(r, self.y) for r in rows}
        thickness = 0.84 / max(1, len(series))
        for i, name in enumerate(series):
            shown = [(g, h) for g, group in enumerate(groups) if (h := heights.get((group, name))) is not None]
            places = [g + (i - (len(series) - 1) / 2) * thickness for g, _ in shown]
            bars = axes.bar(places, [h for _, h in shown], width=thickness * 0.92, color=colours[name], label=str(name))
            axes.bar_label(bars, fmt=_short, fontsize=6, padding=1, rotation=90 if len(series) > 5 else 0)
        axes.margins(y=0.14)
        _name_groups(axes, groups, self.x_label)


@dataclass(frozen=True, kw_only=True)
class Stacks(Chart):
    """A bar for each group, made of parts, the first at the bottom; sums stand above.

    Args:
        group: the name below a bar.
        parts: heights by name of the part.
    """

    group: Value
    parts: Mapping[str, Value]

    def draw(self, axes: Axes, rows: Sequence[Row], colours: _Colours) -> None:
        groups = distinct(rows, self.group)
        tops = [0.0] * len(rows)
        for i, (name, value) in enumerate(self.parts.items()):
            heights = [value_of(row, value) for row in rows]
            bars = axes.bar(range(len(rows)), heights, bottom=tops, width=0.7, color=colours[name], label=name)
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
            if i == len(self.parts) - 1:
                axes.bar_label(bars, [_short(top) for top in tops], fontsize=7, padding=1)
        _name_groups(axes, groups, "")


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Curves.

    Args:
        series: the name of a curve.
        x, y: a point of it for each row.
        curve: in place of `x` and `y`, all points of it in one row, as pairs.
        x_label: the x axis, with its unit.
        alone: marks points that stand for themselves and are not joined.
    """

    series: Value
    x: Value = ""
    y: Value = ""
    curve: Value | None = None
    x_label: str
    alone: Callable[[Row], bool] | None = None

    def draw(self, axes: Axes, rows: Sequence[Row], colours: _Colours) -> None:
        for name in distinct(rows, self.series):
            points, single = [], []
            for row in rows:
                if value_of(row, self.series) != name:
                    continue
                if self.curve is not None:
                    points += value_of(row, self.curve)
                else:
                    place = value_of(row, self.x), value_of(row, self.y)
                    (single if self.alone and self.alone(row) else points).append(place)
            marker = "o" if self.curve is None else ""
            axes.plot(*_columns(points), marker=marker, markersize=3, color=colours[name], label=str(name), lw=1.5)
            if single:
                axes.plot(*_columns(single), linestyle="", marker="*", color=colours[name])
        axes.set_xlabel(self.x_label)
        axes.grid(visible=True, axis="x", alpha=0.25)


@dataclass(frozen=True, kw_only=True)
class Points(Chart):
    """A point for each row, with a bar over its range.

    Args:
        series: the name of the point.
        x: its place; y: a mean; low, high: the ends of its range.
        x_label: the x axis, with its unit.
        linear: up to this far from zero, the y axis is linear, and logarithmic beyond; both axes have ticks where
            people look for them.
    """

    series: Value
    x: Value
    y: Value
    low: Value
    high: Value
    x_label: str
    linear: float

    def draw(self, axes: Axes, rows: Sequence[Row], colours: _Colours) -> None:
        places = [[value_of(row, value) for value in (self.x, self.low, self.y, self.high)] for row in rows]
        axes.set_xscale("log", base=2)
        axes.set_yscale("symlog", linthresh=self.linear, linscale=1.5)
        axes.axhline(0, color="black", linewidth=0.8)
        xs = [place[0] for place in places] or [8.0]
        axes.set_xlim(min(xs) / 1.15, max(xs) * 1.15)
        ticks = [tick for tick in (4, 6, 8, 10, 12, 16, 24, 32, 48, 64) if min(xs) / 1.15 <= tick <= max(xs) * 1.15]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        fine = [scale * step for scale in (0.001, 0.01, 0.1, 1.0) for step in (2, 5, 10)]
        ticks = [*(-y for y in reversed(fine)), 0.0, *fine]
        axes.set_yticks(ticks, [f"{y:+g}" if y else "0" for y in ticks])
        lows, highs = [place[1] for place in places] or [0.0], [place[3] for place in places] or [0.0]
        axes.set_ylim(-max(-1.25 * min(lows), self.linear / 5), max(1.25 * max(highs), self.linear / 5))
        for row, (x, low, y, high) in zip(rows, places, strict=True):
            name = value_of(row, self.series)
            marker = MARKERS[colours.place(name) % len(MARKERS)]
            axes.errorbar(x, y, [[y - low], [high - y]], color=colours[name], capsize=2, linewidth=1)
            axes.plot(x, y, marker, color=colours[name], markersize=5, label=str(name))
        axes.set_xlabel(self.x_label)
        axes.grid(visible=True, axis="x", alpha=0.25)


@dataclass(frozen=True, kw_only=True)
class Heights(Chart):
    """Positive numbers in lines, a line for each row, as colours on a logarithmic scale.

    Args:
        values: the numbers of a row, equally many in all.
        marks: places in the row that get an arrow.
        x_label: the x axis; y_label: what the rows are. `label` is that of the colours.
    """

    values: Value
    marks: Value
    x_label: str
    y_label: str

    def draw(self, axes: Axes, rows: Sequence[Row], colours: _Colours) -> None:
        from matplotlib.colors import LogNorm

        numbers = [value_of(row, self.values) for row in rows]
        image = axes.imshow(numbers, aspect="auto", norm=LogNorm(), cmap="viridis", interpolation="nearest")
        marks = [(x, y + 0.42) for y, row in enumerate(rows) for x in value_of(row, self.marks)]
        if marks:
            axes.plot(*_columns(marks), linestyle="", marker="^", markersize=4, color=COLOURS[1])
        axes.figure.colorbar(image, ax=axes, label=self.label)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        axes.set_yticks(range(len(rows)))
        axes.grid(visible=False)


def draw(charts: Sequence[Chart], rows: Sequence[Row], path: Path | str) -> None:
    """Draw charts side by side and write the picture, whose kind the file's suffix tells.

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


class _Colours:
    """Colours by name of a series: a format's own, or else the next that no series has."""

    def __init__(self) -> None:
        self._taken: dict[Any, str] = {}

    def __getitem__(self, name: Any) -> str:
        if name not in self._taken:
            free = [c for c in COLOURS if c not in self._taken.values()] or COLOURS
            own = FORMATS.get(str(name).split(" ")[0])
            unique = own is not None and own not in self._taken.values()
            self._taken[name] = own if own and unique else free[len(self._taken) % len(free)]
        return self._taken[name]

    def place(self, name: Any) -> int:
        """Number of a series, in the order in which the series appeared."""
        self[name]
        return list(self._taken).index(name)


def _name_groups(axes: Axes, groups: Sequence[Any], x_label: str) -> None:
    """Names below bars; long ones are turned."""
    names = [str(group) for group in groups]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    if sum(map(len, names)) > 40:
        axes.tick_params(axis="x", labelrotation=25)
        for text in axes.get_xticklabels():
            text.set_horizontalalignment("right")
    axes.set_xlabel(x_label)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
