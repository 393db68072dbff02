"""Processes that run the command `lowbit`, as forks of this one, which has imported all that they need in seconds.

A fork has its own session, environment, open files and host, and ends as an interpreter ends. What a supervisor starts
by `subprocess` is forked from the supervisor.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit.train.model import StageModule
from lowbit_lab.network import SlowLink

PAUSE = 0.03  # seconds in each forward pass of the first stage: a run should last long enough to be hit


@dataclass(frozen=True, kw_only=True)
class Command:
    """One `lowbit` command: words of its command line, and variables in addition to this process's own.

    Attributes:
        log: path of what it prints, without ".out" and ".err", to which it appends.
        started: file that gets a line "process id, time" for each process it starts with `python -m`.
        nan: forward pass of the training that yields NaN, counted from 0; no second time where `nan_at` exists, which
            then holds the time at which it was.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    host: int
    log: Path
    started: Path
    nan: int | None = None
    nan_at: Path

    def fork(self, link: SlowLink) -> int:
        """Start it; returns its process id. It is a child of this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        code = 70
        try:
            os.setsid()
            link.enter(self.host)
            self._redirect()
            os.environ.update(self.environment)
            self._prepare()
            code = _run_main(["lowbit", *self.words])
        except BaseException:
            traceback.print_exc()
        _exit_as_a_program(code)
        raise AssertionError

    def _redirect(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(f"{self.log}.out", flags, 0o644), 1)
        os.dup2(os.open(f"{self.log}.err", flags, 0o644), 2)
        os.closerange(3, 4096)

    def _prepare(self) -> None:
        _Forked.started = self.started
        subprocess.Popen = _Forked
        _slow_down(self.nan, self.nan_at)


def _run_main(argv: list[str]) -> int:
    from lowbit.cli import main

    sys.argv = argv
    try:
        main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return 130
    return 0


def _exit_as_a_program(code: int) -> None:
    ctypes.pythonapi.Py_Exit(code)


class _Forked(subprocess.Popen):
    """`subprocess.Popen`, of which `python -m module` is a fork of this process."""

    started: Path

    def _execute_child(self, *given: Any) -> None:
        values = dict(zip(_NAMES, given, strict=True))
        argv = values["args"]
        if list(argv[:2]) != [sys.executable, "-m"]:
            return super()._execute_child(*given)
        self.pid = os.fork()
        if not self.pid:
            self._become(values)
        self._child_created = True
        with self.started.open("a") as file:
            file.write(f"{self.pid} {time.monotonic()}\n")
        self._close_pipe_fds(*(values[name] for name in _PIPES))
        return None

    def _become(self, values: dict[str, Any]) -> None:
        code = 70
        try:
            if values["start_new_session"]:
                os.setsid()
            for target, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
                if values[name] != -1:
                    os.dup2(values[name], target)
            kept = [2, *sorted(values["pass_fds"]), 4096]
            for before, after in itertools.pairwise(kept):
                os.closerange(before + 1, after)
            if values["env"] is not None:
                os.environ.clear()
                os.environ.update(values["env"])
            sys.stdin = os.fdopen(0)
            _, _, module, *rest = values["args"]
            sys.argv = [module, *rest]
            code = 0
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        _exit_as_a_program(code)


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
