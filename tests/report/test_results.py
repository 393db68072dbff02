import io
import json
import math
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from lowbit.report import Column, Report, Table, machine


@dataclass(frozen=True)
class Settings:
    rates: tuple[float | None, ...] = (100.0, None)
    folder: Path = Path("runs")


def report(**row: object) -> Report:
    return Report(command="bench x", settings=Settings(), machine={"cores": 2}, rows=[row])


def test_json_has_the_four_parts(tmp_path: Path):
    report(boundary="int4", loss=1.5, link_mbit=None).write_json(tmp_path / "new" / "r.json")
    assert json.loads((tmp_path / "new" / "r.json").read_text()) == {
        "command": "bench x",
        "settings": {"rates": [100.0, None], "folder": "runs"},
        "machine": {"cores": 2},
        "rows": [{"boundary": "int4", "loss": 1.5, "link_mbit": None}],
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.json"]


def test_json_is_read_back(tmp_path: Path):
    report(loss=1.5).write_json(tmp_path / "r.json")
    assert Report.read_json(tmp_path / "r.json").rows == [{"loss": 1.5}]
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="does not hold a report"):
        Report.read_json(tmp_path / "other.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_null(tmp_path: Path, value: float):
    report(loss=value, curve=[(1, value)]).write_json(tmp_path / "r.json")
    assert Report.read_json(tmp_path / "r.json").rows == [{"loss": None, "curve": [[1, None]]}]


def test_unwritable_file_says_so(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        report().write_json(tmp_path / "file" / "r.json")


def test_machine_is_described_but_not_identified():
    about = machine()
    assert {"cpu", "cores", "torch", "python", "lowbit", "date"} <= set(about)
    text = json.dumps(about)
    for secret in (socket.gethostname(), str(Path.cwd())):
        assert secret not in text


def test_a_narrow_terminal_folds_words_and_no_numbers():
    names = [f"number\n{i}" for i in range(8)]
    columns = [Column("a format", "name"), *(Column(n, n) for n in names)]
    name = "GroupInt(bits=4, group=64, symmetric=True)"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Table(columns=columns).render([{"name": name} | dict.fromkeys(names, 123.45)]))
    text = console.export_text()
    assert text.count("123.45") == text.count("number") == 8
    assert "…" not in text
    assert "".join(line[:24].strip() for line in text.splitlines()[4:]).replace(" ", "") == (name.replace(" ", ""))


def test_table_shows_values_and_gaps():
    columns = [Column("Boundary", "boundary"), Column("Loss", lambda row: row["loss"], "{:.2f}")]
    console = Console(width=60, record=True, file=io.StringIO())
    rows = [{"boundary": "int4", "loss": 1.234}, {"boundary": "bf16", "loss": None}]
    console.print(Table(columns=columns, title="Formats").render(rows))
    text = console.export_text()
    assert "Formats" in text
    assert "int4" in text
    assert text.splitlines()[-3:-1] == [" int4      1.23 ", " bf16         – "]


def test_a_table_for_each_value_with_a_title_and_without_empty_columns():
    rows = [{"link": "a", "ms": 1, "gone": None}, {"link": "b", "ms": 2, "gone": None}]
    table = Table(
        columns=lambda rows: [Column("ms", "ms"), Column("gone", "gone")], title=lambda rows: rows[0]["link"] * 3,
        each="link", rows=lambda rows: rows[::-1],
    )  # fmt: skip
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(table.render(rows))
    text = console.export_text()
    assert text.index("bbb") < text.index("aaa")
    assert "gone" not in text
    assert not Table(columns=[]).render([]).renderables
