from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from lowbit_lab.charts import Bars, Heights, Lines, Points
from lowbit_lab.charts.charts import Chart, balanced, draw, figure
from lowbit_lab.charts.results import check_picture, draw_results
from lowbit_lab.charts.style import THEMES, family, mixed, recommended, row_name, title_of
from lowbit_run.cli.commands import Measurement
from lowbit_run.report.page import coincide
from tests.lowbit_lab.charts.collisions import collisions

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


def test_bars_lines_of_rows_and_of_curves_and_points_by_themselves():
    rows: list[dict[str, Any]] = [{"name": "int4", "y": -0.5}, {"name": "int8", "y": 0.1}]
    (axes,) = drawn(Bars(group=lambda row: "", series="name", y="y", label="difference, %"), rows).axes
    assert [text.get_ha() for text in axes.texts] == ["right", "left"], "negative bars have theirs on the left"
    axes = drawn(Lines(series="format", curve="curve", x_label="s", label="loss", note=lambda row: "end"), ROWS).axes[0]
    assert np.array_equal(axes.lines[0].get_xydata(), [[0.0, 3.0], [1.0, 2.0], [0.0, 3.0]])
    assert texts(axes) == ["FP32\nend", "INT4\nend"]
    rows = [{"link": 25, "speed": 10.0, "format": "x"}, {"link": 100, "speed": 40.0, "format": "x"}]
    chart = Lines(series="format", x="link", y="speed", alone=lambda row: row["link"] == 100, x_label="x", label="y")
    line, point = drawn(chart, rows).axes[0].lines
    assert line.get_ydata().tolist() == [10.0]
    assert (point.get_ydata().tolist(), point.get_linestyle()) == ([40.0], "None")


def test_a_curve_below_another_is_seen_panels_begin_alike_and_numbers_keep_their_units():
    curve = [(i / 2, 5.0 - i / 10) for i in range(1, 9)]
    rows: list[Any] = [
        {"link": "25", "format": "fp32", "curve": curve},
        {"link": "25", "format": "auto", "curve": [(x, y + 0.001) for x, y in curve]},
        {"link": "100", "format": "fp32", "curve": [(x + 3, y) for x, y in curve]},
        {"link": "100", "format": "auto", "curve": [(x + 3, y / 2) for x, y in curve]},
    ]
    chart = Lines(panel="link", series="format", curve="curve", x_label="s", label="loss",
                  mark=lambda row: row["curve"][3])  # fmt: skip
    first, second = drawn(chart, rows).axes
    assert [line.get_linestyle() for line in first.lines if len(line.get_xdata()) > 1] == ["-", "--"]
    assert [line.get_linestyle() for line in second.lines if len(line.get_xdata()) > 1] == ["-", "-"]
    assert first.get_xlim()[0] == second.get_xlim()[0]
    assert (2.0, 4.6) in [tuple(line.get_xydata()[0]) for line in first.lines if len(line.get_xdata()) == 1]
    assert balanced("lowbit trains 8.5 times as fast over 25 Mbit/s and 2.1 times over 100 Mbit/s", 67) == [
        "lowbit trains 8.5 times as fast over", "25 Mbit/s and 2.1 times over 100 Mbit/s",
    ]  # fmt: skip
    assert not coincide(curve, [(x, 2 * y) for x, y in curve])
    assert not coincide(curve, curve[:1])


def test_triangles_have_a_legend():
    chart = Heights(values=lambda row: [1.0, 2.0], marks=lambda row: [1], marked="in bfloat16", x_label="x",
                    y_label="y", label="range")  # fmt: skip
    legend = drawn(chart, ROWS).axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["in bfloat16"]


def test_collisions_are_told():
    made = Figure(figsize=(4, 2))
    for x, text in ((0.5, "one"), (0.51, "two"), (0.99, "beyond the edge")):
        made.text(x, 0.5, text)
    assert collisions(made) == ["'beyond the edge' leaves the canvas", "'one' overlaps 'two'"]


