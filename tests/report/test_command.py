"""The runner that all commands share: rows as they come, files that are gone on with, comparisons."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lowbit.report import (
    Baseline,
    Column,
    Command,
    Report,
    Row,
    Table,
    check_output,
    compare,
    execute,
    run,
    spread,
    summary,
)


@dataclass(frozen=True)
class Sizes:
    dim: int = 2


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...] = ("fp32", "int4")
    model: Sizes = Sizes()


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


def test_rows_come_one_by_one_with_their_comparisons():
    seen: list[int] = []
    report = run(COMMAND, Settings(), on_rows=lambda rows: seen.append(len(rows)))
    assert seen == [1, 2]
    assert [row["speedup"] for row in report.rows] == [1.0, 1.0]


def test_a_file_is_gone_on_with_and_written_whenever_a_row_comes(tmp_path: Path):
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
    del written["settings"]["model"]["dim"]
    file.write_text(json.dumps(written))
    run(COMMAND, Settings(), file=file)  # a setting that is newer than the file was as by default


def test_a_report_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    execute(replace(COMMAND, key=()), Settings(), json=tmp_path / "new" / "x.json")
    assert "int4" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "x.json").read_text())["command"] == "bench x"


def test_other_ranks_neither_show_nor_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "1")
    assert execute(COMMAND, Settings(), json=tmp_path / "x.json").rows
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "x.json").exists()


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
    assert [row["x"] for row in compare(rows, [base])] == [1.0, 2.0, None]
    assert [row["x"] for row in compare(rows, [replace(base, way="under")])] == [1.0, 0.5, None]
    assert [row["x"] for row in compare(rows, [replace(base, way="minus")])] == [0.0, 2.0, None]
    assert compare([{"format": "a", "link": 1}], [base])[0]["x"] is None


def test_spread_is_the_interquartile_range_over_the_median():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([1.0]) == 0
    assert summary([1.0, 3.0, 2.0], "ms") == {"ms": 2.0, "ms_low": 1.0, "ms_high": 3.0, "spread": 0.5, "rounds": 3}
