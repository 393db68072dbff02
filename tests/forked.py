"""New processes that need not import PyTorch: forks of one that has, and that has done little else (`tests.warm`).

Importing PyTorch, its pipelining and transformers takes a process seconds of processor time; the tests start hundreds.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore

_IMPORTED = [
    *("torch.distributed.pipelining", "transformers.models.llama.modeling_llama", "lowbit.pipeline", "numba"),
    *("lowbit.activations", "lowbit.gradients", "lowbit_run.train.loop", "lowbit_run.doctor.command", "pytest"),
    "tests.warm",
]
_ADDRESS = "LOWBIT_TESTS_FORKS"


CONTEXT = multiprocessing.get_context("forkserver")
"""Where to start processes: `CONTEXT.Process(target=..., args=...)`."""
CONTEXT.set_forkserver_preload(_IMPORTED)
_server: Any = forkserver._forkserver
if _ADDRESS in os.environ:  # another process keeps it
    _server._forkserver_address, _server._forkserver_alive_fd = os.environ[_ADDRESS], os.open(os.devnull, os.O_RDONLY)
    _server.ensure_running = lambda: None


def share() -> None:
    """Let this process fork for those that it starts: all workers of pytest-xdist."""
    if not hasattr(_server, "_forkserver_authkey"):  # from Python 3.14, they would have to know it
        _server.ensure_running()
        os.environ[_ADDRESS] = _server._forkserver_address


@dataclass(frozen=True)
class Done:
    """How a script ended: the worst exit code of its ranks, and what each printed."""

    code: int
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


def run_script(
    script: Path, *arguments: str, ranks: int = 0, timeout: float = 280, folder: Path, own_store: bool = False
) -> Done:
    """Run a script as `__main__` in `folder`, alone or as the ranks that torchrun would start; nothing outlives this.

    A script that takes longer ends with code -9. `own_store`: rank 0 keeps the store, as without a launcher.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if own_store:
        del store
    processes: list[BaseProcess] = []
    logs = [folder / f".output-{script.stem}-{rank}" for rank in range(max(1, ranks))]
    for rank, log in enumerate(logs):
        environment = _of_rank(rank, ranks, port, own_store) if ranks else {}
        work = (str(script), arguments, environment, str(folder), str(log))
        processes.append(CONTEXT.Process(target=_run, args=work, daemon=True))
        processes[-1].start()
    _wait(processes, timeout)
    codes = [process.exitcode for process in processes]
    return Done(next((code for code in codes if code), 0) or 0, [log.read_text() for log in logs if log.exists()])


def _of_rank(rank: int, ranks: int, port: int, own_store: bool) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(not own_store),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _wait(processes: Sequence[BaseProcess], timeout: float) -> None:
    """Until all have ended; after the first that failed, the others have some seconds."""
    deadline, failed = time.monotonic() + timeout, False
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        if not failed and any(p.exitcode for p in processes):
            failed, deadline = True, min(deadline, time.monotonic() + 10)
        time.sleep(0.02)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _run(script: str, arguments: Sequence[str], environment: dict[str, str], folder: str, log: str) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)  # as torchrun has it; several would wait for each other while other tests compute
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, folder)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which processes of multiprocessing leave out


class Module:
    """As `subprocess.Popen([python, "-m", name], stdin=PIPE, text=True)`, as far as launchers and benchmarks use it."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], stdout: int | None = None, pass_fds: Sequence[int] = (),
        **_: Any,
    ) -> None:  # fmt: skip
        (read, write), (answers, answer) = CONTEXT.Pipe(False), CONTEXT.Pipe(False)
        # Connections are what is sent to a new process.
        outputs = [answer if stdout else Connection(os.dup(1)), Connection(os.dup(2))]
        passed = {name: Connection(os.dup(fd)) for fd in pass_fds for name, value in env.items() if value == str(fd)}
        given = (argv[-1], dict(env), [read, *outputs], passed)
        self._process = CONTEXT.Process(target=_module, args=given, daemon=True)
        self._process.start()
        self.stdin, self.stdout = (os.fdopen(os.dup(write.fileno()), "w"), os.fdopen(os.dup(answers.fileno())))
        for end in (read, write, answers, answer, *outputs, *passed.values()):
            end.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("", timeout or 0)

    def communicate(self) -> None:
        self.wait()
        for pipe in (self.stdin, self.stdout):
            pipe.close()


FORKING = SimpleNamespace(Popen=Module, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
"""In place of `subprocess` in a module that starts modules of ours."""


def _module(
    name: str, environment: dict[str, str], streams: Sequence[Connection], passed: dict[str, Connection]
) -> None:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment | {key: str(pipe.fileno()) for key, pipe in passed.items()})
    sys.stdin = os.fdopen(0)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    runpy.run_module(name, run_name="__main__", alter_sys=True)
