"""One start of a whole run: its processes on their hosts, when and how they ended, and their files."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowbit.train.metrics import Summary, read_metrics, read_summary
from lowbit_lab.network import SlowLink
from tests.torture.plan import Shape
from tests.torture.rank import Command

POLL = 0.05
Curve = list[tuple[int, float, float]]


@dataclass(frozen=True)
class End:
    """How a process ended: the exit code, or minus the signal; and when, by the monotonic clock."""

    code: int
    at: float


class Attempt:
    """All ranks of a run, on the hosts of a link; `words`: more of the command line."""

    def __init__(self, shape: Shape, link: SlowLink, folder: Path, *, name: str, words: tuple[str, ...] = ()) -> None:
        self.shape, self.link, self.folder, self.name, self.words = shape, link, folder, name, words
        self.nan: dict[int, int] = {}
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
        self.pids[rank] = self._command(rank).fork(self.link)

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
        path = Path(f"{self._log(rank)}.{kind}")
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def _log(self, rank: int) -> Path:
        return self.folder / f"{self.name}-rank-{rank}"

    def _command(self, rank: int) -> Command:
        shape, local = self.shape, self.shape.on_host
        port = str(29400 + sum(self.name.encode()) % 100)  # not that of the attempt before, which may still be in use
        return Command(
            words=(
                "train", str(self.folder / "config.toml"), "--run.output", str(self.output(rank)), *self.words,
            ),
            environment={
                "RANK": str(rank), "WORLD_SIZE": str(shape.ranks), "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": self.link.address(0), "MASTER_PORT": port,
                "LOWBIT_SECRET": "a secret of these trials", "OMP_NUM_THREADS": "1",
            },
            host=shape.host(rank),
            log=self._log(rank),
            nan=self.nan.get(rank),
            nan_at=self.nan_at,
        )  # fmt: skip
