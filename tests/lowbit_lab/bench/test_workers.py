import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lowbit_lab.bench.workers import CONGESTION, Workers, set_link, started, step_bars
from lowbit_lab.network import Link, SlowLink
from tests.lowbit_lab.network.test_shape import all_gone

ECHO = """
from lowbit.wire.connections import congestion_control
from lowbit_lab.bench.workers import serve, report_progress


class Echo:
    def say(self, what):
        report_progress(what + "?")
        return what

    def fail(self, what):
        raise ValueError(what)

    def control(self):
        return congestion_control()

    def loop(self):
        while True:
            pass


if __name__ == "__main__":
    serve(Echo)
"""
PARENT = """
from lowbit_lab.bench.workers import Workers

with Workers("echo") as workers:
    print(workers._processes[0].pid, flush=True)
    workers.ask("loop")
"""


@pytest.fixture
def _echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


def test_failures_name_the_rank_or_the_last_words_and_nobody_stays():
    with Workers("lowbit_lab.bench.runs", 2, grouped=True) as ranks:
        pids = [process.pid for process in ranks._processes]
        os.kill(pids[1], signal.SIGKILL)  # the other one waits for it, and would do so for long
        with pytest.raises(ChildProcessError, match="rank 1 failed: exit status -9"):
            ranks.ask("state_bytes", name="nobody")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    said = "process 0 failed: exit status 1, .*No module named lowbit.no_such_module"
    with pytest.raises(ChildProcessError, match=said), Workers("lowbit.no_such_module") as workers:
        workers.ask("anything")


@pytest.mark.usefixtures("_echo")
def test_orders_are_shared_and_progress_is_told():
    told: list[str] = []
    with Workers("echo", 2) as workers:
        orders = [{"what": text} for text in "abc"]
        assert sorted(workers.share("say", orders, on_progress=told.append)) == ["a", "b", "c"]
        assert sorted(told) == ["a?", "b?", "c?"]
        assert workers.ask("say", what="d") == ["d", "d"]
        with pytest.raises(ChildProcessError, match="process [01] failed: ValueError: no"):
            list(workers.share("fail", [{"what": "no"}], print))


@pytest.mark.slow
@pytest.mark.usefixtures("_echo")
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all_gone([pid], 60)


@pytest.mark.usefixtures("_echo")
@pytest.mark.skipif(SlowLink.available() is not None, reason=f"no shaped link here: {SlowLink.available()}")
def test_connections_that_are_there_get_the_congestion_control_of_the_next_link():
    with started("echo", 2, [Link(50.0)]) as (network, ranks):
        for name in ("cubic", "reno"):
            set_link(network, Link(50.0, congestion=name), ranks)
            assert ranks.ask("control") == [name, name]
        with pytest.raises(ChildProcessError, match="congestion control is 'reno', and the kernel does not permit 'n"):
            ranks.ask(CONGESTION, name="nosuch")


def _shown(*, terminal: bool, width: int = 80) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    with step_bars({"fp32": 20, "transform": 40}, console) as advance:
        for _ in range(20):
            advance("fp32", "loss 2.345  12,345 tokens/s  [32.0/32.0 bits]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_plain_lines_and_bars_leave_room_for_the_text():
    text = "loss 2.345  12,345 tokens/s  [32.0/32.0 bits]"
    lines = _shown(terminal=False).splitlines()
    assert lines[0] == f"fp32  1/20  {text}"
    assert [line.split()[1] for line in lines] == ["1/20", *(f"{step}/20" for step in range(2, 21, 2))]
    for width in (80, 120):
        shown = _shown(terminal=True, width=width)
        assert "20/20" in shown
        assert text in shown
