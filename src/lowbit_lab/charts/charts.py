"""Charts, declared by the values of rows that they show, and those made of horizontal bars.

Figures are drawn without pyplot and its global state.
"""

from __future__ import annotations

import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit_lab.charts.style import LIGHT, SMALL, TEXT, TITLE, WIDTH, Palette, Theme, title_of
from lowbit_run.report.command import Row, Value, distinct, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Text = str | Callable[[Sequence[Row]], str]
"""A text, or a function that makes it from the chart's rows."""
Finish = Callable[[], None]
"""Draws what depends on the final layout."""


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """Base class of charts.

    Args:
        label: the axis of the values, with its unit.
        title: the finding, above the chart; subtitle: a description, below the title.
        panel: value by which rows are split into panels.
        rows: selects or summarizes rows before anything else.
        height: of a panel, inches.
    """

    label: str
    title: Text = ""
    subtitle: Text = ""
    panel: Value | None = None
    rows: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    height: float = 3.4

    def selected(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows that the chart shows."""
        return self.rows(rows) if self.rows else rows

    def panels(self, rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
        """Return title and rows of each panel; empty without rows."""
        rows, panel = self.selected(rows), self.panel or (lambda row: "")
        return [(str(v), [r for r in rows if value_of(r, panel) == v]) for v in distinct(rows, panel)]

    def heading(self, rows: Sequence[Row]) -> list[tuple[str, dict[str, Any]]]:
        """Return the lines above the chart, with their text properties."""
        title, subtitle = self.texts(rows)
        return [
            *((line, {"size": TITLE, "weight": "bold"}) for line in balanced(title, 67)),
            *((line, {"size": TEXT}) for line in balanced(subtitle, 100)),
        ]

    def texts(self, rows: Sequence[Row]) -> tuple[str, str]:
        """Return title and subtitle."""
        shown = self.selected(rows)
        title, subtitle = (text(shown) if callable(text) else text for text in (self.title, self.subtitle))
        return title, subtitle

    def inches(self, rows: Sequence[Row]) -> float:
        """Return the height of the chart without its heading."""
        return self.height * len(self.panels(rows))

    def fill(self, figure: SubFigure, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        """Draw the panels, one below the other."""
        panels, finishes = self.panels(rows), []
        for axes, (title, part) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            axes.set_title(title)
            axes.grid(visible=True, axis="y")
            finishes += self.draw(axes, part, palette)
        return finishes

    @abstractmethod
    def draw(self, axes: Axes, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        """Draw one panel."""


def figure(charts: Sequence[Chart], rows: Sequence[Row], theme: Theme = LIGHT, *, headed: bool = True) -> Figure:
    """Draw charts one below the other, each with its heading unless the page has it, in their final layout."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = [chart for chart in charts if chart.panels(rows)]
    with rc_context(theme.settings()):
        headings = [chart.heading(rows) if headed else [] for chart in shown]
        heights = [height for chart, lines in zip(shown, headings, strict=True)
                   for height in (0.12 + sum(_line_inches(line) for _, line in lines), chart.inches(rows))]  # fmt: skip
        engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.05, wspace=0.03, hspace=0.03)
        drawn = Figure(figsize=(WIDTH, sum(heights) + 0.08 or 2.0), dpi=100, layout=engine)
        finishes: list[Finish] = []
        if shown:
            parts = drawn.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
            for i, (chart, lines) in enumerate(zip(shown, headings, strict=True)):
                top = heights[2 * i] - 0.08
                for text, properties in lines:
                    colour = theme.ink if "weight" in properties else theme.muted
                    parts[2 * i].text(0.1 / WIDTH, top / heights[2 * i], text, va="top", color=colour, **properties)
                    top -= _line_inches(properties)
                finishes += chart.fill(parts[2 * i + 1], rows, Palette(theme))
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")
        for axes in drawn.axes:  # rounded, because the solver's last bits differ from call to call
            x, y, width, height = (round(value, 4) for value in axes.get_position().bounds)
            axes.set_position((x, y, width, height))
        for finish in finishes:
            finish()
        return drawn


