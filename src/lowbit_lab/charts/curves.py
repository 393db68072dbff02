"""Charts with two axes, with labels next to points and curves that touch nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit_lab.charts.charts import Chart, Finish, columns, ink, wrapped
from lowbit_lab.charts.style import SMALL, TEXT, Palette, title_of
from lowbit_run.report.command import Row, Value, distinct, value_of
from lowbit_run.report.page import coincide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

NEAR = 16.0  # points: labels that are farther from their point get a line to it
_DISTANCES = (6.0, 11.0, NEAR, 24.0, 34.0, 46.0, 60.0, 76.0, 94.0)
_DIRECTIONS = ((1, 0), (0, -1), (0, 1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
_ALIGN = {-1: "right", 0: "center", 1: "left"}, {-1: "top", 0: "center", 1: "bottom"}
_GAP = 3.0  # pixels between a label and anything else


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Curves with their names next to their ends.

    Args:
        series: the name of a curve.
        x, y: a point of the curve for each row.
        curve: instead of `x` and `y`, all points of a curve in one row, as pairs; panels then begin at the same x.
        mark: with `curve`, the point that has a disc and the name; None: the curve's end.
        x_label: the x axis, with its unit.
        alone: true for points that are not joined to others.
        note: makes further lines of the name from the curve's last row.
        log_x: whether the x axis is logarithmic, with a tick at every x.
    """

    series: Value
    x: Value = ""
    y: Value = ""
    curve: Value | None = None
    mark: Value | None = None
    x_label: str
    alone: Value | None = None
    note: Callable[[Row], str] | None = None
    log_x: bool = False

    def fill(self, figure: SubFigure, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        finishes = super().fill(figure, rows, palette)
        left = min(axes.get_xlim()[0] for axes in figure.axes)
        for axes in figure.axes if self.curve else ():
            axes.set_xlim(left=left)
        return finishes

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
            joined = points[False]
            # Dashes let a curve be seen below another one.
            style = (0, (4, 4)) if any(coincide(joined, other) for other in curves) else "solid"
            axes.plot(*columns(joined), marker=marker, markersize=4, color=colour, linewidth=width, linestyle=style)
            axes.plot(*columns(points[True]), linestyle="", marker="*", color=colour)
            if joined:
                x, y = value_of(own[-1], self.mark) if self.mark else joined[-1]
                if self.curve:
                    axes.plot(x, y, marker="o", markersize=6 if strong else 5, color=colour)
                text = "\n".join([wrapped(title_of(name)), *([self.note(own[-1])] if self.note else [])])
                labels.append(Label(text=text, x=x, y=y, **ink(name, palette)))
                curves.append(joined)
        axes.set(xlabel=self.x_label, ylabel=self.label)
        axes.margins(x=0.03)
        if self.log_x:
            axes.set_xscale("log")
            ticks = distinct(rows, self.x)
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
        # Whether all curves end near the right edge, so that their names fit into a column there.
        ends, first = [label.x for label in labels], min((x for curve in curves for x, _ in curve), default=0)
        together = bool(ends) and min(ends) >= first + 0.85 * (max(ends) - first)
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
        left, right = min(point[1] for point in points) / 1.28, max(point[1] for point in points) * 1.12
        axes.set_xlim(left, right)
        ticks = [tick for tick in self.x_ticks if left <= tick <= right]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top)
        if far:
            ticks = [y for y in (*(-y for y in reversed(self.y_ticks)), 0.0, *self.y_ticks) if bottom <= y <= top]
            axes.set_yticks(ticks, [f"{y:+g}" if y else "0" for y in ticks])
        else:
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:+.3g}" if abs(y) > 1e-9 else "0")
        axes.set(xlabel=self.x_label, ylabel=self.label)
        axes.grid(visible=True, axis="x")

        def finish() -> None:
            bars = [p for _, x, low, _, high in points for p in along(axes, [(x, low), (x, high)])]
            zero = along(axes, [(left, 0), (right, 0)])
            own = Label(text=self.zero, x=left, y=0, colour=palette.theme.muted)
            first = sorted(names, key=lambda label: label.weight)  # bold labels are placed first
            place(axes, [own, *first] if self.zero else first, avoid=[*bars, *zero], size=SMALL)

        return [finish]


