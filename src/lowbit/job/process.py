"""The process of one rank, as its launcher sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

PULSE = "LOWBIT_PULSE"
"""Environment variable with the file descriptor to which a rank writes signs of life."""

FAILED, USAGE, DIVERGED, ALONE = 1, 2, 3, 4
"""Exit codes: failed, may be retried; wrong usage, do not retry; the loss diverged; other ranks did not come."""

_STARTUP_SECONDS = 30.0  # until the first sign of life: Python has to start


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The program of each rank of a run: a module that calls `lowbit.job.worker.work`, and its order, a line of JSON.

    `timeout`: seconds without a sign of life after which a rank is killed. `threads`: unless OMP_NUM_THREADS is set.
    """

    module: str
    order: str
    timeout: float
    threads: int


class Process:
    """The process of a local rank, watched for signs of life; `environment` adds to this process's own."""

    def __init__(self, program: RankProgram, rank: int, environment: Mapping[str, str]) -> None:
        self.rank, self.silence, self._limit = rank, 0.0, program.timeout
        self.hung, self._heard = False, False
        self._pulse, theirs = os.pipe()
        os.set_blocking(self._pulse, False)
        defaults = {"OMP_NUM_THREADS": str(program.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}  # else 15 lines of C++
        variables = {**defaults, **os.environ, **environment, PULSE: str(theirs)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", program.module],
            env=variables,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once
            pass_fds=[theirs],
        )
        os.close(theirs)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has already ended; its exit code shows how
            self.process.stdin.write(program.order + "\n")
            self.process.stdin.flush()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def killed_or_stopped(self) -> bool:
        """Whether it was killed or hung, so that it could not report itself why it ended."""
        return self.hung or (self.code or 0) < 0

    def listen(self, seconds: float) -> None:
        """Look for signs of life, `seconds` after the last look; kill a process that has given none for too long."""
        with suppress(BlockingIOError):
            if os.read(self._pulse, 1 << 16):
                self.silence, self._heard = 0.0, True
                return
        self.silence += seconds
        limit = self._limit if self._heard else max(self._limit, _STARTUP_SECONDS)
        if self.silence > limit and self.code is None:
            self.hung = True
            self.process.kill()

    def outcome(self) -> str:
        if self.hung:
            return f"rank {self.rank} gave no sign of life for {self._limit:g} s and was killed"
        code = self.code or 0
        if code < 0:
            named = -code in signal.Signals.__members__.values()
            return f"rank {self.rank} was ended by {signal.Signals(-code).name if named else f'signal {-code}'}"
        return f"rank {self.rank} ended with exit code {code}"

    def close(self) -> None:
        """Close its pipes; call this once it has ended."""
        os.close(self._pulse)
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
