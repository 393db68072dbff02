"""Pictures for reports. Figures are made without pyplot, so that nothing needs a display or keeps global state."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and orange first: they differ in brightness, too, and for every kind of colour vision.
COLOURS = ("#3366aa", "#ee7733", "#999999", "#117733", "#cc3366", "#332288", "#ddaa33", "#88ccee")


def new_figure(*, panels: int = 1, width: float = 6.0, height: float = 4.0) -> Figure:
    """A figure with panels side by side, each `width` x `height` inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, height), dpi=150, layout="constrained")
    figure.subplots(1, panels)
    return figure


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    label: str,
    title: str = "",
) -> None:
    """Groups of bars, one bar of each series in a group; what is None is left out.

    Args:
        axes: where to draw; groups: names below the groups.
        series: heights by name of the series, one for each group.
        label: what the heights are.
    """
    thickness = 0.84 / max(1, len(series))
    for i, (name, heights) in enumerate(series.items()):
        places = [g + (i - (len(series) - 1) / 2) * thickness for g in range(len(groups))]
        shown = [(p, h) for p, h in zip(places, heights, strict=True) if h is not None]
        drawn = axes.bar(*zip(*shown, strict=True), width=thickness * 0.92, color=_colour(i), label=name)
        axes.bar_label(drawn, fmt=_short, fontsize=6, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    _finish(axes, label=label, title=title, legend=len(series) > 1)


def stacks(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    label: str,
    title: str = "",
) -> None:
    """A bar for each group, made of one part of each series, the first at the bottom; sums stand above.

    Args:
        axes: where to draw; groups: names below the bars.
        series: heights by name of the series, one for each group.
        label: what the heights are.
    """
    below = [0.0] * len(groups)
    for i, (name, heights) in enumerate(series.items()):
        drawn = axes.bar(range(len(groups)), heights, bottom=below, width=0.7, color=_colour(i), label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
        if i == len(series) - 1:
            axes.bar_label(drawn, [_short(height) for height in below], fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right", fontsize=8)
    _finish(axes, label=label, title=title, legend=len(series) > 1)


def lines(
    axes: Axes,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    label: str,
    title: str = "",
) -> None:
    """Curves of (x, y) points, by name."""
    for i, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*points, strict=True), color=_colour(i), label=name, linewidth=1.5)
    axes.set_xlabel(x_label)
    axes.grid(visible=True, axis="x", alpha=0.25)
    _finish(axes, label=label, title=title, legend=len(series) > 1)


def points(
    figure: Figure,
    axes: Axes,
    places: Mapping[str, tuple[float, tuple[float, float, float]]],
    *,
    colours: Mapping[str, int],
    x_label: str,
    label: str,
    title: str = "",
) -> None:
    """A point for each name, with its name beside it and a bar over its range.

    Args:
        figure, axes: where to draw. The axes' scales and everything that takes room are set by then.
        places: x, and the lowest, the mean and the highest y, by name.
        colours: a number for each name, the same in all panels.
    """
    axes.set_xlabel(x_label)
    axes.grid(visible=True, axis="x", alpha=0.25)
    for name, (x, (low, mean, high)) in places.items():
        colour, marker = _colour(colours[name]), "os^D"[colours[name] // len(COLOURS) % 4]
        axes.errorbar(x, mean, [[mean - low], [high - mean]], color=colour, capsize=2, linewidth=1)
        axes.plot(x, mean, marker, color=colour, markersize=4.5)
    _finish(axes, label=label, title=title, legend=False)
    _write_beside(figure, axes, places)


# Where a name may stand, from its point: points to the right and upwards, and how it is aligned.
_BESIDE = [(x, y, "left" if x > 0 else "right") for y in (0, 8, -8, 16, -16, 24, -24, 34, -34) for x in (6, -6)]


def _write_beside(
    figure: Figure,
    axes: Axes,
    places: Mapping[str, tuple[float, tuple[float, float, float]]],
) -> None:
    """Names of points, each at the first place where it covers no point, range or name and stays within the axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # from here on it is known where things lie
    inside = axes.get_window_extent()
    taken = []
    for x, (low, mean, high) in places.values():
        left, bottom = axes.transData.transform((x, low)) - 3
        right, top = axes.transData.transform((x, high)) + 3
        _, middle = axes.transData.transform((x, mean))
        taken.append(Bbox.from_extents(left, bottom, right, top))
        taken.append(Bbox.from_extents(left - 4, middle - 7, right + 4, middle + 7))
    for name, (x, (_, mean, _)) in places.items():
        place = x, mean
        text = axes.annotate(
            textwrap.fill(name, 24),
            place,
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=6,
            va="center",
        )
        text.set_in_layout(False)
        best = len(taken) + 2
        for x, y, side in _BESIDE:
            before = text.xyann, text.get_horizontalalignment()
            text.set(position=(x, y), horizontalalignment=side)
            box = text.get_window_extent()
            out = min(box.x0 - inside.x0, inside.x1 - box.x1) < 0
            covered = box.count_overlaps(taken) + 2 * out
            if covered < best:
                best = covered
            else:
                text.set(position=before[0], horizontalalignment=before[1])
            if not best:
                break
        taken.append(text.get_window_extent())


def heights(
    figure: Figure,
    axes: Axes,
    rows: Sequence[Sequence[float]],
    *,
    marks: Sequence[Sequence[int]],
    x_label: str,
    y_label: str,
    label: str,
    title: str = "",
) -> None:
    """Positive numbers in rows and columns, as colours on a logarithmic scale; marked ones get an arrow.

    Args:
        figure, axes: where to draw; rows: of equal length, the first on top.
        marks: columns of each row; label: what the colours are.
    """
    from matplotlib.colors import LogNorm

    drawn = axes.imshow(rows, aspect="auto", norm=LogNorm(), cmap="viridis", interpolation="nearest")
    points = [(column, row + 0.42) for row, columns in enumerate(marks) for column in columns]
    if points:
        axes.plot(*zip(*points, strict=True), linestyle="", marker="^", markersize=4, color=_colour(1))
    figure.colorbar(drawn, ax=axes, label=label)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_yticks(range(len(rows)))
    axes.set_title(title, fontsize=10, loc="left")


def save(figure: Figure, path: Path | str) -> None:
    """Write the picture, whose kind its suffix tells.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _finish(axes: Axes, *, label: str, title: str, legend: bool) -> None:
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(visible=True, axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=7)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
