from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lowbit.cli.reports import Measurement
from lowbit_lab.charts import Bars, Heights, Lines, Points, Stacks
from lowbit_lab.charts.charts import Chart, draw, figure
from lowbit_lab.charts.results import check_picture, draw_results
from lowbit_lab.charts.style import DARK, LIGHT, THEMES, WIDTH
from tests.lab.charts.collisions import collisions

ROWS = [
    {"link": "25", "format": "fp32", "speed": 10.0, "slow": 9.0, "fast": 12.0, "curve": [(0, 3.0), (1, 2.0)]},
    {"link": "100", "format": "fp32", "speed": 40.0, "slow": 39.0, "fast": 41.0, "curve": [(0, 3.0)]},
    {"link": "25", "format": "int4", "speed": 60.0, "slow": 50.0, "fast": 70.0, "curve": [(0, 4.0)]},
    {"link": "100", "format": "int4", "speed": None, "slow": None, "fast": None, "curve": [(0, 4.0)]},
]
ENDS = {"low": 0.001, "y": 0.002, "high": 0.003}
SPEEDS = Bars(group="link", series="format", y="speed", low="slow", high="fast", label="tokens/s", title="Speed")


def drawn(chart: Chart, rows: Sequence[Any]) -> Figure:
    """The finished figure of a chart, whose text touches nothing."""
    made = figure([chart], rows)
    assert collisions(made) == []
    return made


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_panel_for_each_group_with_a_bar_for_each_value_and_none_for_none():
    first, second = drawn(SPEEDS, ROWS).axes
    bars = [[bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] for axes in (first, second)]
    assert bars == [[10.0, 60.0], [40.0]]
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["25", "100"]
    assert [text.get_text() for text in first.get_yticklabels()] == ["FP32", "INT4"]
    assert texts(first) == ["10", "60"]


def test_groups_of_one_bar_share_a_panel():
    show = "{speed:.0f} tokens/s".format_map
    chart = Bars(group="format", series=lambda row: "", y="speed", label="tokens/s", show=show)
    (axes,) = drawn(chart, ROWS[::2]).axes
    assert texts(axes) == ["10 tokens/s", "60 tokens/s"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["FP32", "INT4"]


def test_negative_bars_have_their_texts_on_the_left():
    rows = [{"name": "int4", "y": -0.5}, {"name": "int8", "y": 0.1}]
    (axes,) = drawn(Bars(group=lambda row: "", series="name", y="y", label="difference, %"), rows).axes
    assert [text.get_ha() for text in axes.texts] == ["right", "left"]


def test_a_format_has_the_same_colour_in_every_chart():
    for rows in (ROWS, ROWS[2:3]):
        bars = {c.get_label(): c.patches[0] for c in drawn(SPEEDS, rows).axes[0].containers if hasattr(c, "patches")}
        assert to_hex(bars["int4"].get_facecolor()) == LIGHT.formats["int4"]


def test_lines_of_rows_and_of_curves_and_points_by_themselves():
    axes = drawn(Lines(series="format", curve="curve", x_label="s", label="loss", note=lambda row: "end"), ROWS).axes[0]
    assert np.array_equal(axes.lines[0].get_xydata(), [[0.0, 3.0], [1.0, 2.0], [0.0, 3.0]])
    assert texts(axes) == ["FP32\nend", "INT4\nend"]
    rows = [{"link": 25, "speed": 10.0, "format": "x"}, {"link": 100, "speed": 40.0, "format": "x"}]
    chart = Lines(series="format", x="link", y="speed", alone=lambda row: row["link"] == 100, x_label="x", label="y")
    line, point = drawn(chart, rows).axes[0].lines
    assert line.get_ydata().tolist() == [10.0]
    assert (point.get_ydata().tolist(), point.get_linestyle()) == ([40.0], "None")


def test_a_logarithmic_axis_has_a_tick_at_every_place():
    rows = [{"tokens": tokens, "y": 1.0 + i, "name": "int4"} for i, tokens in enumerate((1, 16, 2048))]
    (axes,) = drawn(Lines(series="name", x="tokens", y="y", log_x=True, x_label="tokens", label="speed"), rows).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "16", "2,048"]


def test_parts_are_stacked_and_their_sum_is_written():
    rows = [{"name": "a", "one": 1.0, "two": 2.0}]
    (axes,) = drawn(Stacks(group="name", parts={"one": "one", "two": "two"}, label="MB"), rows).axes
    assert [bar.get_x() for bar in axes.patches] == [0.0, 1.0]
    assert texts(axes) == ["3"]


@pytest.mark.parametrize("far", [1, 100])
def test_points_have_ranges_and_labels_that_touch_nothing(far: int):
    rows = [
        {"name": f"format {i}", "bits": 4.0 + i / 3, **{name: far * i * end for name, end in ENDS.items()}}
        for i in range(9)
    ]
    chart = Points(
        series="name", x="bits", low="low", y="y", high="high", linear=0.01, x_label="bits", label="loss",
        x_ticks=(4, 8), y_ticks=(0.01, 1), zero="FP32",
    )  # fmt: skip
    (axes,) = drawn(chart, rows).axes
    assert sorted(texts(axes)) == ["FP32", *sorted(row["name"] for row in rows)]
    assert axes.get_yscale() == ("symlog" if far > 1 else "linear")


def test_titles_and_subtitles_come_from_the_rows():
    chart = Bars(
        group="link", series="format", y="speed", label="tokens/s", title=lambda rows: f"{len(rows)} rows " * 15,
        subtitle=lambda rows: f"fastest {max(row['speed'] or 0 for row in rows):.0f}",
    )  # fmt: skip
    made = drawn(chart, ROWS)
    written = [text.get_text() for part in made.subfigs for text in part.texts]
    assert written[-2] == "fastest 60"
    assert " ".join(written[:-2]) == ("4 rows " * 15).strip()


def test_charts_stand_one_below_the_other_in_the_width_of_a_page_and_repeat_to_the_byte(tmp_path: Path):
    one, two = figure([SPEEDS], ROWS), figure([SPEEDS, SPEEDS], ROWS)
    assert one.get_figwidth() == two.get_figwidth() == WIDTH
    assert two.get_figheight() > 1.8 * one.get_figheight()
    for name in ("a", "b"):
        draw([SPEEDS], ROWS, tmp_path / f"{name}.svg", theme=DARK)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_a_theme_colours_surface_and_text(theme: Any):
    made = figure([SPEEDS], ROWS, theme)
    assert to_hex(made.get_facecolor()) == to_hex(made.axes[0].get_facecolor()) == theme.surface
    assert {to_hex(text.get_color()) for text in made.axes[0].texts} == {theme.ink}


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
