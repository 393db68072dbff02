from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lowbit.report import Bars, Heights, Lines, Points, Stacks
from lowbit.report.charts import COLOURS, FORMATS, Chart, draw

ROWS = [
    {"link": "25", "format": "fp32", "speed": 10.0, "curve": [(0, 3.0), (1, 2.0)]},
    {"link": "100", "format": "fp32", "speed": 40.0, "curve": [(0, 3.0)]},
    {"link": "25", "format": "int4", "speed": 60.0, "curve": [(0, 4.0)]},
    {"link": "100", "format": "int4", "speed": None, "curve": [(0, 4.0)]},
]
SPEEDS = Bars(group="link", series="format", y="speed", label="tokens/s", title="Speed")


def drawn(chart: Chart, rows: Sequence[Any]) -> Any:
    """The figure's panels, after it was drawn."""
    figure = Figure(layout="constrained")
    (part,) = figure.subfigures(1, 1, squeeze=False)[0]
    chart.fill(part, rows)
    figure.draw_without_rendering()
    return part


def test_a_bar_for_each_value_and_none_for_none():
    part = drawn(SPEEDS, ROWS)
    (axes,) = part.axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert sorted(bar.get_height() for bar in bars) == [10.0, 40.0, 60.0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["25", "100"]
    assert (axes.get_ylabel(), axes.get_title(loc="left")) == ("tokens/s", "Speed")
    assert [text.get_text() for text in part.legends[0].get_texts()] == ["fp32", "int4"]


def test_formats_have_their_colours_in_every_chart_and_others_have_different_ones():
    for rows in (ROWS, ROWS[2:]):
        bars = drawn(SPEEDS, rows).axes[0].containers
        colours = {bar.get_label(): bar.patches[0].get_facecolor()[:3] for bar in bars}
        assert colours["int4"] == pytest.approx(tuple(int(FORMATS["int4"][i : i + 2], 16) / 255 for i in (1, 3, 5)))
    rows = [{"x": i, "y": i, "name": f"int4 {i}"} for i in range(len(COLOURS))]
    lines = drawn(Lines(series="name", x="x", y="y", x_label="x", label="y"), rows).axes[0].lines
    assert len({line.get_color() for line in lines}) == len(COLOURS)


def test_lines_of_rows_and_of_curves_and_points_by_themselves():
    (line, _) = drawn(Lines(series="format", curve="curve", x_label="s", label="loss"), ROWS[::2]).axes[0].lines
    assert np.array_equal(line.get_xydata(), [[0.0, 3.0], [1.0, 2.0]])
    chart = Lines(series="format", x="link", y="speed", alone=lambda row: row["link"] == "100", x_label="x", label="y")
    line, point = drawn(chart, ROWS[:2]).axes[0].lines
    assert line.get_ydata().tolist() == [10.0]
    assert (point.get_ydata().tolist(), point.get_linestyle()) == ([40.0], "None")


def test_parts_are_stacked_and_their_sum_is_written():
    rows = [{"name": "a", "one": 1.0, "two": 2.0}]
    (axes,) = drawn(Stacks(group="name", parts={"one": "one", "two": "two"}, label="MB"), rows).axes
    assert [bar.get_y() for bar in axes.patches] == [0.0, 1.0]
    assert [text.get_text() for text in axes.texts] == ["3"]


def test_points_have_ranges_and_a_legend_outside_the_axes():
    rows = [{"name": f"format {i}", "bits": 4.0 + i, "low": 0.1 * i, "y": 0.2 * i, "high": 0.3 * i} for i in range(12)]
    chart = Points(
        series="name",
        x="bits",
        low="low",
        y="y",
        high="high",
        linear=0.01,
        x_label="bits",
        label="loss",
        x_ticks=(4, 8),
        y_ticks=(0.01, 1),
    )
    part = drawn(chart, rows)
    (axes,), (legend,) = part.axes, part.legends
    assert len(legend.get_texts()) == 12
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


@pytest.mark.parametrize("rows", [[], ROWS])
def test_a_picture_of_whatever_there_is(tmp_path: Path, rows: list):
    heights = Heights(
        panel="link", values=lambda row: [1.0, row["speed"] or 2.0], marks=lambda row: [1], x_label="x", y_label="y",
        label="range",
    )  # fmt: skip
    draw([SPEEDS, heights], rows, tmp_path / "new" / "p.png")
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")
