"""The faults: how each begins, what follows by itself, and how all of it is undone."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from tests.torture.attempt import Attempt
from tests.torture.plan import Trial

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
            self.silenced = {r for r in range(attempt.shape.ranks) if attempt.shape.host(r) == self.host}
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
