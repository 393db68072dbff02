"""Sends over Gloo: a thread waits for them, so that the memory of each message is released once its peer has it.

It waits without a time limit, because in a long step a peer may receive a message minutes later; only `drain` has one.
A thread that returns from Gloo while the interpreter ends would crash the process, so `sever` abandons messages first.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from lowbit.wire.mailbox import Sent, sever
from lowbit.wire.traffic import Traffic

_UNLIMITED = timedelta(days=3650)  # Gloo adds it to the time of day; more could overflow
# The thread sleeps while fewer bytes are on their way: waking it costs more than holding this memory.
_BATCH_BYTES = 1 << 18
_EXIT_SECONDS = 5.0


@dataclass(eq=False)
class _Entry:
    """A message that is being sent.

    Attributes:
        group: carries it; None once it has been sent, or has failed.
        start: waits until the send has started, and returns it; its errors are raised unchanged.
        begin: of `put`, in nanoseconds. ours: whether to raise `error` unchanged instead of blaming the peer.
    """

    group: dist.ProcessGroup | None
    start: Callable[[], Sent] | None
    peer: int
    nbytes: int
    traffic: Traffic
    begin: int = field(default_factory=time.perf_counter_ns)
    error: Exception | None = None
    ours: bool = False


class Outbox:
    """Messages that this rank's stages are sending in a group, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        self._nbytes = 0
        self._last = 0.0  # when the last send finished
        self._draining = self._closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, group: dist.ProcessGroup, start: Callable[[], Sent], peer: int, nbytes: int, traffic: Traffic
    ) -> None:
        """Hold a message until its peer has it; returns at once. The arguments are attributes of `_Entry`."""
        traffic.hold(nbytes)
        with self._changed:
            self._entries.append(_Entry(group, start, peer, nbytes, traffic))
            self._nbytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._reap, name="lowbit-outbox", daemon=True)
                self._thread.start()
                _running.add(self)
            if self._nbytes >= _BATCH_BYTES or traffic.trace is not None:
                self._changed.notify_all()

    def drain(self, patience: timedelta, blaming: Callable[[int], AbstractContextManager[None]]) -> None:
        """Wait until everything has been sent, at most `patience` for one message.

        `blaming` turns a peer's error into the one to raise; an error of this rank's device is raised unchanged.
        """
        limit = patience.total_seconds()
        while True:
            start = time.monotonic()
            with self._changed:
                self._draining = True
                self._changed.notify_all()
                left = limit
                while not self._changed.wait_for(self._is_decided, left):
                    left = max(start, self._last) + limit - time.monotonic()
                    if left <= 0:
                        break
                self._draining = False
                if not self._entries:
                    return
                entry = self._entries[0]
                if entry.group is None:
                    self._entries.popleft()
            with contextlib.nullcontext() if entry.ours else blaming(entry.peer):
                if entry.group is not None:
                    self.sever()
                    raise RuntimeError(f"Timed out waiting {round(1000 * limit)}ms for a message to be taken")
                if entry.error is not None:
                    raise entry.error

    def sever(self) -> None:
        """Abandon the messages that have not been sent."""
        group = next((entry.group for entry in list(self._entries) if entry.group), None)
        if group is not None:
            sever(group)

    def close(self) -> None:
        """Let the thread end once it has nothing to wait for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Abandon the messages that have not been sent, and wait until the thread has ended."""
        self.close()
        self.sever()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)

    def _reap(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                waiting = [entry for entry in self._entries if entry.group is not None]
                if not waiting:
                    return
            while waiting:  # `pop`: keep no reference to a message that has been sent
                self._finish(waiting.pop(0))

    def _is_decided(self) -> bool:
        """Whether `drain` can return or raise: nothing is left, or the oldest message failed."""
        return not self._entries or self._entries[0].group is None

    def _has_work(self) -> bool:
        under_way = [entry for entry in self._entries if entry.group]
        traced = any(entry.traffic.trace is not None for entry in under_way)  # to record when it was sent
        enough = self._nbytes >= _BATCH_BYTES or self._draining or traced
        return self._closed or (enough and bool(under_way))

    def _finish(self, entry: _Entry) -> None:
        start, entry.start, entry.ours = entry.start, None, True
        assert start is not None
        try:
            sent = start()
            entry.ours = False
            sent.leave(_UNLIMITED)
        except Exception as error:  # `drain` raises it
            entry.error = error
        traffic, nbytes = entry.traffic, entry.nbytes
        if traffic.trace is not None:
            traffic.trace.add_sent(entry.peer, entry.begin, time.perf_counter_ns(), nbytes)
        traffic.hold(-nbytes)
        start = sent = None  # both reference the message's memory
        with self._changed:
            entry.group = None
            self._nbytes -= nbytes
            self._last = time.monotonic()
            while self._entries and (first := self._entries[0]).group is None and not first.error:
                self._entries.popleft()
            if self._is_decided():
                self._changed.notify_all()


_outboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Outbox] = weakref.WeakKeyDictionary()
_running: weakref.WeakSet[Outbox] = weakref.WeakSet()


def outbox_of(group: dist.ProcessGroup) -> Outbox:
    """Return this process's outbox for a group; there is one per group."""
    if group not in _outboxes:
        outbox = _outboxes[group] = Outbox()
        weakref.finalize(group, outbox.close)
    return _outboxes[group]


@atexit.register
def _end_all() -> None:
    for outbox in list(_running):
        outbox.end()
