"""The store that the ranks share: calls with a time limit, and append-only boards that all ranks read."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lowbit.wire import threads
from lowbit.wire.errors import PeerError, first_line

T = TypeVar("T")
_NOTHING = "lowbit: nothing"


class BoundedStore:
    """The store of a process group, with a time limit on each call: PyTorch's own calls block if its machine is silent.

    A call that reaches the limit stays blocked on its own thread, and every later call fails at once.

    No method waits in the store for a key: PyTorch's TCPStore locks its connection meanwhile, so that all other
    threads that use this store would wait as well, and prints two warnings when such a wait fails. Polling is not
    slower: `get` takes two round trips, one to wait and one to read.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._store: Any = group.get_group_store()  # PyTorch's stubs lack `append`
        self._seconds = seconds
        self._silent = False

    def append(self, key: str, value: str) -> None:
        self._call(lambda: self._store.append(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(lambda: self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(key))

    def _call(self, call: Callable[[], T]) -> T:
        """Return the result; PeerError if the store did not answer in time, or closed its connection."""
        if not self._silent:
            try:
                return bounded(call, self._seconds)
            except TimeoutError:
                self._silent = True
            except RuntimeError as error:  # PyTorch's text may continue with lines of C++
                raise PeerError(
                    f"the store of the process group closed its connection ({first_line(error)}): the rank or launcher "
                    "that keeps it has ended",
                    -1,
                ) from None
        raise PeerError(
            f"the store of the process group did not answer within {self._seconds:g} s: the rank or launcher that "
            "keeps it, or the network to its machine, is gone",
            -1,
        )


class Board:
    """Untrusted lines of JSON under a key of a store. All ranks read them in one order, so the first one can decide."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def append(self, **line: Any) -> None:
        """Add a line; a TCPStore does not wait for an answer."""
        self._store.append(self._key, json.dumps(line) + "\n")

    def lines(self) -> list[bytes]:
        return peek(self._store, self._key).splitlines()

    def entries(self) -> list[dict[str, Any]]:
        entries = []
        for line in self.lines():
            try:
                entries.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
        return [entry for entry in entries if isinstance(entry, dict)]


def is_kept_here(store: Any) -> bool:
    """Whether this process hosts a store, which others cannot reach once the process has ended."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return isinstance(store, TCPStore) and "server=TCPServer" in repr(store)  # PyTorch exposes it nowhere else


def of_attempt(store: Store, attempt: str = "0/0") -> PrefixStore:
    """The part of a store for one attempt at a run. attempt: torchrun's restart count / this process's meetings."""
    return PrefixStore(f"lowbit/run/{attempt}", store)


def peek(store: Any, key: str) -> bytes:
    """Return the value of a key, or an empty one, without waiting for the key: one round trip."""
    # `get` would wait for the key. If it is missing, `compare_set` writes nothing, and returns what it expected.
    value = store.compare_set(key, _NOTHING, _NOTHING)
    return b"" if value == _NOTHING.encode() else value


def wait_until(done: Callable[[], bool], seconds: float, *, pause: float = 0.05) -> bool:
    """Poll `done` until it returns True or the time is over; returns its last result."""
    deadline = time.monotonic() + seconds
    while not (answer := done()) and time.monotonic() < deadline:
        time.sleep(pause)
    return answer


def bounded(call: Callable[[], T], seconds: float) -> T:
    """Run a call on its own thread; TimeoutError if it takes longer: it then continues there."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        # Whatever ends the call: without an outcome the caller would wait for the whole limit.
        except BaseException as error:
            future.set_exception(error)

    threads.start(run, "store")
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()
