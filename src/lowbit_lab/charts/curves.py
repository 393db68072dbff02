"""Charts with two axes: curves, points and maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.report.command import Row, Value, distinct, value_of
from lowbit_lab.charts.charts import Chart, Finish, columns, ink, wrapped
from lowbit_lab.charts.labels import Label, along, place, write_column
from lowbit_lab.charts.style import SMALL, TEXT, Palette, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Curves with their names next to their ends.

    Args:
        series: the name of a curve.
        x, y: a point of the curve for each row.
        curve: instead of `x` and `y`, all points of a curve in one row, as pairs.
        x_label: the x axis, with its unit.
        alone: true for points that are not joined to others.
        note: makes further lines of the name from the curve's last row.
        log_x: whether the x axis is logarithmic, with a tick at every x.
    """

    series: Value
    x: Value = ""
    y: Value = ""
    curve: Value | None = None
    x_label: str
    alone: Value | None = None
    note: Callable[[Row], str] | None = None
    log_x: bool = False

    def draw(self, axes: Axes, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        curves, labels = [], []
        for name in distinct(rows, self.series):
            points: dict[bool, list[Any]] = {True: [], False: []}
            own = [row for row in rows if value_of(row, self.series) == name]
            for row in own:
                at = value_of(row, self.x), value_of(row, self.y)
                alone = self.alone is not None and bool(value_of(row, self.alone))
                points[alone] += value_of(row, self.curve) if self.curve else [at]
            colour, strong = palette[name], palette.stands_out(name)
            width, marker = 2.6 if strong else 1.8, "" if self.curve else palette.marker(name)
            axes.plot(*columns(points[False]), marker=marker, markersize=4, color=colour, linewidth=width)
            axes.plot(*columns(points[True]), linestyle="", marker="*", color=colour)
            if joined := points[False]:
                if self.curve:
                    axes.plot(*joined[-1], marker="o", markersize=6 if strong else 5, color=colour)
                text = "\n".join([wrapped(title_of(name)), *([self.note(own[-1])] if self.note else [])])
                labels.append(Label(text=text, x=joined[-1][0], y=joined[-1][1], **ink(name, palette)))
                curves.append(joined)
        axes.set(xlabel=self.x_label, ylabel=self.label)
        axes.margins(x=0.03)
        if self.log_x:
            axes.set_xscale("log")
            ticks = distinct(rows, self.x)
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
        together = _end_together(labels, curves)
        if self.note and labels and not together:  # the lines of notes need room below the ends
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.28 * (high - low), high)

        def finish() -> None:
            if together:
                write_column(axes, labels, size=TEXT)
                return
            avoid = [point for curve in curves for point in along(axes, curve)]
            place(axes, labels, avoid=avoid, size=TEXT)

        return [finish]


@dataclass(frozen=True, kw_only=True)
class Points(Chart):
    """A point for each row, with a bar over its range and its name next to it.

    Args:
        series: the name of the point.
        x: its place, on a logarithmic axis.
        y: a mean; low, high: the ends of its range.
        x_label: the x axis, with its unit.
        linear: if values go beyond 30 times this, the y axis is linear up to this and logarithmic beyond.
        x_ticks: allowed ticks of the x axis; y_ticks: those of the logarithmic y axis, on either side of zero.
        zero: the name of the line at zero.
    """

    series: Value
    x: Value
    y: Value
    low: Value
    high: Value
    x_label: str
    linear: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    zero: str = ""

    def draw(self, axes: Axes, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        names, values = [], [self.series, self.x, self.low, self.y, self.high]
        points = [tuple(value_of(row, value) for value in values) for row in rows]
        axes.set_xscale("log", base=2)
        far = max(max(abs(low), abs(high)) for _, _, low, _, high in points) > 30 * self.linear
        if far:
            axes.set_yscale("symlog", linthresh=self.linear, linscale=1.5)
        axes.axhline(0, color=palette.theme.muted, linewidth=1.2)
        axes.axhspan(-self.linear / 5, self.linear / 5, alpha=0)  # always visible
        for name, x, low, y, high in points:
            colour, strong = palette[name], palette.stands_out(name)
            axes.errorbar(x, y, [[y - low], [high - y]], color=colour, capsize=3, linewidth=1.2)
            axes.plot(x, y, palette.marker(name), color=colour, markersize=8 if strong else 6)
            names.append(Label(text=wrapped(title_of(name)), x=x, y=y, **ink(name, palette)))
        self._ticks(axes, [point[1] for point in points], far=far)
        axes.set(xlabel=self.x_label, ylabel=self.label)
        axes.grid(visible=True, axis="x")

        def finish() -> None:
            left, right = axes.get_xlim()
            bars = [p for _, x, low, _, high in points for p in along(axes, [(x, low), (x, high)])]
            zero = along(axes, [(left, 0), (right, 0)])
            own = Label(text=self.zero, x=left, y=0, colour=palette.theme.muted)
            first = sorted(names, key=lambda label: label.weight)  # bold labels are placed first
            place(axes, [own, *first] if self.zero else first, avoid=[*bars, *zero], size=SMALL)

        return [finish]

    def _ticks(self, axes: Axes, xs: Sequence[float], *, far: bool) -> None:
        low, high = min(xs) / 1.28, max(xs) * 1.12
        axes.set_xlim(low, high)
        ticks = [tick for tick in self.x_ticks if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top)
        if far:
            ticks = [y for y in (*(-y for y in reversed(self.y_ticks)), 0.0, *self.y_ticks) if bottom <= y <= top]
            axes.set_yticks(ticks, [f"{y:+g}" if y else "0" for y in ticks])
        else:
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:+.3g}" if abs(y) > 1e-9 else "0")


@dataclass(frozen=True, kw_only=True)
class Heights(Chart):
    """Positive numbers as colours on a logarithmic scale, a line for each row.

    Args:
        values: the numbers of a row, the same count in all rows.
        marks: places in the row that get an arrow.
        x_label: the x axis; y_label: what the rows are. `label` belongs to the colours.
    """

    values: Value
    marks: Value
    x_label: str
    y_label: str

    def inches(self, rows: Sequence[Row]) -> float:
        return sum(1.2 + 0.28 * len(part) for _, part in self.panels(rows))

    def draw(self, axes: Axes, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        from matplotlib.colors import LogNorm

        numbers = [value_of(row, self.values) for row in rows]
        image = axes.imshow(numbers, aspect="auto", norm=LogNorm(), cmap="viridis", interpolation="nearest")
        marks = [(x, y + 0.42) for y, row in enumerate(rows) for x in value_of(row, self.marks)]
        axes.plot(*columns(marks), linestyle="", marker="^", markersize=5, color=palette.theme.formats["tah-quant"])
        axes.figure.colorbar(image, ax=axes, label=self.label)
        axes.set(xlabel=self.x_label, ylabel=self.y_label, yticks=range(len(rows)))
        axes.grid(visible=False)
        return []


def _end_together(labels: Sequence[Label], curves: Sequence[Sequence[tuple[float, float]]]) -> bool:
    """Whether all curves end near the right edge, so that their names fit into a column there."""
    if not labels:
        return False
    first, last = min(x for curve in curves for x, _ in curve), max(label.x for label in labels)
    return min(label.x for label in labels) >= first + 0.85 * (last - first)
