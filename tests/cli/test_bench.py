"""`lowbit bench ...`: settings become options, reports are shown, written and drawn."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowbit.bench import Report
from lowbit.cli import app
from lowbit.cli.bench import BENCHMARKS, check_output
from lowbit.cli.options import explanations

WIDE = {"COLUMNS": "160", "TERM": "dumb"}


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments], env=WIDE)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_setting_is_an_option_and_explained(name: str):
    settings = importlib.import_module(f"lowbit.bench.{BENCHMARKS[name].module}").Settings
    fields = [field.name for field in dataclasses.fields(settings)]
    assert [field for field in fields if field not in explanations(settings)] == []
    shown = invoke(name, "--help")
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("--") >= len(fields)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_report_can_be_shown_and_drawn(name: str):
    views = importlib.import_module(f"lowbit.bench.{BENCHMARKS[name].views}")
    assert callable(views.show)
    assert callable(views.draw)


def test_a_report_is_shown_written_and_drawn(tmp_path: Path):
    file, picture = tmp_path / "new" / "codecs.json", tmp_path / "codecs.png"
    result = invoke(
        *("codecs", "--codec", "bf16,GroupInt(bits=4, group=32)", "--data", "gaussian", "--dtype", "float32"),
        *("--shape", "1,4,64", "--thread", "1", "--rounds", "1", "--no-reference"),
        *("--json", str(file), "--png", str(picture)),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "GroupInt(4, 32)" in result.stdout
    written = json.loads(file.read_text())
    assert written["command"] == "bench codecs"
    assert [row["codec"] for row in written["rows"]] == ["bf16", "GroupInt(bits=4, group=32)"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_links_are_written_with_their_unit(monkeypatch: pytest.MonkeyPatch):
    pipeline = importlib.import_module("lowbit.bench.pipeline")
    seen = []

    def run(settings: object, **_: object) -> Report:
        seen.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(pipeline, "run", run)
    assert invoke("pipeline", "--link", "25mbit,1gbit,unlimited").stderr.endswith("error: enough\n")
    assert seen[0].links == (25.0, 1000.0, None)
    assert "25mbit,100mbit" in invoke("pipeline", "--help").output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("pipeline", "--link", "fast"), "link is 'fast'; allowed:"),
        (("pipeline", "--boundary", "int9"), "codec is 'int9'; allowed:"),
        (("codecs", "--rounds", "0"), "rounds is 0; allowed: at least 1"),
        (("convergence", "--seed", "a"), "seeds has 'a'; allowed: integers, between commas"),
    ],
)
def test_bad_settings_are_one_line(arguments: tuple[str, ...], line: str):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert line in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_outcome_that_can_not_be_written_is_said_before_the_run(tmp_path: Path):
    result = invoke("codecs", "--json", str(tmp_path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path} can not be written" in result.stderr
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        check_output(tmp_path / "file" / "rows.json")
