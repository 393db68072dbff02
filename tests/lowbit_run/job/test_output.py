"""`lowbit_run.job.output`: a program goes on, whoever reads what it prints."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lowbit_run.job import output
from tests.command_line import invoke

PROGRAM = """
import os, subprocess, sys
from lowbit_run.job.output import passed_on

with passed_on():
    for number in range({lines}):
        print("out", number, "." * 100, flush=True)
        os.write(2, b"err %d\\n" % number)
    subprocess.run([sys.executable, "-S", "-c", "print('of a process')"], check=True)
    open("done", "w").close()
print("after", flush=True)
"""


def start(folder: Path, lines: int, **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM.format(lines=lines)], cwd=folder, **streams)


def await_done(folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "done").exists():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline, "it waits for a reader"
        time.sleep(0.02)


def test_a_pipe_that_is_read_gets_all_in_its_order(tmp_path: Path):
    done = start(tmp_path, 2000, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.communicate(timeout=60)[0].decode().splitlines()
    assert done.returncode == 0
    pairs = [line for number in range(2000) for line in (f"out {number} {'.' * 100}", f"err {number}")]
    assert lines == [*pairs, "of a process", "after"]


def test_a_pipe_that_nobody_reads_stops_nothing(tmp_path: Path):
    """What is read later has the beginning, the end and the number of bytes between them."""
    process = start(tmp_path, 20_000, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await_done(tmp_path, process)
    out, err = (text.decode() for text in process.communicate(timeout=60))
    assert process.returncode == 0
    assert out.startswith("out 0 ")
    assert out.endswith("of a process\nafter\n")
    before, _, after = out.partition("\n[")
    left_out, _, rest = after.partition(" bytes of output that nobody read are left out]\n")
    whole = "".join(f"out {number} {'.' * 100}\n" for number in range(20_000)) + "of a process\nafter\n"
    assert whole.startswith(before)
    assert whole.endswith(rest)
    assert rest.startswith("out ")
    assert len(before) + int(left_out) + len(rest) == len(whole)
    assert len(rest) > 1_000_000
    assert err.splitlines() == [f"err {number}" for number in range(20_000)]


def test_a_pipe_that_does_not_block_gets_all(tmp_path: Path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = start(tmp_path, 2000, stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    await_done(tmp_path, process)  # with more than the pipe takes
    with os.fdopen(reader, "rb") as read:
        text = read.read().decode()
    assert process.wait(60) == 0
    assert [f"out {number} {'.' * 100}" for number in range(2000)] == text.splitlines()[:2000]


def test_a_reader_that_is_gone_and_a_full_disk_stop_nothing(tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone, open("/dev/full", "w") as full:
        for name, file in (("gone", gone), ("full", full)):
            (tmp_path / name).mkdir()
            process = start(tmp_path / name, 2000, stdout=file.fileno(), stderr=subprocess.PIPE)
            await_done(tmp_path / name, process)
            assert process.communicate(timeout=60)[1].decode().startswith("err 0\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_are_closed(closed: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM.format(lines=10).replace('print("after", flush=True)', ""))
    command = f"{sys.executable} program.py {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, timeout=60)
    if ">&- 2" not in closed and closed != "2>&-":
        assert done.stderr.decode().count("err ") >= 1
    assert done.stdout.count(b"out ") == (10 if closed == "2>&-" else 0)


def test_streams_are_as_before_after_an_error(tmp_path: Path):
    program = PROGRAM.format(lines=10).replace("open(", "raise ValueError(")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.endswith("of a process\n")
    assert "ValueError" in done.stderr.splitlines()[-1]


ENDING = """
import sys, threading, time
from lowbit_run.job.output import end, passed_on

def end_it():
    sys.stderr.write("." * {size} + " the cause\\n")
    end(3)

with passed_on():
    threading.Thread(target=end_it).start()
    time.sleep(60)
"""


def test_a_process_that_ends_at_once_says_why():
    for _ in range(3):
        command = [sys.executable, "-c", ENDING.format(size=10_000)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr[-10:]) == (3, "the cause\n")


@pytest.mark.slow
def test_a_process_that_ends_at_once_waits_for_no_reader():
    command = [sys.executable, "-c", ENDING.format(size=500_000)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 3


def test_runs_of_several_ranks_wait_for_no_reader(monkeypatch: pytest.MonkeyPatch):
    """All ranks would wait for one that waits for a reader."""
    seen: list[bool] = []
    monkeypatch.setattr("lowbit_run.train.run", lambda config: seen.append(bool(output._open)))
    for words in (["--ranks", "2"], ["--supervise"], ["--ranks", "1"]):
        assert invoke("train", *words).exit_code == 0
    monkeypatch.setenv("RANK", "0")
    assert invoke("train", "--ranks", "2").exit_code == 0
    assert seen == [True, True, False, False]


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_ends_well(tmp_path: Path):
    """All ranks wait for one that waits for a reader: the pipe is full before the run begins."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = os.write(writer, b"." * (1 << 20))
    os.set_blocking(writer, True)
    sizes = {"model.dim": 16, "model.layers": 2, "model.heads": 2, "data.sequence": 16, "data.batch": 4}
    run = {"run.steps": 4, "run.timeout_seconds": 60, "run.output": tmp_path / "run", "run.tensorboard": "false"}
    options = [word for key, value in (sizes | run).items() for word in (f"--{key}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "lowbit", "train", "--ranks", "2", *options], stdout=writer, stderr=writer
    )
    os.close(writer)
    deadline = time.monotonic() + 200
    while not (tmp_path / "run" / "summary.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with os.fdopen(reader, "rb") as read:
        text = read.read()[filled:].decode()
    assert process.wait(60) == 0, text
    assert "step 4/4" in text


def test_what_is_written_just_before_the_end_arrives(monkeypatch: pytest.MonkeyPatch):
    """The reading thread may sleep from the end of a wait in vain until the end of the block."""
    waited, closing = threading.Event(), threading.Event()

    def wait(reading: list[int], *others: Any) -> tuple[list[int], list[int], list[int]]:
        if not waited.is_set():
            waited.set()
            closing.wait(20)
            return [], [], []
        return select(reading, *others)

    select = output.select.select
    monkeypatch.setattr(output.select, "select", wait)
    source, target = os.pipe()
    passing = output._Passing(target)
    assert waited.wait(20)
    os.write(passing.entry, b"summary")
    process_keeps_it_open = os.dup(passing.entry)
    passing._closing.set = lambda: (threading.Event.set(passing._closing), closing.set())
    passing.close(None)
    os.close(process_keeps_it_open)
    os.close(target)
    assert os.read(source, 100) == b"summary"
    os.close(source)


def test_what_follows_dropped_output_begins_with_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "_MOST", 12)
    passing = output._Passing.__new__(output._Passing)
    passing._kept, passing._left_out = bytearray(), 0
    passing._changed, passing._complete = threading.Condition(), True
    for piece in (b"a line", b" in four", b" pie", b"ces\nend\n"):
        passing._keep(piece)
    assert passing._next() == b"\n[22 bytes of output that nobody read are left out]\nend\n"