@dataclass(frozen=True, kw_only=True)
class Heights(Chart):
    """Positive numbers as colours on a logarithmic scale, a line for each row.

    Args:
        values: the numbers of a row, the same count in all rows.
        marks: places in the row that get a triangle; marked: what a triangle means, for the legend.
        x_label: the x axis; y_label: what the rows are. `label` belongs to the colours.
    """

    values: Value
    marks: Value
    marked: str
    x_label: str
    y_label: str

    def inches(self, rows: Sequence[Row]) -> float:
        return sum(1.2 + 0.28 * len(part) for _, part in self.panels(rows))

    def draw(self, axes: Axes, rows: Sequence[Row], palette: Palette) -> list[Finish]:
        from matplotlib.colors import LogNorm

        numbers = [value_of(row, self.values) for row in rows]
        image = axes.imshow(numbers, aspect="auto", norm=LogNorm(), cmap="viridis", interpolation="nearest")
        marks = [(x, y + 0.42) for y, row in enumerate(rows) for x in value_of(row, self.marks)]
        colour = palette.theme.formats["tah-quant"]
        axes.plot(*columns(marks), linestyle="", marker="^", markersize=5, color=colour, label=self.marked)
        if marks:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, frameon=False)
        axes.figure.colorbar(image, ax=axes, label=self.label)
        axes.set(xlabel=self.x_label, ylabel=self.y_label, yticks=range(len(rows)))
        axes.grid(visible=False)
        return []


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label and the point that it belongs to.

    Args:
        text: of the label; x, y: the point, in the axes' data.
        colour, weight: of the text.
    """

    text: str
    x: float
    y: float
    colour: str
    weight: str = "normal"


def place(axes: Axes, labels: Sequence[Label], *, avoid: Sequence[tuple[float, float]] = (), size: float) -> list[Text]:
    """Write every label as near to its point as possible without touching a point, a curve or another label.

    The figure must have its final layout.

    Args:
        axes: to write on; labels: in order of importance.
        avoid: further points, in data; they are not joined (see `along`).
        size: of the text, points.
    """
    figure = axes.figure
    to_pixels, scale = axes.transData.transform, figure.get_figure(root=True).dpi / 72
    points = [tuple(to_pixels(point)) for point in (*avoid, *((label.x, label.y) for label in labels))]
    inside, texts, boxes = axes.get_window_extent(), [], []
    for label in labels:
        best: tuple[float, Text, Bbox] | None = None
        for distance in _DISTANCES:
            for across, up in _DIRECTIONS:
                reach = distance / (math.hypot(across, up) or 1)
                text = axes.annotate(
                    label.text, (label.x, label.y), (across * reach, up * reach), textcoords="offset points",
                    ha=_ALIGN[0][across], va=_ALIGN[1][up], fontsize=size, color=label.colour, weight=label.weight,
                    annotation_clip=False,
                )  # fmt: skip
                box = text.get_window_extent().padded(_GAP * scale)
                cost = _cost(box, inside, boxes, points)
                if best is None or cost < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = (cost, text, box)
                else:
                    text.remove()
                if cost == 0:
                    break
            if best is not None and best[0] == 0:
                break
        assert best is not None
        _join(axes, label, best[1], scale)
        boxes.append(best[2])
        texts.append(best[1])
    return texts


def write_column(axes: Axes, labels: Sequence[Label], *, size: float) -> list[Text]:
    """Write labels in a column to the right of their points; the axes become narrower to make room."""
    scale = axes.figure.get_figure(root=True).dpi / 72
    texts = [axes.text(0, 0, label.text, fontsize=size, weight=label.weight) for label in labels]
    boxes = [text.get_window_extent() for text in texts]
    for text in texts:
        text.remove()
    place, room = axes.get_position(), axes.get_window_extent()
    share = 1 - (max(box.width for box in boxes) + 8 * scale) / room.width
    axes.set_position((place.x0, place.y0, round(place.width * share, 4), place.height))
    points = [axes.transData.transform((label.x, label.y)) for label in labels]
    heights = _apart([y for _, y in points], [box.height + _GAP * scale for box in boxes], room.y0)
    right = max(x for x, _ in points)
    return [
        axes.annotate(
            label.text, (label.x, label.y), ((right - x) / scale + 8, (height - y) / scale), textcoords="offset points",
            va="center", fontsize=size, color=label.colour, weight=label.weight, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3,
                        "relpos": (0, 0.5)} if abs(height - y) > NEAR / 2 * scale else None,
        )
        for label, (x, y), height in zip(labels, points, heights, strict=True)
    ]  # fmt: skip


def along(axes: Axes, points: Sequence[tuple[float, float]], *, every: float = 4.0) -> list[tuple[float, float]]:
    """Return points of a curve at most `every` pixels apart, in data."""
    pixels = axes.transData.transform(list(points))
    result = []
    for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
        steps = max(1, math.ceil(math.hypot(x1 - x0, y1 - y0) / every))
        result += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return [tuple(point) for point in axes.transData.inverted().transform(result)] if result else list(points)


def _apart(places: Sequence[float], sizes: Sequence[float], lowest: float) -> list[float]:
    """Return centres as near to these places as possible without overlaps, none extending below `lowest`."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = list(places)
    for _ in range(200):
        for low, high in itertools.pairwise(order):
            overlap = (sizes[low] + sizes[high]) / 2 - (found[high] - found[low])
            if overlap > 0:
                found[low] -= overlap / 2
                found[high] += overlap / 2
        found[order[0]] = max(found[order[0]], lowest + sizes[order[0]] / 2)
    return found


def _cost(box: Bbox, inside: Bbox, boxes: Sequence[Bbox], points: Sequence[tuple[float, ...]]) -> float:
    """Return 0 if a label touches nothing; overlaps with labels cost most, then leaving the axes, then points."""
    outside = max(0, inside.x0 - box.x0, box.x1 - inside.x1) + max(0, inside.y0 - box.y0, box.y1 - inside.y1)
    covered = sum(box.contains(*point) for point in points)
    return 1000.0 * sum(box.overlaps(other) for other in boxes) + 10 * outside + covered


def _join(axes: Axes, label: Label, text: Text, scale: float) -> None:
    """Draw a thin line from the label to its point, if they are far apart."""
    box = text.get_window_extent()
    x, y = axes.transData.transform((label.x, label.y))
    nearest = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
    if math.dist(nearest, (x, y)) <= (NEAR + 4) * scale:
        return
    end = axes.transData.inverted().transform(nearest)
    axes.plot([label.x, end[0]], [label.y, end[1]], color=label.colour, linewidth=0.7, alpha=0.7, zorder=1)
