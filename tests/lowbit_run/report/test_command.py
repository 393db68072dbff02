"""The runner that all commands share: rows as they come, files that are gone on with, comparisons."""

import io
import json
import math
import socket
import time as real_time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lowbit_run.report import (
    Baseline,
    Column,
    Command,
    Report,
    Row,
    Table,
    check_output,
    compare,
    execute,
    machine,
    run,
    spread,
    summary,
)
from tests.command_line import invoke


@dataclass(frozen=True)
class Sizes:
    dim: int = 2


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...] = ("fp32", "int4")
    rates: tuple[float | None, ...] = (100.0, None)
    folder: Path = Path("runs")
    model: Sizes = Sizes()


@dataclass(frozen=True)
class Required:
    name: str
    overwrite: bool = False


def measure(settings: Settings, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    rows = list(earlier)
    for name in settings.names:
        if name not in {row["name"] for row in rows}:
            rows.append({"name": name, "ms": 10 * len(name)})
            yield rows


COMMAND = Command(
    name="bench x", summary="Sleeps.", settings=Settings, measure=measure, key=("name",), free=("names",),
    baselines=[Baseline(field="speedup", value="ms", to={"name": "fp32"}, way="under")],
    tables=[Table(columns=[Column("name", "name"), Column("ms", "ms")])],
)  # fmt: skip


def test_rows_come_one_by_one_and_a_file_is_gone_on_with(tmp_path: Path):
    seen: list[int] = []
    run(COMMAND, Settings(), on_rows=lambda rows: seen.append(len(rows)))
    assert seen == [1, 2]
    file = tmp_path / "x.json"
    run(COMMAND, Settings(names=("int4",)), file=file)
    assert Report.read_json(file).rows[0]["speedup"] is None
    written: list[int] = []
    report = run(COMMAND, Settings(), file=file, on_rows=lambda rows: written.append(len(Report.read_json(file).rows)))
    assert written == [2]
    assert [row["name"] for row in report.rows] == ["int4", "fp32"]
    assert [row["speedup"] for row in report.rows] == [1.0, 1.0]
    assert run(COMMAND, Settings(), file=file).rows == report.rows


def test_rows_of_other_settings_are_not_mixed_in(tmp_path: Path):
    file = tmp_path / "x.json"
    run(COMMAND, Settings(), file=file)
    with pytest.raises(ValueError, match=r"holds rows with model.dim 2; this call has 3: name another file"):
        run(COMMAND, Settings(model=Sizes(3)), file=file)
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "machine": {**written["machine"], "cpu": "Other"}}))
    with pytest.raises(ValueError, match="holds rows that were measured with cpu 'Other'; here it is .*: name anot"):
        run(COMMAND, Settings(), file=file)
    del written["settings"]["model"]["dim"]
    file.write_text(json.dumps(written))
    run(COMMAND, Settings(), file=file)  # a setting that is newer than the file was as by default


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


def test_a_report_is_shown_and_written_by_the_first_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "new" / "x.json"
    execute(replace(COMMAND, key=()), Settings(), json=file)
    assert "int4" in capsys.readouterr().out
    assert json.loads(file.read_text())["command"] == "bench x"
    file.unlink()
    monkeypatch.setenv("RANK", "1")
    assert execute(COMMAND, Settings(), json=file).rows
    assert capsys.readouterr().out == ""
    assert not file.exists()


def test_a_log_hears_of_the_rows_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr("lowbit_run.report.command.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    execute(COMMAND, Settings(names=tuple("abcdefg")))
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "bench x: 1 row after 4 s, the newest: name a, ms 10",
        "bench x: 4 rows after 16 s, the newest: name d, ms 10",
        "bench x: 7 rows after 28 s, the newest: name g, ms 10",
    ]
    assert shown.out.count("10") == 7

    def slow(settings: Settings, earlier: Sequence[Row]) -> Iterator[list[Row]]:
        real_time.sleep(0.2)
        yield []

    monkeypatch.setattr("lowbit_run.report.command._SILENT_SECONDS", 0.01)
    execute(replace(COMMAND, measure=slow), Settings())
    assert capsys.readouterr().err == "bench x: measuring; rows follow as they come\n"


def test_an_outcome_that_cannot_be_written_is_said_before_the_run(tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "rows.json", Path("/dev/null"), Path("/proc/rows.json")):
        with pytest.raises(ValueError, match=f"^{path} cannot be written: "):
            execute(COMMAND, Settings(), json=path)
    check_output(tmp_path / "new" / "rows.json")
    assert not list((tmp_path / "new").iterdir())


