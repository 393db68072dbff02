"""Charts, declared by the values of rows that they show. Figures are drawn without pyplot and its global state."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.report.command import Row, Value, distinct, value_of
from lowbit_lab.charts.style import LIGHT, TEXT, TITLE, WIDTH, Palette, Theme

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
        shown = self.selected(rows)
        texts = [text(shown) if callable(text) else text for text in (self.title, self.subtitle)]
        return [
            *((line, {"size": TITLE, "weight": "bold"}) for line in _balanced(texts[0], 67)),
            *((line, {"size": TEXT}) for line in _balanced(texts[1], 100)),
        ]

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


def figure(charts: Sequence[Chart], rows: Sequence[Row], theme: Theme = LIGHT) -> Figure:
    """Draw charts one below the other, each with its heading, in their final layout."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = [chart for chart in charts if chart.panels(rows)]
    with rc_context(theme.settings()):
        headings = [chart.heading(rows) for chart in shown]
        heights = [height for chart, lines in zip(shown, headings, strict=True)
                   for height in (0.12 + sum(_line_inches(line) for line in lines), chart.inches(rows))]  # fmt: skip
        engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.05, wspace=0.03, hspace=0.03)
        drawn = Figure(figsize=(WIDTH, sum(heights) + 0.08 or 2.0), dpi=100, layout=engine)
        finishes: list[Finish] = []
        if shown:
            parts = drawn.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
            for i, (chart, lines) in enumerate(zip(shown, headings, strict=True)):
                _write_heading(parts[2 * i], lines, heights[2 * i], theme)
                finishes += chart.fill(parts[2 * i + 1], rows, Palette(theme))
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")
        for axes in drawn.axes:  # rounded, because the solver's last bits differ from call to call
            x, y, width, height = (round(value, 4) for value in axes.get_position().bounds)
            axes.set_position((x, y, width, height))
        for finish in finishes:
            finish()
        return drawn


def draw(charts: Sequence[Chart], rows: Sequence[Row], path: Path | str, *, theme: Theme = LIGHT) -> None:
    """Draw charts and write the picture, in the format of the file's suffix. The same rows make the same SVG."""
    from matplotlib import rc_context

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    drawn = figure(charts, rows, theme)
    with rc_context(theme.settings()):
        dated = Path(path).suffix.lower() in (".svg", ".svgz")
        drawn.savefig(path, dpi=200, metadata={"Date": None} if dated else None)


def short(value: float) -> str:
    """Format a number with three digits, or with all digits of its integer part."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _write_heading(part: SubFigure, lines: Sequence[tuple[str, dict[str, Any]]], inches: float, theme: Theme) -> None:
    top = inches - 0.08
    for line in lines:
        text, properties = line
        colour = theme.ink if "weight" in properties else theme.muted
        part.text(0.1 / WIDTH, top / inches, text, va="top", color=colour, **properties)
        top -= _line_inches(line)


def _balanced(text: str, width: int) -> list[str]:
    """Break a text into as few lines as possible, of about the same length."""
    lines = best = textwrap.wrap(text, width, break_on_hyphens=False)
    while len(lines) == len(best) and width > 20:
        best, width = lines, width - 1
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
    return best


def _line_inches(line: tuple[str, dict[str, Any]]) -> float:
    return line[1]["size"] * 1.42 / 72


def ink(name: Any, palette: Palette) -> dict[str, str]:
    """Return colour and weight of a series' label."""
    return {"colour": palette.ink(name), "weight": "bold" if palette.stands_out(name) else "normal"}


def wrapped(text: str) -> str:
    """Break a long name into several lines."""
    return textwrap.fill(text, 26, break_on_hyphens=False) if len(text) > 34 else text


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the xs and the ys of points."""
    return [x for x, _ in points], [y for _, y in points]
