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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from lowbit.train.model import StageModule
from lowbit_lab.network import SlowLink

PAUSE = 0.03  # seconds in each forward pass of the first stage: a run should last long enough to be hit


@dataclass(frozen=True, kw_only=True)
class Command:
    """One `lowbit` command: words of its command line, and variables in addition to this process's own.

    Attributes:
        log: path of what it prints, without ".out" and ".err", to which it appends. The file that ends in ".started"
            gets the id of each process that it starts with `python -m`.
        nan: forward pass of the training that yields NaN, counted from 0; no second time where `nan_at` exists, which
            then holds the time at which it was.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    host: int
    log: Path
    nan: int | None = None
    nan_at: Path

    def fork(self, link: SlowLink) -> int:
        """Start it; returns its process id. It is a child of this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        return os.fork() or _become_a_program(lambda: self._run(link))

    def _run(self, link: SlowLink) -> None:
        from lowbit.cli import main

        os.setsid()
        link.enter(self.host)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(f"{self.log}.out", flags, 0o644), 1)
        os.dup2(os.open(f"{self.log}.err", flags, 0o644), 2)
        os.closerange(3, 4096)
        os.environ.update(self.environment)
        _Forked.started = Path(f"{self.log}.started")
        subprocess.Popen = _Forked
        _slow_down(self.nan, self.nan_at)
        sys.argv = ["lowbit", *self.words]
        main()


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
