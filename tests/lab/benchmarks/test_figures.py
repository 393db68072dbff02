"""The figures of the documentation: drawn from the recorded rows, up to date, and readable."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.figures import README, picture
from lowbit.report import Report
from lowbit_lab.charts.charts import figure
from lowbit_lab.charts.style import THEMES
from tests.lab.charts.collisions import collisions

RESULTS = Path(__file__).parents[3] / "docs" / "results"
RECORDED = sorted((RESULTS / "data").glob("*.json"))
HASHED = re.compile(r'(?<=[#"])[a-zA-Z]+[0-9a-f]{10}(?=[")])')  # names of shapes, made from their numbers
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
SOURCES = (("srcset", "dark"), ("src", "light"))
ABSOLUTE_PATH = re.compile(r'"(?:/|[A-Z]:\\)')


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_figure_is_up_to_date(file: Path, tmp_path: Path):
    """Numbers may differ by a hundredth of a point: processors round layouts differently."""
    for written in picture(file).write(tmp_path):
        committed = RESULTS / "figures" / written.name
        assert committed.exists(), "draw it: python -m benchmarks figures"
        if written.suffix == ".svg":
            new, old = (HASHED.sub("", path.read_text()) for path in (written, committed))
            assert NUMBER.sub("0", new) == NUMBER.sub("0", old), "draw it: python -m benchmarks figures"
            numbers = zip(NUMBER.findall(new), NUMBER.findall(old), strict=True)
            assert all(abs(float(one) - float(other)) < 0.01 for one, other in numbers if one != other)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_text_of_a_figure_touches_nothing_and_stays_inside(file: Path, theme: Any):
    shown = picture(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert collisions(figure(shown.charts, shown.rows, theme)) == []


def test_pages_show_figures_that_are_there():
    """As a dark source and a light image, which GitHub and the site choose from."""
    assert RECORDED, "no recorded results: is the folder right?"
    for page in RESULTS.glob("*.md"):
        text = page.read_text()
        dark, light = (re.findall(rf'{word}="([^"]+)-{theme}\.svg"', text) for word, theme in SOURCES)
        assert dark == light, page.name
        assert text.count("<img") == len(light), page.name
        assert all((RESULTS / f"{name}-{theme}.svg").exists() for name in light for theme in THEMES), page.name


def test_recorded_rows_tell_nothing_of_a_machines_folders():
    assert [file.name for file in RECORDED if ABSOLUTE_PATH.search(file.read_text())] == []
    assert all(Report.read_json(file).machine["date"] for file in RECORDED)


def test_every_figure_has_its_recorded_rows():
    names = {picture(file).name for file in RECORDED}
    wanted = {f"{name}-{theme}.svg" for name in names for theme in THEMES} | {f"{README}.png"}
    assert {file.name for file in (RESULTS / "figures").iterdir()} == wanted


def test_the_command_draws_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "memory.json").write_bytes((RESULTS / "data" / "memory.json").read_bytes())
    BENCHMARKS("python -m benchmarks", ["figures", "--folder", str(tmp_path)])
    written = [tmp_path / "figures" / f"memory-{theme}.svg" for theme in THEMES]
    assert capsys.readouterr().out.split() == list(map(str, written))
    assert all(file.exists() for file in written)
