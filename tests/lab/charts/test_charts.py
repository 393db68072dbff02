from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from lowbit.cli.commands import Measurement
from lowbit_lab.charts import Bars, Heights, Lines, Points
from lowbit_lab.charts.charts import Chart, draw, figure
from lowbit_lab.charts.results import check_picture, draw_results
from tests.lab.charts.collisions import collisions

ROWS = [
    {"link": "25", "format": "fp32", "speed": 10.0, "slow": 9.0, "fast": 12.0, "curve": [(0, 3.0), (1, 2.0)]},
    {"link": "100", "format": "fp32", "speed": 40.0, "slow": 39.0, "fast": 41.0, "curve": [(0, 3.0)]},
    {"link": "25", "format": "int4", "speed": 60.0, "slow": 50.0, "fast": 70.0, "curve": [(0, 4.0)]},
    {"link": "100", "format": "int4", "speed": None, "slow": None, "fast": None, "curve": [(0, 4.0)]},
]
SPEEDS = Bars(group="link", series="format", y="speed", low="slow", high="fast", label="tokens/s", title="Speed")


def drawn(chart: Chart, rows: Sequence[Any]) -> Figure:
    """The finished figure of a chart, whose text touches nothing."""
    made = figure([chart], rows)
    assert collisions(made) == []
    return made


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_negative_bars_have_their_texts_on_the_left():
    rows = [{"name": "int4", "y": -0.5}, {"name": "int8", "y": 0.1}]
    (axes,) = drawn(Bars(group=lambda row: "", series="name", y="y", label="difference, %"), rows).axes
    assert [text.get_ha() for text in axes.texts] == ["right", "left"]


def test_lines_of_rows_and_of_curves_and_points_by_themselves():
    axes = drawn(Lines(series="format", curve="curve", x_label="s", label="loss", note=lambda row: "end"), ROWS).axes[0]
    assert np.array_equal(axes.lines[0].get_xydata(), [[0.0, 3.0], [1.0, 2.0], [0.0, 3.0]])
    assert texts(axes) == ["FP32\nend", "INT4\nend"]
    rows = [{"link": 25, "speed": 10.0, "format": "x"}, {"link": 100, "speed": 40.0, "format": "x"}]
    chart = Lines(series="format", x="link", y="speed", alone=lambda row: row["link"] == 100, x_label="x", label="y")
    line, point = drawn(chart, rows).axes[0].lines
    assert line.get_ydata().tolist() == [10.0]
    assert (point.get_ydata().tolist(), point.get_linestyle()) == ([40.0], "None")


def test_collisions_are_told():
    made = Figure(figsize=(4, 2))
    for x, text in ((0.5, "one"), (0.51, "two"), (0.99, "beyond the edge")):
        made.text(x, 0.5, text)
    assert collisions(made) == ["'beyond the edge' leaves the canvas", "'one' overlaps 'two'"]


@pytest.mark.parametrize("rows", [[], ROWS])
def test_a_picture_of_whatever_there_is(tmp_path: Path, rows: list):
    heights = Heights(
        panel="link", values=lambda row: [1.0, row["speed"] or 2.0], marks=lambda row: [1], x_label="x", y_label="y",
        label="range",
    )  # fmt: skip
    draw([SPEEDS, heights], rows, tmp_path / "new" / "p.png")
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")


def test_curves_that_end_together_have_their_names_in_a_column():
    starts = {"fp32": 1.0, "bf16": 1.01, "int4": 3.0}
    rows = [{"name": name, "x": x, "y": y + x} for name, y in starts.items() for x in (0, 1)]
    (axes,) = drawn(Lines(series="name", x="x", y="y", x_label="s", label="loss"), rows).axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert texts(axes) == ["FP32", "BF16", "INT4"]
    assert len({round(box.x0) for box in boxes}) == 1
    assert all(box.x0 > axes.transData.transform((1, 0))[0] for box in boxes)
    assert [box.y0 for box in boxes] == sorted(box.y0 for box in boxes), "in the order of the curves"


def test_a_picture_is_checked_before_the_run(tmp_path: Path):
    with pytest.raises(ValueError, match=r"picture is '.*rows.json'; allowed: a file that ends in"):
        check_picture(tmp_path / "rows.json")
    with pytest.raises(ValueError, match="cannot be written"):
        check_picture(Path("/proc/rows.png"))
    check_picture(tmp_path / "new" / "rows.svg")


def test_plans_of_the_library_have_charts(tmp_path: Path):
    stage = {"held": 2, "bf16_bytes": 4e6, "saved_bytes": 1e6, "int4_bytes": 1e6, "norm": 8, "mlp": 4, "linear": 16}
    rows = [{"stage": number, **stage} for number in range(2)]
    draw_results(Measurement("lowbit.plan.memory").command, rows, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("far", [1, 100])
def test_points_have_ranges_and_labels_that_touch_nothing(far: int):
    rows = [
        {
            "name": f"format {i}",
            "bits": 4.0 + i / 3,
            **{name: far * i * end for name, end in (("low", 0.001), ("y", 0.002), ("high", 0.003))},
        }
        for i in range(9)
    ]
    chart = Points(
        series="name", x="bits", low="low", y="y", high="high", linear=0.01, x_label="bits", label="loss",
        x_ticks=(4, 8), y_ticks=(0.01, 1), zero="FP32",
    )  # fmt: skip
    (axes,) = drawn(chart, rows).axes
    assert sorted(texts(axes)) == ["FP32", *sorted(row["name"] for row in rows)]
    assert axes.get_yscale() == ("symlog" if far > 1 else "linear")