@pytest.mark.parametrize("rows", [[], ROWS])
def test_a_picture_of_whatever_there_is(tmp_path: Path, rows: list):
    heights = Heights(
        panel="link", values=lambda row: [1.0, row["speed"] or 2.0], marks=lambda row: [1], marked="kept", x_label="x",
        y_label="y", label="range",
    )  # fmt: skip
    draw([SPEEDS, heights], rows, tmp_path / "new" / "p.png")
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_checked_first_and_plans_have_charts(tmp_path: Path):
    with pytest.raises(ValueError, match=r"picture is '.*rows.json'; allowed: a file that ends in"):
        check_picture(tmp_path / "rows.json")
    with pytest.raises(ValueError, match="cannot be written"):
        check_picture(Path("/proc/rows.png"))
    check_picture(tmp_path / "new" / "rows.svg")
    stage = {"held": 2, "bf16_bytes": 4e6, "saved_bytes": 1e6, "int4_bytes": 1e6, "norm": 8, "mlp": 4, "linear": 16}
    rows = [{"stage": number, **stage} for number in range(2)]
    draw_results(Measurement("lowbit_run.plan.memory").command, rows, tmp_path / "plan.png")
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


FAMILIES = {
    "TransformQuant(bits=4)": "transform", "tah-quant": "tah-quant",
    "TAH-Quant as published": "tah-quant-published", "tah-quant-published-token": "tah-quant-published",
    "stock-fp32": "stock-fp32", "PyTorch's stage, FP32": "stock-fp32", "engine-bf16": "stock-bf16", "fp32": "fp32",
    "int8 / int4": "int8", "GroupInt(bits=6, group=32, symmetric=True)": "int6", "low-bit+8bit": "low-bit",
    "feature-int4 one_shot": "feature-int", "feature-int4-static two_shot": "feature-int-static",
    "saved activations": "saved", "gradients": "gradients", "code": None,
}  # fmt: skip
TITLES = {
    "fp32": "FP32", "stock-bf16": "PyTorch's stage, BF16",
    "int8 / int8": "INT8 both ways", "tah-quant / int8": "TAH-Quant by range (ours) / INT8",
    "tah-quant-published-token": "TAH-Quant as published, by token",
    "feature-int4 one_shot": "FeatureInt, 4 bits, one-shot", "low-bit+8bit": "low-bit+8bit",
    "feature-int4-static two_shot": "static ranges, as published, two-shot",
}  # fmt: skip


def test_families_and_names_of_series():
    assert {name: family(name) for name in FAMILIES} == FAMILIES
    assert all(wanted is None or wanted in theme.formats for wanted in FAMILIES.values() for theme in THEMES.values())
    assert {name: title_of(name) for name in TITLES} == TITLES
    # No row of a table passes our setting off as the published format.
    assert row_name("tah-quant") == "tah-quant (ours, by range)"
    assert row_name("int4 / TAHQuant()") == "int4 / TAHQuant() (ours, by range)"
    for name in ("tah-quant-published", "tah-quant-published-token", "tah-quant-token", "TAHQuant(tile=32)", "int4"):
        assert row_name(name) == name
    assert title_of("TAHQuant()") == title_of("tah-quant") != title_of("tah-quant-published")


def test_mixed_and_recommended():
    assert mixed("#000000", "#ffffff", 0.5) == "#808080"
    rows = [{"format": "fp32"}, {"format": "TransformQuant()"}]
    assert recommended(rows, "format") == rows[1]
    assert recommended(rows[:1], "format") is None


def contrast(one: str, other: str) -> float:
    levels = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        levels.append(0.05 + sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return max(levels) / min(levels)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_text_and_recommended_formats_can_be_read(theme: Any):
    assert all(contrast(colour, theme.surface) > 4.5 for colour in (theme.ink, theme.muted))
    assert all(contrast(theme.formats[name], theme.surface) > 4.5 for name in ("transform", "feature-int"))
    assert all(contrast(colour, theme.surface) > 1.5 for colour in theme.formats.values())
    baselines = [theme.formats[name] for name in ("stock-fp32", "stock-bf16", "fp32", "bf16", "fp16")]
    assert all(contrast(one, other) > 1.15 for one, other in combinations(baselines, 2))


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.pdf"])
def test_a_picture_of_the_user_is_kept_and_one_of_a_command_replaced(tmp_path: Path, name: str):
    theirs, ours = tmp_path / f"their-{name}", tmp_path / name
    theirs.write_bytes(b"their picture")
    with pytest.raises(ValueError, match="exists and is not marked as drawn by lowbit"):
        check_picture(theirs)
    for _ in range(2):
        check_picture(ours)
        draw_results(Measurement("lowbit_lab.bench.codecs").command, [], ours)
