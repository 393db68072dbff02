"""Labels next to points and curves, placed where they touch nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

NEAR = 16.0  # points: labels that are farther from their point get a line to it
_DISTANCES = (6.0, 11.0, NEAR, 24.0, 34.0, 46.0, 60.0, 76.0, 94.0)
_DIRECTIONS = ((1, 0), (0, -1), (0, 1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
_ALIGN = {-1: "right", 0: "center", 1: "left"}, {-1: "top", 0: "center", 1: "bottom"}
_GAP = 3.0  # pixels between a label and anything else


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
            arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
            if abs(height - y) > NEAR / 2 * scale else None,
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