def draw(
    charts: Sequence[Chart], rows: Sequence[Row], path: Path | str, *, theme: Theme = LIGHT, creator: str = ""
) -> None:
    """Draw charts and write the picture, in the format of the file's suffix. The same rows make the same SVG.

    `creator`: for the metadata of PNG, SVG and PDF.
    """
    from matplotlib import rc_context

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    drawn = figure(charts, rows, theme)
    with rc_context(theme.settings()):
        kind = Path(path).suffix.lower()
        metadata: dict[str, str | None] = {"Date": None} if kind in (".svg", ".svgz") else {}
        if creator and kind in (".png", ".svg", ".pdf"):
            metadata["Software" if kind == ".png" else "Creator"] = creator
        drawn.savefig(path, dpi=200, metadata=metadata or None)


def short(value: float) -> str:
    """Format a number with three digits, or with all digits of its integer part."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


_UNIT = re.compile(r"(?<=\d) (?=(bits?|nats?|[kMG]?bit/s|[kMGT]?i?B|m?s|seconds?|min|minutes?|tokens?|ranks?|dB|%)\b)")


def balanced(text: str, width: int) -> list[str]:
    """Break a text into as few lines as possible, of about the same length; a number stays with its unit."""
    text = _UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = best = textwrap.wrap(text, width, break_on_hyphens=False)
    while len(lines) == len(best) and width > 20:
        best, width = lines, width - 1
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in best]


def _line_inches(properties: dict[str, Any]) -> float:
    return properties["size"] * 1.42 / 72


def ink(name: Any, palette: Palette) -> dict[str, str]:
    """Return colour and weight of a series' label."""
    return {"colour": palette.ink(name), "weight": "bold" if palette.stands_out(name) else "normal"}


