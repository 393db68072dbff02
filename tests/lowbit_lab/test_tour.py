"""A short tour of the laboratory for `make test`: each of its commands is there, and one measures from end to end."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from lowbit_lab.bench import COMMANDS
from lowbit_lab.network import Link
from lowbit_run.cli.commands import Measurement
from tests.command_line import invoke


def test_its_commands_join_those_of_the_library():
    shown = invoke("--help").stdout
    assert all(f"\n  {name} " in shown for name in ("demo", "calibrate", "evaluate", "bench"))
    shown = invoke("bench", "--help").output
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    for name, place in COMMANDS.items():
        command = Measurement(place).command
        assert command.name == f"bench {name}"
        assert command.tables, f"{name} shows no table"
    for package in ("bench.demo", "bench.workers", "evaluate", "network", "charts.results"):
        importlib.import_module(f"lowbit_lab.{package}")


def test_links_are_written_with_their_unit(monkeypatch: pytest.MonkeyPatch):
    pipeline = importlib.import_module("lowbit_lab.bench.pipeline")
    seen = []

    def measure(settings: object, earlier: object) -> None:
        seen.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(pipeline, "COMMAND", dataclasses.replace(pipeline.COMMAND, measure=measure))
    assert invoke("bench", "pipeline", "--link", "25mbit,1gbit/40ms,unlimited").stderr.endswith("error: enough\n")
    assert seen[0].links == (Link(25.0), Link(1000.0, rtt_ms=40), Link(None))
    assert "25mbit,100mbit" in invoke("bench", "pipeline", "--help").output


def test_a_benchmark_is_shown_written_drawn_and_put_on_a_page(tmp_path: Path):
    file, picture = tmp_path / "new" / "codecs.json", tmp_path / "codecs.png"
    result = invoke(
        *("bench", "codecs", "--codec", "bf16,GroupInt(bits=4, group=32)", "--data", "gaussian", "--dtype", "float32"),
        *("--shape", "1,4,64", "--thread", "1", "--rounds", "1", "--no-reference"),
        *("--json", str(file), "--png", str(picture)),
    )
    assert result.exit_code == 0, result.output
    assert "GroupInt(4, 32)" in result.stdout
    written = json.loads(file.read_text())
    assert written["command"] == "bench codecs"
    assert [row["codec"] for row in written["rows"]] == ["bf16", "GroupInt(bits=4, group=32)"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "GroupInt(bits=4, group=32)" in file.with_suffix(".html").read_text()
