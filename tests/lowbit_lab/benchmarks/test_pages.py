"""Pages and figures of the documentation: drawn from what is recorded, up to date, and readable."""

import re
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import concepts, which_model
from benchmarks.__main__ import BENCHMARKS
from benchmarks.concepts import TwoStageStep, message_seconds
from benchmarks.figures import README, picture
from lowbit_lab.charts.charts import figure
from lowbit_lab.charts.style import THEMES
from lowbit_run.report import Report
from tests.lowbit_lab.charts.collisions import collisions

RESULTS = Path(__file__).parents[3] / "docs" / "results"
RECORDED = sorted((RESULTS / "data").glob("*.json"))
HASHED = re.compile(r'(?<=[#"])[a-zA-Z]+[0-9a-f]{10}(?=[")])')  # names of shapes, made from their numbers
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
SOURCES = (("srcset", "dark"), ("src", "light"))
ABSOLUTE_PATH = re.compile(r'"(?:/|[A-Z]:\\)')


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_figure_is_up_to_date_and_its_text_touches_nothing(file: Path, tmp_path: Path):
    """Numbers may differ by a hundredth of a point: processors round layouts differently."""
    shown = picture(file)
    for written in shown.write(tmp_path):
        committed = RESULTS / "figures" / written.name
        assert committed.exists(), "draw it: python -m benchmarks figures"
        if written.suffix == ".svg":
            new, old = (HASHED.sub("", path.read_text()) for path in (written, committed))
            assert NUMBER.sub("0", new) == NUMBER.sub("0", old), "draw it: python -m benchmarks figures"
            numbers = zip(NUMBER.findall(new), NUMBER.findall(old), strict=True)
            assert all(abs(float(one) - float(other)) < 0.01 for one, other in numbers if one != other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for theme in THEMES.values():
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


def test_every_figure_has_recorded_rows_without_folders_of_a_machine():
    names = {picture(file).name for file in RECORDED}
    wanted = {f"{name}-{theme}.svg" for name in names for theme in THEMES} | {f"{README}.png"}
    assert {file.name for file in (RESULTS / "figures").iterdir()} == wanted
    assert [file.name for file in RECORDED if ABSOLUTE_PATH.search(file.read_text())] == []
    assert all(Report.read_json(file).machine["date"] for file in RECORDED)


def test_the_command_draws_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "memory.json").write_bytes((RESULTS / "data" / "memory.json").read_bytes())
    BENCHMARKS("python -m benchmarks", ["figures", "--folder", str(tmp_path)])
    written = [tmp_path / "figures" / f"memory-{theme}.svg" for theme in THEMES]
    assert capsys.readouterr().out.split() == list(map(str, written))
    assert all(file.exists() for file in written)


def test_messages_follow_one_another_on_the_link():
    each = TwoStageStep(forward=1, backward=2, activations=5, gradients=3, micro_batches=3)
    spans = {(span.lane, span.pass_, span.micro_batch): (span.start, span.end) for span in each.spans()}
    assert [spans["activations", "forward", i] for i in range(3)] == [(1, 6), (6, 11), (11, 16)]
    assert [spans["stage 1", "forward", i] for i in range(3)] == [(6, 7), (11, 12), (16, 17)]
    assert [spans["stage 1", "backward", i] for i in range(3)] == [(17, 19), (19, 21), (21, 23)]
    assert [spans["gradients", "backward", i] for i in range(3)] == [(19, 22), (22, 25), (25, 28)]
    assert [spans["stage 0", "backward", i] for i in range(3)] == [(22, 24), (25, 27), (28, 30)]
    assert each.seconds() == 30


def test_the_page_of_pipelines_shows_what_the_rules_give():
    """Next to measured seconds; see docs/results/distance.md."""
    page = (concepts.PAGES / "pipelines-and-links.md").read_text()
    computed = re.findall(r"^\|[^|]*\| (?:0|40|100) ms \| (\d\.\d\d) \| \d\.\d\d \|$", page, re.M)
    stages = [(32, 32, False), (5.35, 6.35, True)]
    expected = [
        concepts.step(forward, back, ahead=ahead, mbit=100, rtt=rtt).seconds()
        for forward, back, ahead in stages
        for rtt in (0, 0.04, 0.1)
    ]
    assert computed == [f"{seconds:.2f}" for seconds in expected]
    assert message_seconds(1024, 128, 32, 25) == pytest.approx(1024 * 128 * 32 / 23.9e6)  # what TCP leaves of the link


@pytest.mark.parametrize("name", concepts.PICTURES)
def test_pictures_of_concepts_are_drawn_from_what_is_recorded(name: str):
    concepts.figure_of(name, THEMES["light"], concepts.recorded()).draw_without_rendering()
    assert all((concepts.FIGURES / f"{name}-{theme}.svg").exists() for theme in THEMES)


def test_the_page_on_models_has_what_is_recorded_assumed_and_planned():
    rows, page, of = which_model.recorded(), which_model.PAGE.read_text("utf-8"), which_model
    assert {row["model"] for row in rows} == set(of.MODELS)
    assert of.with_tables(page, rows) == page, "write it: python -m benchmarks.which_model"
    page = " ".join(page.split())
    for text in (
        f"sustains {of.TFLOPS:.0f} TFLOP/s", f"decodes {of.CODING_GB_S:.0f} GB/s", f"keeps {of.RESERVED_GB} GB",
        f"{of.BATCH * of.SEQUENCE:,} tokens", f"{of.STEPS} steps", f"rank {of.LORA_RANK} ",
        f"round trips of {of.LINKS[10]} ms, at 1,000 Mbit/s {of.LINKS[1000]} ms",
    ):  # fmt: skip
        assert text in page
    fits = {row["model"]: row["fits"] for row in rows if row["method"] == "QLoRA"}  # as README says
    for least, model in ((8, "Llama-3.1-8B"), (12, "Qwen2.5-14B"), (24, "Qwen2.5-32B")):
        assert fits[model]["2"] <= least < (fits[model]["1"] or 99)
    name = next(iter(of.MODELS))
    planned: list[dict[str, Any]] = list(islice(of.rows_of(name), 3))  # as the planner still plans
    kept = [row for row in rows if row["model"] == name][:3]
    for new, old in zip(planned, kept, strict=True):
        numbers = {key for key, value in old.items() if isinstance(value, float)}
        assert {key: new[key] for key in numbers} == pytest.approx({key: old[key] for key in numbers}, rel=1e-3)
        assert {key: new[key] for key in old.keys() - numbers} == {key: old[key] for key in old.keys() - numbers}
