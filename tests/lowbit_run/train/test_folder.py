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

from lowbit_run.train import folder, train
from lowbit_run.train.checkpoints.save import CheckpointError
from lowbit_run.train.folder import MARK, RunFolder
from tests.lowbit_run.train.runs import ONE, again, tiny


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
    folder.clear()
    assert everything(tmp_path) == {MARK, "mine", "model", "model/precious", "tensorboard"}


def test_lines_of_a_record_that_are_damaged_or_lead_elsewhere_are_ignored(tmp_path: Path):
    outside, folder = tmp_path / "precious", RunFolder(tmp_path / "run")
    outside.write_text("x")
    folder.note("a")
    made = ["../precious", str(outside), "", ".", "/", 3, "../", "b\0", "\ud800", "x" * 300]
    for line in (json.dumps({"made": made}), "[]", '{"made": 3}', "[" * 100_000, "\xff", '{"made": ["cut short"'):
        with (folder.path / MARK).open("a", errors="surrogateescape") as file:
            file.write(f"\n{line}")
    folder.note("c")
    assert folder.made() >= {"a", "c"}
    assert "cut short" not in folder.made()
    (folder.path / "a").touch()
    folder.clear()
    assert outside.exists()
    assert everything(folder.path) == {MARK}


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
        "import sys; from pathlib import Path; from lowbit_run.train.folder import RunFolder; "
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
    monkeypatch.setattr(folder, "_PATIENCE_SECONDS", 0)
    config = tiny(tmp_path, pipeline=ONE)
    RunFolder(tmp_path / "run").note("summary.json")
    (tmp_path / "run" / "summary.json").write_text("theirs")
    text = rf"run.output '.*/run' is in use by process {other.pid} on \S+; allowed: another folder"
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
