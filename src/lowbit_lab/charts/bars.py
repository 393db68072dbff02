"""Charts made of horizontal bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.report.command import Row, Value, distinct, value_of
from lowbit_lab.charts.charts import Chart, Finish, short, wrapped
from lowbit_lab.charts.style import SMALL, TEXT, Palette, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure


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
                self._name_bars(axes, bars, palette, named=not place_)
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

    def _name_bars(self, axes: Axes, names: Sequence[Any], palette: Palette, *, named: bool) -> None:
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), [wrapped(title_of(name)) if named else "" for name in names])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        for label, name in zip(axes.get_yticklabels(), names, strict=True):
            strong = palette.stands_out(name)
            label.set(weight="bold" if strong else "normal", color=palette.theme.ink, linespacing=0.95)


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
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [title_of(value_of(row, self.group)) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(self.label)
        axes.figure.legend(loc="outside lower center", ncols=len(self.parts), frameon=False) if rows else None
        texts = [self.show(row) if self.show else short(total) for row, total in zip(rows, sums, strict=True)]
        ends = [(at, total, text, False) for at, (total, text) in enumerate(zip(sums, texts, strict=True))]
        return [lambda: _label_ends(axes, ends)]


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
