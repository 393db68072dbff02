"""The faults: how each begins, what follows by itself, and how all of it is undone."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path

from tests.torture.attempt import Attempt
from tests.torture.plan import FAULTS, Trial

CUT_SECONDS = {"cut5": 5.0, "cut": 40.0}
STOP_SECONDS = 20.0
FULL_SECONDS = 8.0
DISK_BYTES = 64 << 20


class Fault:
    """A fault of a trial, in its attempt. `silenced`: ranks that cannot be expected to report anything."""

    def __init__(self, trial: Trial, attempt: Attempt) -> None:
        assert trial.fault in FAULTS
        self.trial, self.attempt = trial, attempt
        self.began: float | None = None
        self.ended: float | None = None
        self.silenced: set[int] = set()

    def begin(self) -> None:
        trial, attempt = self.trial, self.attempt
        if trial.fault in ("kill", "machine"):
            attempt.signal(trial.victim, signal.SIGKILL, whole=trial.fault == "machine")
            self.silenced = {trial.victim}
        elif trial.fault in ("stop", "stop20"):
            attempt.signal(trial.victim, signal.SIGSTOP)
            self.silenced = {trial.victim} if trial.fault == "stop" else set()
        elif trial.fault == "gone":
            attempt.link.cut(self.host)
            self.silenced = {r for r in range(attempt.shape.ranks) if attempt.shape.host(r) == self.host}
            for rank in self.silenced:
                attempt.signal(rank, signal.SIGKILL, whole=True)
        elif trial.fault in CUT_SECONDS:
            attempt.link.cut(self.host)
        elif trial.fault == "disk":
            fill(self.disk)
        self.began = time.monotonic()

    def tick(self, now: float) -> None:
        if self.began is None or self.ended is not None:
            return
        if (lasts := self._lasts()) is not None and now >= self.began + lasts:
            self.end()
        if self.trial.fault == "stop" and self.attempt.running() == [self.trial.victim]:
            self.end()

    def end(self) -> None:
        if self.ended is not None or self.began is None:
            return
        self.ended = time.monotonic()
        trial, attempt = self.trial, self.attempt
        if trial.fault == "stop20":
            attempt.signal(trial.victim, signal.SIGCONT)
        elif trial.fault == "stop":
            attempt.signal(trial.victim, signal.SIGKILL)
        elif trial.fault in (*CUT_SECONDS, "gone"):
            attempt.link.restore(self.host)
        elif trial.fault == "disk":
            (self.disk / "filler").unlink(missing_ok=True)
        elif trial.fault == "machine":
            attempt.running()
            attempt.start_rank(trial.victim)

    @property
    def host(self) -> int:
        return self.attempt.shape.host(self.trial.victim)

    @property
    def disk(self) -> Path:
        return self.attempt.output(self.trial.victim).parent

    def _lasts(self) -> float | None:
        """Seconds; None: for ever, or until the survivors have ended."""
        trial = self.trial
        plain = {"stop20": STOP_SECONDS, "cut5": CUT_SECONDS["cut5"]}
        supervised = {"cut": CUT_SECONDS["cut"], "disk": FULL_SECONDS, "machine": trial.pause}
        return (plain | supervised if trial.supervised else plain).get(trial.fault)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def mount(disk: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "torture", str(disk)], check=True)


def unmount(disk: Path) -> None:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
