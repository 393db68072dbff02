"""Machines that run `lowbit doctor`: processes, each on a host of a link or all on this one."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from lowbit_lab.network import SlowLink, delay
from lowbit_run.doctor.facts import Speed
from tests.forked import CONTEXT

RECIPE = """
[model]
dim = 32
layers = 4
heads = 2
[data]
text = "text.txt"
sequence = 32
batch = 8
[pipeline]
microbatches = 4
forward = "bf16"
backward = "bf16"
[run]
threads = 1
precision = "fp32"
"""
TEXT = "What is wrong, and how to fix it. " * 200
PORT = 29400


@dataclass
class Running:
    """A machine's `lowbit doctor`."""

    process: BaseProcess
    folder: Path

    def page(self, seconds: float = 90) -> str:
        """What it printed on standard output, once it has ended."""
        self.process.join(seconds)
        assert not self.process.is_alive(), self.said()
        return (self.folder / "page").read_text()

    def said(self) -> str:
        """What it has printed so far, on both outputs."""
        return "".join((self.folder / name).read_text() for name in ("page", "errors") if (self.folder / name).exists())

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Until it has printed a text."""
        deadline = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    @property
    def code(self) -> int | None:
        """Its exit status."""
        return self.process.exitcode

    def interrupt(self) -> None:
        """Ctrl-C."""
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGINT)


def start(
    folder: Path, *words: str, link: SlowLink | None = None, host: int = 0,
    environment: Mapping[str, str] | None = None, changes: Mapping[str, Any] | None = None, speed: bool = False,
) -> Running:  # fmt: skip
    """Start `lowbit doctor` in a folder with the recipe and its text, unless they are there already.

    Args:
        link, host: where it runs; without a link on this machine.
        environment: variables beside the secret. changes: of names in lowbit_run.doctor, such as "survey.speed".
        speed: measure compute and coding, too, on a machine that is taken for one on which nothing else runs.
    """
    folder.mkdir(exist_ok=True)
    for name, text in (("run.toml", RECIPE), ("text.txt", TEXT)):
        if not (folder / name).exists():
            (folder / name).write_text(text)
    space = (link._namespaces[host].pid, link._namespaces[host].kinds) if link else None
    variables = {"LOWBIT_SECRET": "a secret", **(environment or {})}
    changes = dict(changes or {})
    if not speed:
        changes = {"survey.speed": _speed, **changes}
    process = CONTEXT.Process(target=_run, args=(str(folder), words, space, variables, changes), daemon=True)
    process.start()
    return Running(process, folder)


def _speed(*_: object) -> Speed:
    return Speed(layer_seconds=0.1, layer_tokens=64)


def _run(folder, words, space, variables, changes) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, name in ((1, "page"), (2, "errors")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    if space:
        for kind in space[1]:
            delay.enter(space[0], kind)
    for name in [name for name in os.environ if name.startswith(("MASTER_", "GLOO_", "WORLD_", "RANK", "LOCAL_"))]:
        del os.environ[name]
    os.environ.update({"COLUMNS": "100", "OMP_NUM_THREADS": "1", **variables})
    os.chdir(folder)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command does before it imports PyTorch
    import lowbit_run.doctor.command  # noqa: F401
    from lowbit_run.cli import main

    mock.patch("lowbit_run.doctor.facts.busy_seconds", return_value=0.0).start()
    for name, value in changes.items():
        mock.patch(f"lowbit_run.doctor.{name}", value).start()
    main(["doctor", *words])
