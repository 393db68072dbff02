"""A store whose every call ends: PyTorch's own block for as long as the machine that keeps it is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lowbit.ranks.failure import PeerError, peek

T = TypeVar("T")


class BoundedStore:
    """The store of a process group, with a limit on each call.

    A call that reaches the limit stays blocked, on a thread of its own, and every later one fails at once.

    Nothing here waits in the store for a key to come. PyTorch's TCPStore holds a lock of its connection meanwhile, so
    that all other threads that use this store would wait as well; it prints two warnings each time such a wait ends
    without the key; and `get` takes two round trips, one to wait and one to read, so that reading again and again what
    is there is not later.

    Args:
        group: whose store. seconds: limit of a call.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._store: Any = group.get_group_store()  # PyTorch's stubs lack `append`
        self._seconds = seconds
        self._silent = False

    def append(self, key: str, value: str) -> None:
        """Extend the value of a key, or begin it; a TCPStore does not wait for an answer."""
        self._call(lambda: self._store.append(key, value))

    def read(self, key: str) -> bytes:
        """What a key holds, or nothing, in one round trip: `check` and `get` would take three."""
        return self._call(lambda: peek(self._store, key))

    def delete_key(self, key: str) -> None:
        """Remove a value; one round trip."""
        self._call(lambda: self._store.delete_key(key))

    def _call(self, call: Callable[[], T]) -> T:
        """The outcome of a call.

        Raises:
            PeerError: the store did not answer in time.
            RuntimeError: its connection has ended.
        """
        if not self._silent:
            try:
                return bounded(call, self._seconds)
            except TimeoutError:
                self._silent = True
        raise PeerError(
            f"the store of the process group did not answer within {self._seconds:g} s: the rank or launcher that "
            "keeps it, or the network to its machine, is gone",
            -1,
        )


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What a call returns or raises, on a thread of its own.

    Raises:
        TimeoutError: it took longer, and goes on.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="lowbit-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome[0]
