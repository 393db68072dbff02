"""`lowbit bench ...`, `lowbit plan ...`: settings become options; reports are shown, written and drawn."""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowbit.config import section
from lowbit.report import Column, Command, Table, execute
from lowbit_lab.network import Link
from tests.command_line import invoke


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


def test_a_file_that_holds_no_rows_is_named(tmp_path: Path):
    file, other = tmp_path / "rows.json", '"settings": {}, "machine": {}, "rows"'
    foreign = "does not hold a report of `lowbit bench memory`: name another file"
    for text, reason in {
        "": "is not JSON (Expecting value: line 1 column 1 (char 0)): name another file",
        "[" * 20000: "is not JSON (maximum recursion depth",
        "[1]": foreign,
        f'{{"command": "bench codecs", {other}: []}}': foreign,
        f'{{"command": "bench memory", {other}: [{{"x": 1}}]}}': foreign,
    }.items():
        file.write_text(text)
        result = invoke("bench", "memory", "--json", str(file))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert result.stderr.startswith(f"error: {file} {reason}")


def test_a_log_hears_of_the_rows_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr("lowbit.report.command.time", SimpleNamespace(monotonic=lambda: next(seconds)))

    @section()
    class Settings:
        """None."""

    def measure(settings: object, earlier: object) -> Iterator[list[dict[str, int]]]:
        yield from ([{"x": 0}] * count for count in range(1, 8))

    command = Command(
        name="bench this", summary="", settings=Settings, measure=measure, tables=[Table(columns=[Column("x", "x")])],
    )  # fmt: skip
    execute(command, Settings())
    shown = capsys.readouterr()
    assert shown.err == "bench this: 3 rows after 30 s\nbench this: 6 rows after 60 s\n"
    assert shown.out.count("0") == 7