def test_comparisons_are_with_the_row_that_is_alike():
    rows = [{"format": f, "link": link, "ms": ms} for f, link, ms in (("a", 1, 2.0), ("b", 1, 4.0), ("b", 2, 8.0))]
    base = Baseline(field="x", value="ms", to={"format": "a"}, alike=("link",))
    for way, expected in {"over": [1.0, 2.0], "under": [1.0, 0.5], "minus": [0.0, 2.0]}.items():
        assert [row["x"] for row in compare(rows, [replace(base, way=way)])] == [*expected, None]
    assert compare([{"format": "a", "link": 1}], [base])[0]["x"] is None
    # The spread is the interquartile range over the median.
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([1.0]) == 0
    assert summary([1.0, 3.0, 2.0], "ms") == {"ms": 2.0, "ms_low": 1.0, "ms_high": 3.0, "spread": 0.5, "rounds": 3}


def test_json_has_the_four_parts_and_is_read_back(tmp_path: Path):
    file = tmp_path / "new" / "r.json"
    values = {1.5: 1.5, math.nan: None, math.inf: None, -math.inf: None}  # JSON has no such numbers
    for value, read in values.items():
        row = {"boundary": "int4", "loss": value, "curve": [(1, value)]}
        Report(command="bench x", settings=Settings(), machine={"cores": 2}, rows=[row]).write_json(file)
        expected = [{"boundary": "int4", "loss": read, "curve": [[1, read]]}]
        assert Report.read_json(file).rows == expected
        assert json.loads(file.read_text()) == {
            "command": "bench x",
            "settings": {"names": ["fp32", "int4"], "rates": [100, None], "folder": "runs", "model": {"dim": 2}},
            "machine": {"cores": 2},
            "rows": expected,
        }
    assert [path.name for path in file.parent.iterdir()] == ["r.json"]
    file.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="does not hold a report"):
        Report.read_json(file)
    about = machine()  # is described, but not identified
    assert {"cpu", "cores", "torch", "python", "lowbit", "date"} <= set(about)
    for secret in (socket.gethostname(), str(Path.cwd())):
        assert secret not in json.dumps(about)


def shown(table: Table, rows: list[Row], width: int = 60) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table.render(rows))
    return console.export_text()


def test_a_narrow_terminal_breaks_between_words():
    rows: list[Row] = [{"layer": "encoder.attention.output.dense", "schedule": "Interleaved1F1B", "x": 1234.5}]
    columns = [Column("layer", "layer"), Column("schedule", "schedule"), Column("x", "x")]
    text = shown(Table(columns=columns), rows, 36)
    assert [line.split()[:1] for line in text.splitlines()[3:5]] == [["encoder."], ["attention."]]
    assert all(word in text for word in ("schedule", "Interleaved1F1B", "1234.5", "output."))
    text = shown(Table(columns=columns), rows, 26)
    assert "schedule  Interleaved1F1B" in text
    assert "x         1234.5" in text
    assert max(map(len, text.splitlines())) <= 26


def test_a_narrow_terminal_folds_no_numbers():
    names = [f"number\n{i}" for i in range(8)]
    columns = [Column("a format", "name"), *(Column(n, n) for n in names)]
    name = "GroupInt(bits=4, group=64, symmetric=True)"
    text = shown(Table(columns=columns), [{"name": name} | dict.fromkeys(names, 123.45)], 80)
    assert text.count("123.45") == text.count("number") == 8
    assert "…" not in text
    assert all(word in text for word in ("GroupInt(bits=4,", "group=64,", "symmetric=True)"))


def test_a_table_for_each_value_has_a_title_and_gaps_and_no_empty_columns():
    rows = [{"link": "a", "loss": 1.234, "gone": None}, {"link": "a", "loss": None}, {"link": "b", "loss": 2}]
    columns = [Column("Link", "link"), Column("Loss", lambda row: row["loss"], "{:.2f}"), Column("gone", "gone")]
    table = Table(
        columns=lambda rows: columns, title=lambda rows: rows[0]["link"] * 3, each="link", rows=lambda rows: rows[::-1]
    )
    text = shown(table, rows)
    assert text.index("bbb") < text.index("aaa")
    assert "gone" not in text
    assert text.splitlines()[-3:-1] == [" a        – ", " a     1.23 "]
    assert not Table(columns=[]).render([]).renderables


def test_results_of_other_settings_are_not_replaced_and_the_same_are_measured_again(tmp_path: Path):
    alone, file = replace(COMMAND, key=()), tmp_path / "x.json"
    first = run(alone, Settings(), file=file).rows
    assert [row["name"] for row in run(alone, Settings(), file=file).rows] == [row["name"] for row in first]
    with pytest.raises(ValueError, match=r"holds rows with model.dim 2; this call has 3: name another file"):
        run(alone, Settings(model=Sizes(3)), file=file)
    must = replace(alone, settings=Required, measure=lambda settings, rows: iter([[{"name": settings.name}]]))
    given, again = tmp_path / "y.json", Required(name="a")
    for settings in (again, replace(again, overwrite=True)):
        run(must, settings, file=given)
    with pytest.raises(ValueError, match=r"holds rows with name 'a'; this call has 'b': name another file"):
        run(must, Required(name="b"), file=given)
