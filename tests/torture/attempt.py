"""One start of a whole run: its processes on their hosts, when and how they ended, their files, and what hits them.

The processes run the command `lowbit` as forks of this one, which has imported all that they need in seconds. A fork
has its own session, environment, open files and host, and ends as an interpreter ends. What a supervisor starts by
`subprocess` is forked from the supervisor.
"""

import contextlib
import ctypes
import inspect
import itertools
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from lowbit_lab.network import SlowLink
from lowbit_run.train.metrics import Summary, read_metrics, read_summary
from lowbit_run.train.model import StageModule
from tests.torture.plan import Shape, Trial

PAUSE = 0.03  # seconds in each forward pass of the first stage: a run should last long enough to be hit


def _become_a_program(main: Callable[[], object]) -> NoReturn:
    """End as an interpreter ends that has run this."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError


class _Forked(subprocess.Popen):
    """`subprocess.Popen`, of which `python -m module` is a fork of this process."""

    started: Path

    def _execute_child(self, *given: Any) -> None:
        values = dict(zip(_NAMES, given, strict=True))
        argv = values["args"]
        if list(argv[:2]) != [sys.executable, "-m"]:
            return super()._execute_child(*given)
        self.pid = os.fork() or _become_a_program(lambda: self._run(values))
        self._child_created = True
        with self.started.open("a") as file:
            file.write(f"{self.pid}\n")
        self._close_pipe_fds(*(values[name] for name in _PIPES))
        return None

    def _run(self, values: dict[str, Any]) -> None:
        if values["start_new_session"]:
            os.setsid()
        for target, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if values[name] != -1:
                os.dup2(values[name], target)
        for before, after in itertools.pairwise([2, *sorted(values["pass_fds"]), 4096]):
            os.closerange(before + 1, after)
        os.environ.clear()
        os.environ.update(values["env"])
        sys.stdin = os.fdopen(0)
        sys.argv = values["args"][2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


_NAMES = [*inspect.signature(subprocess.Popen._execute_child).parameters][1:]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _slow_down(nan: int | None, nan_at: Path) -> None:
    """Let the first stage take its time, and one forward pass of the training go wrong."""
    forward, count = StageModule.forward, -1

    def wrapped(self: StageModule, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if self.first:
            time.sleep(PAUSE)
        y = forward(self, x)
        if not torch.is_grad_enabled():
            return y
        count += 1
        if count == nan:
            with contextlib.suppress(FileExistsError), nan_at.open("x") as file:
                file.write(str(time.monotonic()))
                return y * float("nan")
        return y

    StageModule.forward = wrapped


POLL = 0.05
Curve = list[tuple[int, float, float]]


@dataclass(frozen=True)
class End:
    """How a process ended: the exit code, or minus the signal; and when, by the monotonic clock."""

    code: int
    at: float


class Attempt:
    """All ranks of a run, on the hosts of a link; `words`: more of the command line.

    `nan`: forward pass of a rank's training that yields NaN, counted from 0; no second time where the file `nan_at`
    exists, which then holds the time at which it was. `late`: seconds that a rank starts after the others.
    """

    def __init__(self, shape: Shape, link: SlowLink, folder: Path, *, name: str, words: tuple[str, ...] = ()) -> None:
        self.shape, self.link, self.folder, self.name, self.words = shape, link, folder, name, words
        self.nan: dict[int, int] = {}
        self.late: dict[int, float] = {}
        self.nan_at = folder / "nan-at"
        self.pids: dict[int, int] = {}
        self.ends: dict[int, End] = {}
        self.began = 0.0

    def start(self) -> None:
        self.began = time.monotonic()
        for rank in range(self.shape.ranks):
            self.start_rank(rank)

    def start_rank(self, rank: int) -> None:
        self.ends.pop(rank, None)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids[rank] = os.fork() or _become_a_program(lambda: self._run(rank))

    def _run(self, rank: int) -> None:
        """Be the command of a rank. The file that ends in ".started" gets the id of each process that it starts."""
        from lowbit_run.cli import main

        os.setsid()
        time.sleep(self.late.get(rank, 0.0))
        self.link.enter(self.shape.host(rank))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, kind in enumerate(("out", "err"), start=1):
            os.dup2(os.open(self._file(rank, kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
        os.closerange(3, 4096)
        local = self.shape.on_host
        os.environ.update({
            "RANK": str(rank), "WORLD_SIZE": str(self.shape.ranks), "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": self.link.address(0),
            # Not that of the attempt before, which may still be in use.
            "MASTER_PORT": str(29400 + sum(self.name.encode()) % 100),
            "LOWBIT_SECRET": "a secret of these trials", "OMP_NUM_THREADS": "1",
        })  # fmt: skip
        _Forked.started = self._file(rank, "started")
        subprocess.Popen = _Forked
        _slow_down(self.nan.get(rank), self.nan_at)
        config, output = str(self.folder / "config.toml"), str(self.output(rank))
        sys.argv = ["lowbit", "train", config, "--run.output", output, *self.words]
        main()

    def output(self, rank: int) -> Path:
        return self.folder / f"host-{self.shape.host(rank)}" / "run"

    def running(self) -> list[int]:
        for rank, pid in self.pids.items():
            if rank not in self.ends:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ends[rank] = End(os.waitstatus_to_exitcode(status), time.monotonic())
        return [rank for rank in self.pids if rank not in self.ends]

    def wait(self, until: float, tick: Callable[[float], bool] = lambda now: False) -> None:
        """Until all have ended, or a time of the monotonic clock, or `tick`, called all the while, says so."""
        while self.running() and (now := time.monotonic()) < until and not tick(now):
            time.sleep(POLL)

    def started(self, rank: int) -> list[int]:
        """Processes that the command of a rank has started."""
        return [int(line) for line in self._lines(rank, "started")]

    def trainer(self, rank: int) -> int | None:
        """The process that trains as a rank: its command or what that started last; None if there is none now."""
        if rank in self.ends:
            return None
        if "--supervise" not in self.words:
            return self.pids[rank]
        return next(reversed(self.started(rank)), None)

    def signal(self, rank: int, number: signal.Signals, *, whole: bool = False) -> None:
        """To the process that trains as a rank; `whole`: to the command and all that it started. None if it ended."""
        if rank not in self.running():
            return
        for pid in (self.pids[rank], *self.started(rank)) if whole else (self.trainer(rank),):
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, number)

    def stop(self) -> list[int]:
        """Kill what still runs: these ranks have not ended by themselves."""
        for rank in (left := self.running()):
            self.signal(rank, signal.SIGKILL, whole=True)
            while rank in self.running():
                time.sleep(POLL)
            del self.pids[rank], self.ends[rank]
        return left

    def curve(self) -> Curve:
        lines = read_metrics(self.output(0) / "metrics.jsonl")
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]

    def steps(self) -> int:
        path = self.output(0) / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def summary(self) -> Summary | None:
        path = self.output(0) / "summary.json"
        return read_summary(path) if path.exists() else None

    def errors(self, rank: int) -> list[str]:
        return self._lines(rank, "err")

    def _lines(self, rank: int, kind: str) -> list[str]:
        path = self._file(rank, kind)
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def _file(self, rank: int, kind: str) -> Path:
        return self.folder / f"{self.name}-rank-{rank}.{kind}"


CUT_SECONDS = 40.0  # of a supervised run
_SECONDS = {"stop20": 20.0, "cut5": 5.0}
_SECONDS_SUPERVISED = {"cut": CUT_SECONDS, "disk": 8.0}


class Fault:
    """A fault of a trial, in its attempt. `silenced`: ranks that cannot be expected to report anything."""

    def __init__(self, trial: Trial, attempt: Attempt) -> None:
        self.trial, self.attempt, self.kind = trial, attempt, trial.fault
        self.began: float | None = None
        self.ended: float | None = None
        self.host = attempt.shape.host(trial.victim)
        self.disk = attempt.output(trial.victim).parent
        self.silenced = {trial.victim} if self.kind in ("kill", "machine", "stop") else set()
        if self.kind == "gone":
            self.silenced = attempt.shape.on(self.host)
        # None: for ever, or until the survivors have ended.
        self._seconds = _SECONDS.get(self.kind)
        if trial.supervised:
            self._seconds = (_SECONDS | _SECONDS_SUPERVISED | {"machine": trial.pause}).get(self.kind)

    def begin(self) -> None:
        victim, attempt = self.trial.victim, self.attempt
        match self.kind:
            case "kill" | "machine":
                attempt.signal(victim, signal.SIGKILL, whole=self.kind == "machine")
            case "stop" | "stop20":
                attempt.signal(victim, signal.SIGSTOP)
            case "cut" | "cut5" | "gone":
                attempt.link.cut(self.host)
            case "disk":
                fill(self.disk)
        if self.kind == "gone":
            for rank in self.silenced:
                attempt.signal(rank, signal.SIGKILL, whole=True)
        self.began = time.monotonic()

    def tick(self, now: float) -> None:
        if self.began is None:
            return
        over = self._seconds is not None and now >= self.began + self._seconds
        if over or (self.kind == "stop" and self.attempt.running() == [self.trial.victim]):
            self.end()

    def end(self) -> None:
        if self.ended is not None or self.began is None:
            return
        self.ended = time.monotonic()
        victim, attempt = self.trial.victim, self.attempt
        match self.kind:
            case "stop" | "stop20":
                attempt.signal(victim, signal.SIGKILL if self.kind == "stop" else signal.SIGCONT)
            case "cut" | "cut5" | "gone":
                attempt.link.restore(self.host)
            case "disk":
                (self.disk / "filler").unlink(missing_ok=True)
            case "machine":
                attempt.running()
                attempt.start_rank(victim)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
