"""A store whose every call ends: PyTorch's own block for as long as the machine that keeps it is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lowbit.collectives.failure import PeerError

T = TypeVar("T")


class BoundedStore:
    """The store of a process group, with a limit on each call.

    A call that reaches the limit stays blocked, on a thread of its own, and every later one fails at once.

    Args:
        group: whose store. seconds: limit of a call.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._store: Store = group.get_group_store()
        self._seconds = seconds
        self._silent = False

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Read a value that is there."""
        return self._call(lambda: self._store.get(key))

    def check(self, key: str) -> bool:
        """Whether there is a value."""
        return self._call(lambda: self._store.check([key]))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value where the expected one is, or none; returns what is there then."""
        return self._call(lambda: self._store.compare_set(key, expected, value))

    def delete_key(self, key: str) -> None:
        """Remove a value."""
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
