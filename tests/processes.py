"""Real processes for tests of several ranks: started once, talking over real sockets, used by many tests."""

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from inspect import Signature, signature
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d  # pyright: ignore

from lowbit.wire.failure import FailureBoard
from tests.forked import CONTEXT


@dataclass(frozen=True)
class Failure:
    """How a rank failed: the error's class name, its text, and where it came from. `kind` "ended": the process died."""

    kind: str
    text: str
    trace: str = ""


class Ranks:
    """Up to `size` processes, each of which runs functions as a rank of a fresh Gloo process group.

    The store of the groups lives in this process, as it does under torchrun, on a port that the system chose.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs = 0
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._ready = [False] * size

    def run(self, function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 150) -> list[Any]:
        """The results of `function(*args)` on all ranks. Fails the test if it failed on any."""
        outcomes = self.outcomes(function, *args, ranks=ranks, timeout=timeout)
        failures = {r: o for r, o in enumerate(outcomes) if isinstance(o, Failure)}
        assert not failures, "\n".join(f"rank {r}: {f.kind}: {f.text}\n{f.trace}" for r, f in failures.items())
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 150) -> list[Any]:
        """The results of `function(*args)` on all ranks; a `Failure` where it failed."""
        self.start(ranks)
        self._runs += 1
        for rank in range(ranks):
            self._workers[rank][1].send((function, args, rank, ranks, f"run{self._runs}"))
        outcomes: dict[int, Any] = {}
        deadline = monotonic() + timeout
        while len(outcomes) < ranks and monotonic() < deadline:
            outcomes |= self._collect([r for r in range(ranks) if r not in outcomes])
        late = Failure("TimeoutError", f"no outcome within {timeout} s")
        for rank in range(ranks):
            if outcomes.setdefault(rank, late) == late or not self._workers[rank][0].is_alive():
                self._replace(rank)
        return [outcomes[rank] for rank in range(ranks)]

    def stop(self) -> None:
        """End the processes."""
        while self._workers:
            _end(*self._workers.pop())

    def _collect(self, waiting: list[int]) -> dict[int, Any]:
        pipes = {self._workers[rank][1]: rank for rank in waiting}
        outcomes: dict[int, Any] = {}
        for pipe in wait(list(pipes), timeout=0.5):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                outcomes[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._workers[rank][0].join()
                outcomes[rank] = Failure("ended", f"exit code {self._workers[rank][0].exitcode}")
        return outcomes

    def start(self, count: int) -> None:
        """Have so many processes ready; `run` and `outcomes` do so themselves."""
        assert count <= self.size
        while len(self._workers) < count:
            self._workers.append(self._new())
        for rank in range(count):  # importing PyTorch is no part of any time limit
            if not self._ready[rank]:
                assert self._workers[rank][1].recv() == "ready"
                self._ready[rank] = True

    def _replace(self, rank: int) -> None:
        _end(*self._workers[rank])
        self._workers[rank], self._ready[rank] = self._new(), False

    def _new(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
        process.start()
        theirs.close()
        return process, ours


class _Test:
    """The body of a test that `on_ranks` has wrapped: what a rank finds under its name is the wrapper."""

    def __init__(self, test: Callable[..., Any], given: dict[str, Any]) -> None:
        self.module, self.__name__, self.given = test.__module__, test.__name__, given

    def __call__(self) -> None:
        getattr(import_module(self.module), self.__name__).__wrapped__(**self.given)


def on_ranks(test: Callable[..., Any] | int) -> Any:
    """Run a test as a rank of each of two processes, or `@on_ranks(3)`: it passes if it passes on all of them."""
    if isinstance(test, int):
        return partial(_on_ranks, count=test)
    return _on_ranks(test, count=2)


def _on_ranks(test: Callable[..., Any], count: int) -> Any:
    @wraps(test)
    def run(ranks: Ranks, **given: Any) -> None:
        ranks.run(_Test(test, given), ranks=count)

    own = signature(run, follow_wrapped=False).parameters["ranks"]
    vars(run)["__signature__"] = Signature([own, *signature(test).parameters.values()])
    return run


@contextlib.contextmanager
def impatient(seconds: float) -> Iterator[None]:
    """Waits for messages end after so long; what is left of their timeout remains for finding who failed."""
    waits = property(lambda board: timedelta(seconds=seconds), lambda board, own: vars(board).update(patience=own))
    with mock.patch.object(FailureBoard, "patience", waits, create=True):
        yield


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()


def _serve(pipe: Connection, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    pipe.send("ready")
    while True:
        try:
            function, args, rank, ranks, name = pipe.recv()
        except EOFError:
            return
        pipe.send(_outcome(function, args, rank, ranks, PrefixStore(name, store)))


def _outcome(function: Callable[..., Any], args: Any, rank: int, ranks: int, store: Store) -> Any:
    before = _names()
    try:
        with process_group(rank, ranks, store):
            outcome = function(*args)
    except Exception as error:
        outcome = Failure(type(error).__name__, str(error), traceback.format_exc())
        error.__traceback__ = None
        gc.collect()  # closes connections that only a cycle keeps, as the end of a rank's process does
    if leaked := _restore(before):
        return Failure("Leak", f"{function.__name__} left {leaked} changed for later tests: use mock.patch.object")
    return outcome


def _names() -> dict[tuple[str, str], Any]:
    """Functions, classes and constants of all modules of lowbit, which a test may change for itself only."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "lowbit"]
    return {
        (name, key): value
        for name, module in modules
        for key, value in vars(module).items()
        if isinstance(value, FunctionType | type) or (key.isupper() and isinstance(value, int | float | str))
    }


def _restore(before: dict[tuple[str, str], Any]) -> str:
    """Undo changes of such names; returns those that were changed."""
    now = _names()
    changed = [key for key, value in before.items() if now.get(key, value) != value]
    for module, name in changed:
        setattr(sys.modules[module], name, before[module, name])
    return ", ".join(map(".".join, changed))


@contextlib.contextmanager
def process_group(rank: int, ranks: int, store: Store) -> Iterator[None]:
    """The default process group, for as long as the block runs."""
    torch.manual_seed(1234 + rank)
    # A group whose making failed here was counted here only: the name of the next one would differ among the ranks.
    distributed_c10d._world.group_count = 0
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        dist.barrier()  # else one may end while another still connects
        yield
    finally:
        dist.destroy_process_group()
