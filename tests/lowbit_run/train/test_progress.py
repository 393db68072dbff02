"""Progress: what a line says, when a log gets one, and which ranks show it."""

import itertools
import os
import pty
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit_run.config import to_toml
from lowbit_run.job.process_group import new_secret
from lowbit_run.train import progress as module
from lowbit_run.train import train
from lowbit_run.train.progress import Progress, Rhythm
from tests.forked import CONTEXT, run_script
from tests.lowbit_run.train.runs import tiny
from tests.lowbit_run.train.test_metrics import one_step


def test_phases_that_last_are_reported_by_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with module.phase("thinking", 3):
        pass
    monkeypatch.setattr(module, "_LONG_SECONDS", 0.0)
    with module.phase("thinking", 3, show=False):
        pass
    train(tiny(tmp_path, run={"steps": 2, "progress": True}))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rank ")]
    phases = ["reading", "loading", "measuring", "writing", "computing", "evaluating", "writing"]
    assert [line.split(": ")[1].split()[0] for line in lines] == phases


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_what_matters(capsys: pytest.CaptureFixture[str]):
    clock = _Clock()
    progress = Progress(10, clock=clock)
    for step in range(1, 11):
        clock.now += 30.0 if step == 1 else (4.0, 6.0)[step % 2]  # the first compiles kernels
        progress.record(one_step(step))
    progress.record_evaluation(10, {"held_out_loss": 3.0, "held_out_loss_codecs": 3.5})
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "step 2/10  loss 2.5000  256 tok/s  waiting 12%  bits 4.00/7.00  32s left"
    assert lines[2].endswith("  35s left")
    assert lines[9:] == [
        "step 10/10  loss 2.5000  256 tok/s  waiting 12%  bits 4.00/7.00",
        "step 10/10  held-out loss 3.0000, with the codecs 3.5000",
    ]
    progress = Progress(100, warmup=40, clock=clock)
    for step in range(1, 51):
        clock.now += 60.0 if step <= 40 else 1.0
        progress.record(one_step(step))
    assert capsys.readouterr().err.splitlines()[-1].endswith("  50s left"), "of steps after the warm-up"


LINKS = {"0 to 2": 2_000_000, "2 to 0": 500_000, "2 to 4": 4_000_000, "4 to 2": 1_000_000}
RATES = {"0 to 2": 10.0, "2 to 0": 100.0, "2 to 4": 160.0, "4 to 2": 100.0}


@pytest.mark.parametrize(
    ("machine", "rates", "waiting", "said"),
    [
        (0, RATES, "5%", "out 2.00 MB  in 0.50 MB  link 0 to 2: 8.0 of 10 Mbit/s"),
        (2, RATES, "10%", "out 4.50 MB  in 3.00 MB  link 0 to 2: 8.0 of 10 Mbit/s"),
        (4, {}, "20%", "out 1.00 MB  in 4.00 MB  link 2 to 4: 16.0 Mbit/s"),
    ],
)
def test_every_machine_shows_its_own_links(
    capsys: pytest.CaptureFixture[str], machine: int, rates: dict[str, float], waiting: str, said: str
):
    progress = Progress(10, machine=machine, rates=rates)
    progress.record(replace(one_step(1), links=LINKS, waiting={"0": 0.1, "2": 0.2, "4": 0.4}))
    shown = f"step 1/10  loss 2.5000  256 tok/s  waiting {waiting}  {said}  bits 4.00/7.00  18s left\n"
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize(
    ("steps", "seconds", "lines", "longest"),
    [
        (200, 0.01, 11, 1),  # short: ten lines and the first
        (1000, 1.0, 60, 60),
        (100_000, 3.0, 700, 603),  # three days
        (100, 900.0, 100, 900),  # slow steps
    ],
)
def test_a_log_is_neither_silent_nor_flooded(steps: int, seconds: float, lines: int, longest: float):
    clock = _Clock()
    rhythm, times = Rhythm(steps, clock), []
    for step in range(1, steps + 1):
        clock.now += seconds
        if rhythm.due(step):
            times.append(clock.now)
    assert len(times) <= lines
    assert times[0] == seconds
    assert times[-1] == pytest.approx(steps * seconds)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert max(pauses) <= longest
    assert max([pause for pause, end in zip(pauses, times[1:], strict=True) if end < 1200], default=0) <= 60 + seconds


RANK = """
import os, sys
port, secret, *machines = sys.argv[1:]
print("[rank]", flush=True)
for name in ("TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]
os.environ |= {"MASTER_PORT": port, "LOWBIT_SECRET": secret}
from lowbit_run.train import load, loop, members
members.machine_name = lambda: machines[int(os.environ["RANK"])]
loop.train(load("run.toml"))
"""


def _train(tmp_path: Path, machines: list[str]) -> list[str]:
    """What each of several processes, started by hand as ranks of these machines, writes."""
    config = tiny(tmp_path, run={"progress": True})
    (tmp_path / "run.toml").write_text(to_toml(config, meanings=False))
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = run_script(script, str(port), new_secret(), *machines, ranks=len(machines), timeout=120, folder=tmp_path)
    assert done.code == 0, done.output
    return done.output.split("[rank]\n")[1:]


@pytest.mark.slow
def test_one_rank_of_a_machine_shows_the_run(tmp_path: Path):
    for shown in _train(tmp_path / "two", ["here", "there"]):
        assert re.findall(r"^step (\d/3)  loss", shown, re.M) == ["1/3", "2/3", "3/3"]
        assert "held-out loss" in shown
        assert len(re.findall(r"  out 0.0\d MB  in 0.0\d MB  link [01] to [01]: [\d.]+ of [\d,]+ Mbit/s", shown)) == 3
    first, second = _train(tmp_path / "one", ["here", "here"])
    assert "step 3/3  loss" in first
    assert "loss" not in second


def _on_a_terminal(terminal: str, columns: int) -> None:
    os.dup2(os.open(terminal, os.O_WRONLY), 2)
    os.environ |= {"COLUMNS": str(columns), "TERM": "xterm"}
    try:
        progress = Progress(200)
        for step in (1, 2, 200):
            progress._refreshed = float("-inf")
            progress.record(replace(one_step(step), links=LINKS))
        progress.record_evaluation(200, {"held_out_loss": 3.0})
        progress.close()
    finally:
        os.write(2, b"\0")


def test_a_terminal_has_live_lines_that_fit():
    ours, theirs = pty.openpty()
    process = CONTEXT.Process(target=_on_a_terminal, args=(os.ttyname(theirs), 40), daemon=True)
    process.start()
    shown = b""
    while not shown.endswith(b"\0"):
        shown += os.read(ours, 4096)
    process.join()
    assert process.exitcode == 0
    os.close(ours)
    os.close(theirs)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", shown[:-1].decode()).replace("\n", "\r").split("\r")
    assert max(map(len, lines)) <= 40
    steps = [line.rstrip() for line in lines if line.startswith("step")]
    assert steps[0].startswith("step 1/200  loss 2.5000")
    assert steps[0].endswith(" left")
    links = [line.rstrip() for line in lines if line.startswith("out")]
    assert links[0] == "out 2.00 MB  in 0.50 MB"
    assert any(line == "step 200/200  held-out loss 3.0000" for line in steps)
