from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.train import ConfigError, train
from lowbit.train.checkpoints.save import CheckpointError
from lowbit.train.folder import MARK, RunFolder
from lowbit.train.prepare import prepare
from tests.train.runs import ONE, again, tiny


def everything(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_clearing_removes_what_is_noted_and_nothing_else(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert not folder.marked
    (tmp_path / "tensorboard").mkdir()  # the user's, though empty
    folder.note("config.json", "model/sub/a", "model/b", "tensorboard/events", "never-made")
    for name in ("config.json", "model/sub/a", "model/b", "model/precious", "tensorboard/events", "mine"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert folder.marked
    assert folder.foreign(["config.json", "mine", "model/precious", "absent"]) == ["mine", "model/precious"]
    folder.clear()
    assert everything(tmp_path) == {MARK, "mine", "model", "model/precious", "tensorboard"}
    assert folder.made() == set()
    folder.clear()
    assert everything(tmp_path) == {MARK, "mine", "model", "model/precious", "tensorboard"}


def test_a_foreign_mark_leads_nowhere_else(tmp_path: Path):
    outside, inside = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    inside.mkdir()
    (outside / "precious").write_text("x")
    (inside / "link").symlink_to(outside)
    (inside / "file").symlink_to(outside / "precious")
    made = ["../outside/precious", str(outside / "precious"), "link/precious", "link/", "file", "", ".", "/", 3, "../"]
    made += ["b\0", "\ud800", "x" * 300, "loop/x"]
    (inside / "loop").symlink_to("loop")
    others = ["nonsense", "[]", '{"made": 3}', "[" * 100_000, '{"process": 7}', "\xff"]
    (inside / MARK).write_text("\n".join([json.dumps({"made": made}), *others]))
    RunFolder(inside).clear()
    assert (outside / "precious").exists()
    assert everything(inside) == {MARK, "link", "loop"}, "of a link in the folder, the link"


def test_a_line_cut_short_takes_no_other_along(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.note("a")
    with (tmp_path / MARK).open("a") as file:
        file.write('{"made": ["b"')
    folder.note("c")
    folder.note("d")
    assert folder.made() == {"a", "c", "d"}


def test_files_are_adopted_or_left_where_they_are(tmp_path: Path):
    folder = RunFolder(tmp_path)
    for names in (("old", "both"), ("both", "new")):
        staging = folder.staging("model")
        for name in names:
            (staging / name).write_text(name)
        folder.adopt(staging, "model")
    assert everything(tmp_path) == {MARK, "model", "model/both", "model/new"}
    folder.staging("model")
    staging = folder.staging("model")  # an earlier attempt was ended
    (staging / "new").write_text("newer")
    (staging / "precious").write_text("lowbit's")
    (tmp_path / "model" / "precious").write_text("mine")
    with pytest.raises(FileExistsError, match=r"model/precious was not made by lowbit and stays; .* is in"):
        folder.adopt(staging, "model")
    assert (tmp_path / "model" / "precious").read_text() == "mine"
    assert (tmp_path / "model" / "new").read_text() == "new"
    folder.clear()
    assert everything(tmp_path) == {MARK, "model", "model/precious"}
    os.mkdir(tmp_path / staging.name)
    with pytest.raises(FileExistsError, match="was not made by lowbit, which needs this name"):
        folder.staging("model")


def test_a_run_overwrites_itself_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny(tmp_path, pipeline=ONE, run={"checkpoint_every": 1, "save_model": True, "tensorboard": True})
    output = Path(config.run.output)
    train(config)
    first = everything(output)
    foreign = {"model/precious.safetensors", "checkpoints/notes.txt", "tensorboard/mine", "mine"}
    for name in foreign:
        (output / name).write_text("precious")
    monkeypatch.chdir(output)
    train(again(config, run={"output": ".", "steps": 1, "checkpoint_every": 0}))
    second = everything(output)
    assert foreign <= second
    assert {(output / name).read_text() for name in foreign} == {"precious"}
    assert {name for name in second if "step-" in name} == set(), "checkpoints of the first run"
    assert {name for name in second if name.startswith("model/")} == {
        name for name in first if name.startswith("model/")
    } | {"model/precious.safetensors"}
    RunFolder(output).clear()
    kept = {MARK, "model", "checkpoints", "tensorboard", *foreign}
    assert everything(output) - {"cache"} == kept


@pytest.fixture
def other(tmp_path: Path):
    """Another process that trains into `tmp_path / "run"`, as far as the folder tells."""
    program = (
        "import sys; from pathlib import Path; from lowbit.train.folder import RunFolder; "
        "print(RunFolder(Path(sys.argv[1])).lock(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process
        process.kill()


def test_a_run_keeps_others_out_of_its_folder_for_as_long_as_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
):
    monkeypatch.setattr(RunFolder.lock, "__defaults__", (0,))
    monkeypatch.setattr(RunFolder.in_use, "__defaults__", (0,))
    config = tiny(tmp_path, pipeline=ONE)
    RunFolder(tmp_path / "run").note("summary.json")
    (tmp_path / "run" / "summary.json").write_text("theirs")
    text = rf"run.output '.*/run' is in use by process {other.pid} on \S+; allowed: another folder"
    with pytest.raises(ConfigError, match=text):
        prepare(config, ranks=1)
    monkeypatch.setattr("lowbit.train.prepare._launched", lambda: True)  # as a rank does
    with pytest.raises(CheckpointError, match=text):
        train(config)
    assert (tmp_path / "run" / "summary.json").read_text() == "theirs"
    os.kill(other.pid, signal.SIGKILL)
    other.wait(10)
    assert train(config).held_out_loss is not None
    train(config)  # the run before has let others in


def test_a_disk_without_locks_is_told_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        assert RunFolder(tmp_path).lock() == ""
    assert "cannot be locked (No locks available)" in caplog.text
    RunFolder(tmp_path).unlock()


def test_a_record_that_is_a_pipe_is_not_waited_for(tmp_path: Path):
    config = tiny(tmp_path)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / MARK)
    with pytest.raises(ConfigError, match="lowbit-run.jsonl that is not a regular file"):
        prepare(config, ranks=2)


def test_what_lies_behind_a_link_is_not_left_for_a_later_resume(tmp_path: Path):
    config = tiny(tmp_path, pipeline=ONE, run={"checkpoint_every": 3})
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    train(config)
    with pytest.raises(CheckpointError, match="step-00000003/rank-0 still exists, and a later run.resume would"):
        train(config)
    prepare(again(config, run={"overwrite": False, "resume": True}), ranks=1)