def wrapped(text: str) -> str:
    """Break a long name into several lines."""
    return textwrap.fill(text, 26, break_on_hyphens=False) if len(text) > 34 else text


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the xs and the ys of points."""
    return [x for x, _ in points], [y for _, y in points]


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Horizontal bars with their names on the left; a panel for each group, or one for all if they have one bar each.

    Args:
        group: the title of a panel.
        series: the name of a bar.
        y: its length; None: no bar.
        low, high: the ends of its range, if it was repeated.
        show: makes the text at its end from the row; None: the value.
    """

    group: Value
    series: Value
    y: Value
    low: Value = ""
    high: Value = ""
    show: Callable[[Row], str] | None = None

    def _grid(self, rows: Sequence[Row]) -> tuple[list[list[tuple[str, Sequence[Row]]]], Value]:
        """Return panels in lines, with their titles and rows, and the value that names a bar."""
        shown = self.selected(rows)
        group, series = self.group, self.series
        groups, bars = distinct(shown, group), {(value_of(r, self.group), value_of(r, self.series)) for r in shown}
        if 1 < len(groups) == len(bars):
            group, series = (lambda row: ""), group
        lines = []
        for title, part in self.panels(rows):
            names = distinct(part, group)
            cells = [
                (" · ".join(filter(None, (title, str(name)))), [r for r in part if value_of(r, group) == name])
                for name in names
            ]
            across = 2 if len(cells) in (2, 4) else 3 if len(cells) > 1 else 1
            lines += [cells[i : i + across] for i in range(0, len(cells), across)]
        return lines, series

    def inches(self, rows: Sequence[Row]) -> float:
        lines, series = self._grid(rows)
        bars = [len(distinct([row for _, part in cells for row in part], series)) for cells in lines]
        return sum(0.24 * n + 0.42 for n in bars) + 0.45

    def fill(self, figure: SubFigure, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        lines, series = self._grid(rows)
        across, finishes = max(map(len, lines)), []
        names = [distinct([row for _, part in cells for row in part], series) for cells in lines]
        grid = figure.subplots(
            len(lines), across, squeeze=False, height_ratios=[0.24 * len(part) + 0.42 for part in names]
        )
        for axes_line, cells, bars in zip(grid, lines, names, strict=True):
            for place_, axes in enumerate(axes_line):
                if place_ >= len(cells):
                    axes.remove()
                    continue
                title, part = cells[place_]
                axes.set_title(title)
                of = {value_of(row, series): row for row in part}
                finishes += self._draw(axes, [(name, of.get(name)) for name in bars], palette)
                _name_bars(axes, [wrapped(title_of(name)) if not place_ else "" for name in bars])
                for label, name in zip(axes.get_yticklabels(), bars, strict=True):
                    strong = palette.stands_out(name)
                    label.set(weight="bold" if strong else "normal", color=palette.theme.ink, linespacing=0.95)
        figure.supxlabel(self.label, size=TEXT, color=palette.theme.muted)
        return finishes

    def draw(self, axes: Axes, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        return self._draw(axes, [(value_of(row, self.series), row) for row in rows], palette)

    def _draw(self, axes: Axes, bars: Sequence[tuple[Any, Row | None]], palette: Palette) -> list[Finish]:
        ends = []
        for at, (name, row) in enumerate(bars):
            colour, value = palette[name], value_of(row, self.y) if row else None
            if row is None or value is None:
                continue
            axes.barh(at, value, height=0.72, color=colour, label=str(name))
            low, high = value_of(row, self.low), value_of(row, self.high)
            if low is not None and high is not None:
                axes.errorbar(
                    value, at, xerr=[[max(0, value - low)], [max(0, high - value)]], color=palette.theme.ink,
                    capsize=2.5, linewidth=1,
                )  # fmt: skip
            end = max(value, value if high is None else high) if value >= 0 else value
            ends.append((at, end, self.show(row) if self.show else short(value), palette.stands_out(name)))
        if any(end < 0 for _, end, _, _ in ends):
            axes.axvline(0, color=palette.theme.muted, linewidth=1)
        axes.grid(visible=True, axis="x")
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        return [lambda: _label_ends(axes, ends)]


@dataclass(frozen=True, kw_only=True)
class Stacks(Chart):
    """A horizontal bar for each row, composed of parts, the first on the left, with the sum at its end.

    Args:
        group: the name of a bar.
        parts: lengths by name of the part.
        show: makes the text at the end from the row; None: the sum.
    """

    group: Value
    parts: Mapping[str, Value]
    show: Callable[[Row], str] | None = None

    def inches(self, rows: Sequence[Row]) -> float:
        return sum(0.34 * len(part) + 0.75 for _, part in self.panels(rows)) + 0.35

    def draw(self, axes: Axes, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        sums = [0.0] * len(rows)
        for name, value in self.parts.items():
            lengths = [value_of(row, value) for row in rows]
            axes.barh(
                range(len(rows)), lengths, left=sums, height=0.7, color=palette[name], label=name,
                edgecolor=palette.theme.surface, linewidth=0.8,
            )  # fmt: skip
            sums = [total + length for total, length in zip(sums, lengths, strict=True)]
        _name_bars(axes, [title_of(value_of(row, self.group)) for row in rows])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(self.label)
        axes.figure.legend(loc="outside lower center", ncols=len(self.parts), frameon=False) if rows else None
        texts = [self.show(row) if self.show else short(total) for row, total in zip(rows, sums, strict=True)]
        ends = [(at, total, text, False) for at, (total, text) in enumerate(zip(sums, texts, strict=True))]
        return [lambda: _label_ends(axes, ends)]


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, bool]]) -> None:
    """Write texts next to the ends of horizontal bars, and make the axis long enough for them."""
    texts = [
        axes.annotate(
            text, (end, at), (5 if end >= 0 else -5, 0), textcoords="offset points", va="center", size=SMALL,
            ha="left" if end >= 0 else "right", weight="bold" if strong else "normal",
        )
        for at, end, text, strong in ends
    ]  # fmt: skip
    if not texts:
        return
    room = axes.get_window_extent().width
    widths = [text.get_window_extent().width + 10 for text in texts]
    low, high = min(0.0, *(end for _, end, _, _ in ends)), max(0.0, *(end for _, end, _, _ in ends))
    for _ in range(8):  # repeated, because a longer axis shortens the bars, which moves the texts
        unit = (high - low) / room or 1.0
        high = max([0.0, *(end + width * unit for (_, end, _, _), width in zip(ends, widths, strict=True) if end >= 0)])
        low = min([0.0, *(end - width * unit for (_, end, _, _), width in zip(ends, widths, strict=True) if end < 0)])
    axes.set_xlim(low, high)
    edge = axes.get_window_extent().x1 - 20  # beyond it, the last tick's number would leave the canvas
    ticks = [tick for tick in axes.get_xticks() if axes.transData.transform((tick, 0))[0] <= edge]
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
