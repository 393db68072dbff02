"""Pages of runs and results: what they say, what they escape, and what they make of broken folders."""

import gzip
import html
import json
import re
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("plotly")

from lowbit_run.cli.commands import write
from lowbit_run.report.page import own_times, thinned
from lowbit_run.report.training import verdict
from tests.command_line import invoke
from tests.reports import HOSTILE, make_results, make_run, make_trace

TABLE = re.compile(r"<tr>(.*?)</tr>", re.S)
CELL = re.compile(r"<t[dh][^>]*>(.*?)</t[dh]>", re.S)


def _figures(text: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json" data-figure="[\w-]+">(.*?)</script>', text, re.S)
    return [json.loads(each) for each in found]


def _rows(text: str) -> list[list[str]]:
    return [[html.unescape(cell) for cell in CELL.findall(row)] for row in TABLE.findall(text)]


def _page(*paths: Path, output: Path | None = None) -> str:
    return write(paths, output).read_text()


def _trace_of(text: str, name: str) -> dict[str, Any]:
    return next(trace for figure in _figures(text) for trace in figure["data"] if trace["name"] == name)


def test_a_run_has_its_losses_settings_and_versions(tmp_path: Path):
    text = _page(make_run(tmp_path / "run"))
    markup = re.sub(r'<script type="(?:text/plain|application/json)".*?</script>', "", text, flags=re.S)
    assert not re.search(r"https?:", markup), "nothing is fetched"
    assert "default-src 'none'" in markup
    assert len(text) < 3_000_000
    loss = _trace_of(text, "run")
    assert loss["x"] == list(range(1, 41))
    assert loss["y"] == [5 - i / 20 for i in range(1, 41)]
    held_out = _trace_of(text, "run, held-out")
    assert (held_out["x"], held_out["y"]) == ([20], [4.125])
    rows = _rows(text)
    assert ["training loss", "3.1250"] in rows
    assert ["pipeline.forward", "transform"] in rows
    assert ["0", "A processor", "2", "3.11.7", "2.13.0", "0.1.0"] in rows
    assert ["0 to 1", "0.025", "1.0", "10.0", "10%"] in rows, "as last measured"
    assert _trace_of(text, "0 to 1, measured")["y"] == [100.0] * 20 + [10.0] * 20
    assert _trace_of(text, "0 to 1, used")["y"] == [1.0] * 40
    assert "1 to 0, measured" not in text
    assert ["1", "1", "2.00", "4.00", "–", "0.10", "0.00", "–", "900.00"] in rows
    assert ["0", "layer 0", "1,000"] in rows


@pytest.mark.parametrize(
    ("seconds", "nbytes", "said"),
    [
        ((0.2, 0.1, 1.7), 22e6, ("ranks waited 1.7 for messages: the busiest link carried 88%", "Fewer bits")),
        ((0.2, 0.1, 1.7), 1e6, ("though the busiest link carried only 4% of its rate", "Round trips or uneven stages")),
        ((0.2, 0.1, 1.7), None, ("or for each other", "lowbit plan pipeline")),
        ((1.0, 0.9, 0.1), 1e6, ("Coding took 0.9 of 2 seconds", "A cheaper format")),
        ((1.9, 0.05, 0.05), 1e6, ("Computing took 1.9 of 2 seconds", "The network is not what limits")),
        ((20.4, 7.2, 83.2), None, ("Of 111 seconds of a step, ranks waited 83 for messages", "or for each other")),
        ((0.12, 0.00002, 0.00001), None, ("Computing took 0.12 of 0.12 seconds of a step, waiting 0.00001.",)),
    ],
)
def test_a_run_is_told_in_short(
    seconds: tuple[float, ...], nbytes: float | None, said: tuple[str, ...], tmp_path: Path
):
    line = {"seconds": 2.0, "links": {"0 to 1": nbytes} if nbytes else {}}
    links = [{"link": "0 to 1", "mbit": 100.0}]
    named = zip(("compute_seconds", "codec_seconds", "wait_seconds"), seconds, strict=True)
    summary = {"held_out_loss": 2.1213, "tokens_per_second": 1402.0, **dict(named)}
    run: Any = SimpleNamespace(steps=[line] * 40, summary=summary, ranks={"links": links})
    (part,) = verdict(run)
    for each in ("40 steps ended with a held-out loss of 2.1213 nats, at 1,402 tokens a second.", *said):
        assert each in part.text
    assert next(verdict(SimpleNamespace(steps=[], summary={}, ranks={}))).text == ""  # pyright: ignore


def test_a_step_is_drawn_and_long_curves_are_averaged(tmp_path: Path):
    text = _page(make_run(tmp_path / "run"))
    forward = next(t for f in _figures(text) for t in f["data"] if t["name"] == "compute" and "base" in t)
    assert forward["y"] == ["rank 0", "rank 0", "rank 1", "rank 1"]
    assert forward["base"][:2] == [0.02, 0.4]
    assert forward["x"][:2] == [0.3, 0.2]
    assert _trace_of(text, "sending")["y"] == ["0 → 1", "1 → 0"]
    assert ["0", "0.40", "0.10", "0.50"] in _rows(text)  # compute, waiting, rest
    assert own_times([e for e in make_trace(1)["traceEvents"] if e["tid"] == 0]) == {
        "rest": 1000.0, "compute": 800.0, "waiting": 200.0,
    }  # fmt: skip
    curve = [(float(i), float(i % 2)) for i in range(1, 5001)]
    assert thinned(curve, 2000)[:2] == [(3.0, pytest.approx(2 / 3)), (6.0, pytest.approx(1 / 3))]
    assert thinned(curve[:7], 2000) == curve[:7]


def test_two_runs_are_compared_whatever_a_third_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one")
    make_run(tmp_path / "three", steps=17, ended=False)
    outcome = invoke("report", "one", "three", "gone")
    assert (outcome.exit_code, outcome.stdout) == (0, "comparison.html\n")
    text = (tmp_path / "comparison.html").read_text()
    assert "gone does not exist; allowed: the folder of a run" in text
    first = _figures(text)[0]
    assert [trace["name"] for trace in first["data"]] == ["one", "one, held-out", "three", "three, held-out"]
    assert [len(trace["x"]) for trace in first["data"]] == [40, 1, 17, 1]
    rows = _rows(text)
    assert ["steps", "40", "17"] in rows
    assert ["training loss", "3.1250", "4.3750"] in rows, "of the interrupted run that of the last 10 steps"
    assert ["run.seed", "3", "5"] in rows
    assert not any(row[0] == "data.text" for row in rows), "the same in both"


def test_hostile_names_are_texts(tmp_path: Path):
    folder = make_run(tmp_path / HOSTILE.replace("/", ""), text=HOSTILE, ended=False)
    text = _page(folder) + _page(folder, make_run(tmp_path / "other"), output=tmp_path / "c.html")
    assert "alert" in text
    assert not re.search(r"<script>alert|<img src=x", text)
    assert len(re.findall(r"<script(?! type=)", text)) == 2, "one of ours in each page"
    names = [trace["name"] for figure in _figures(text) for trace in figure["data"]]
    assert any("&lt;script>" in name for name in names)
    assert not any("<" in name for name in names), "Plotly takes some HTML"


def test_results_have_tables_speeds_and_pictures(tmp_path: Path):
    text = _page(make_results(tmp_path / "speed.json"))
    assert (tmp_path / "speed.html").exists()
    curves = {trace["name"]: (trace["x"], trace["y"]) for trace in _figures(text)[0]["data"]}
    assert curves == {"fp32": ([25.0, 100.0], [250.0, 1000.0]), "transform": ([25.0, 100.0], [2000.0, 8000.0])}
    assert ["25 Mbit/s", "transform", "2,000", "0%", "8.00x"] in _rows(text)
    assert text.count("data:image/svg+xml") == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        without = html.unescape(_page(tmp_path / "speed.json"))
    assert ["25 Mbit/s", "transform", "2,000", "0%", "8.00x"] in _rows(without)
    assert 'charts need matplotlib: pip install "lowbit[lab]"' in without
    lossy = json.loads((tmp_path / "speed.json").read_text())
    lossy["rows"] += [{**row, "link": f"{row['link']}/1%"} for row in lossy["rows"]]
    (tmp_path / "lossy.json").write_text(json.dumps(lossy))
    titles = "Speed against bandwidth"
    assert titles in text
    assert titles not in _page(tmp_path / "lossy.json"), "two links of a rate are no curve"
    other = make_results(tmp_path / "slow.json")
    other.write_text(other.read_text().replace('"seed": 0', '"seed": 1'))
    assert ["seed", "0", "1"] in _rows(_page(tmp_path / "speed.json", other, output=tmp_path / "both.html"))


@pytest.mark.parametrize(
    ("name", "cells", "pictures"),
    [
        # A benchmark of developers.
        ("race", ["25 Mbit/s", "transform", "{target_loss:.4f}", "{seconds_to_loss:.1f}"], 2),
        ("gradients", ["100mbit", "fp8"], 2),  # recorded before rows had what its tables show; the chart needs less
    ],
)
def test_recorded_results_have_their_columns_and_charts(name: str, cells: list[str], pictures: int, tmp_path: Path):
    record = Path("docs/results/data", f"{name}.json").absolute()
    text = _page(record, output=tmp_path / "page.html")
    recorded = json.loads(record.read_text())["rows"][-1]
    assert any({cell.format(**recorded) for cell in cells} <= set(row) for row in _rows(text))
    assert text.count("data:image/svg+xml") == pictures


def test_results_of_another_version_are_shown_as_they_are(tmp_path: Path):
    file = tmp_path / "old.json"
    values = {"command": "bench pipeline", "settings": {}, "machine": {}, "rows": [{"boundary": "fp32", "speed": 7.5}]}
    file.write_text(json.dumps(values))
    text = _page(file)
    assert "cannot be made from these rows" in text
    assert ["fp32", "7.5"] in _rows(text)
    file.write_text(json.dumps(values | {"command": "gone", "rows": [{"x": 1}]}))
    assert ["1"] in _rows(_page(file))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"summary.json": None}, "did not end: 40 of 40 steps"),
        ({"config.json": b"[1"}, "config.json cannot be read"),
        ({"summary.json": b"[]"}, "summary.json cannot be read and is left out: it holds no object"),
        ({"metrics.jsonl": b'{"step": 1, "loss": 2.5}\n{"loss": 3}\nxx\n{"step": 2, "lo'}, "2 lines cannot be read"),
        ({"metrics.jsonl": b'{"step": 1e999}\n{"step": ' + b"[" * 10**5 + b"}\n"}, "2 lines cannot be read"),
        ({"metrics.jsonl": b'{"step": 1, "loss": 1' + b"0" * 400 + b', "links": 3}\n'}, "The links of this run"),
        ({"config.json": b'{"run": 3, "model": []}', "summary.json": None}, "did not end: 40 steps"),
        ({"ranks.json": b'{"machines": [3, {"ranks": {}}], "memory": [{"stages": 1}, 7]}'}, "The machines of this run"),
        ({"evaluations.jsonl": b"\xff\n"}, "evaluations.jsonl: 1 line cannot be read"),
        ({"trace/all-ranks.json.gz": b"\x1f\x8b broken"}, "all-ranks.json.gz cannot be read"),
        ({"trace/all-ranks.json.gz": gzip.compress(b'{"traceEvents": [{"ph": "X"}]}')}, "all-ranks.json.gz cannot be"),
        ({"trace/all-ranks.json.gz": gzip.compress(b'{"traceEvents": [{"ph": "X", "name": "a", "cat": "a", "args": 3, '
                                                   b'"ts": 1, "dur": 1, "pid": 0, "tid": 0}]}')}, "gz cannot be read"),
        ({"metrics.jsonl": b'{"step": 1, "loss": NaN, "tokens_per_second": 1e999}\n'}, "training loss"),
        ({"metrics.jsonl": b'{"step": 1, "loss": 2.0}\n{"step": "3", "loss": 2.0}\n'}, "metrics.jsonl: 1 line cannot"),
    ],
)  # fmt: skip
def test_what_is_left_of_a_broken_run_is_shown(tmp_path: Path, damage: dict[str, bytes | None], said: str):
    folder = make_run(tmp_path / "run")
    for name, data in damage.items():
        (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
    text = html.unescape(_page(folder))
    assert said in text
    assert "NaN" not in json.dumps(_figures(text))


@pytest.mark.parametrize(
    ("unit", "count", "said"),
    [(b" " * (1 << 20), 400, "it has more than 64 MiB"), (b"[]," * (1 << 20), 16, "values; allowed: at most 4000000")],
)
def test_a_trace_that_unpacks_to_more_than_it_can_be_is_left_out(tmp_path: Path, unit: bytes, count: int, said: str):
    folder = make_run(tmp_path / "run")
    with gzip.open(folder / "trace" / "all-ranks.json.gz", "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(count):
            file.write(unit)
        file.write(b"0]}")
    tracemalloc.start()
    text = html.unescape(_page(folder))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert said in text
    assert most < 200 << 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "nothing does not exist; allowed: the folder of a run or a file of results"),
        (["empty"], "empty holds no run of lowbit that can be shown"),
        (["foreign.json"], "foreign.json does not hold a report that lowbit wrote"),
        (["run", "speed.json"], "runs and files of results are given"),
        (["run", "--output", "mine.html"], "mine.html exists and was not written by lowbit"),
        ([], "required: RUN"),
    ],
)
def test_a_wrong_call_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], said: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.json").write_text("{}")
    (tmp_path / "mine.html").write_text("<p>mine")
    make_run(tmp_path / "run")
    make_results(tmp_path / "speed.json")
    outcome = invoke("report", *words)
    assert (outcome.exit_code, len(outcome.stderr.splitlines())) == (2, 1)
    assert said in outcome.stderr
    assert (tmp_path / "mine.html").read_text() == "<p>mine"


def test_a_page_of_results_does_not_make_their_folder_a_run(tmp_path: Path):
    make_results(tmp_path / "report.json")
    assert invoke("report", str(tmp_path / "report.json")).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_a_page_of_a_run_is_recorded_as_made_by_lowbit_and_one_of_the_user_is_kept(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    page, record = folder / "report.html", folder / "lowbit-run.jsonl"
    assert invoke("report", str(folder)).stdout == f"{page}\n"
    assert "report.html" in record.read_text()
    assert invoke("report", str(folder)).exit_code == 0, "our own page is replaced"
