"""`python -m benchmarks.speeds`: its parts, what happens when one fails, and that they suffice to write every page."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import speeds
from benchmarks.__main__ import BENCHMARKS
from benchmarks.pages import ROOT, written
from benchmarks.speeds import PARTS, Part
from benchmarks.terminals import THEMES, drawn
from lowbit_run.cli.app import COMMANDS, Group

RECORD = {"command": "test", "settings": {}, "machine": {"date": "2026-01-01"}, "rows": [{"a": 1, "curve": [1]}]}
WRITES = f"import json, sys; json.dump({RECORD!r}, open(sys.argv[-1], 'w')); print('done')"
IN_A_FOLDER = (
    f"import json, os, sys; os.mkdir(sys.argv[-1]); json.dump({RECORD!r}, open(sys.argv[-1] + '/made.json', 'w'))"
)


def part(name: str, program: str, *, minutes: float = 1.0, made: str = "") -> Part:
    return Part(
        file=f"speeds/{name}.json", title="a test", program=("-c", program), minutes=minutes, made=made, output=""
    )


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("one", PARTS, ids=lambda part: part.name)
def test_options_of_parts_exist(one: Part, quick: bool, tmp_path: Path):
    words = one.command(tmp_path / "record.json", quick=quick, texts=tmp_path)[1:]
    assert words[0] == "-m"
    command = {"lowbit": COMMANDS, "benchmarks": BENCHMARKS}.get(words[1])
    words = words[2:]
    while isinstance(command, Group):
        command, words = command.commands()[words[0]], words[1:]
    if command:
        command.parser("lowbit").resolve(words)  # which checks the settings, too


def test_a_part_that_fails_or_hangs_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, wrote = tmp_path / "docs/results/data", list[Path]()
    (data / "speeds").mkdir(parents=True)
    (data / "speeds/fails.json").write_text("as before")
    monkeypatch.setattr(speeds, "write_pages", wrote.append)
    parts = [
        part("fails", "raise SystemExit('no such link')"),
        part("writes", WRITES),
        part("in-a-folder", IN_A_FOLDER, made="made.json"),
    ]  # fmt: skip
    assert speeds.sit(parts, tmp_path, quick=True, texts=None) == ["fails"]
    assert (data / "speeds/fails.json").read_text() == "as before"
    kept, made = (json.loads((data / f"speeds/{name}.json").read_text()) for name in ("writes", "in-a-folder"))
    assert kept["rows"] == RECORD["rows"]
    assert made["rows"] == [{"a": 1}]
    assert set(kept["machine"]) == {"date", "commit"}
    assert wrote == [tmp_path]


def test_a_part_is_ended_after_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speeds, "LEAST", 0.5)
    slow = part("slow", "import time; time.sleep(600)", minutes=0.0)
    assert speeds.run_part(slow, tmp_path, quick=True, texts=None) == "ended after its limit of 0 s"


def test_wrong_words_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words, said in (
        (["--parts", "race,rase"], "--parts has rase; allowed: pipeline, race"),
        (["--quick"], "--quick needs --root"),
        (["--texts", str(tmp_path)], "allowed: a folder with valid.txt and test.txt"),
    ):
        with pytest.raises(SystemExit):
            speeds.main(words)
        assert said in " ".join(capsys.readouterr().err.split())


def test_the_picture_of_two_terminals_has_their_lines():
    few = {"terminals": [["step 1/2  loss 5"], ["step 1/2  loss 6"]], "tokens_per_second": 6000.0,
           "bits_forward": 3.19, "bits_backward": 2.0}  # fmt: skip
    text = re.sub(r"<[^>]*>|&#160;", " ", drawn(few, {"tokens_per_second": 750.0}, THEMES["light"]))
    for shown in ("loss 5", "loss 6", "3.2 bits", "8.0 times as fast"):
        assert shown in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pages_are_written_from_a_quick_sitting(tmp_path: Path):
    """Of some parts: the others' figures stay."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    speeds.main(["--quick", "--root", str(tmp_path), "--parts", "race,codecs,terminals"])
    made = written(tmp_path)
    assert not [line for line in made.left if any(f"{name}.json" in line for name in ("race", "codecs", "terminals"))]
    assert {name: (tmp_path / name).read_text("utf-8") for name in made.pages} == made.pages
