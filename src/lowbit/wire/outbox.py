"""Sends over Gloo: a thread waits for them, so that each message is released when its peer has it.

Gloo reports a finished send only to a thread that waits for it. The outbox's thread waits without a
limit: in a long step, a peer may take a message minutes after it was sent. Only `drain` has a limit.

A thread that comes back from Gloo while the interpreter ends would crash the process. So messages that are still being
sent at exit are given up before, by closing this rank's connections in the group (`sever`).
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire.traffic import Traffic

_UNLIMITED = timedelta(days=3650)  # Gloo still adds it to the time of day without an overflow
# The thread rests while less is on its way: waking it costs more than this memory.
_BATCH_BYTES = 1 << 18
_MOST_DEVICES = 8  # network devices of a Gloo group, each with connections of its own
_SEVER_TAG = (1 << 28) - _MOST_DEVICES  # the first of tags that no message has
_EXIT_SECONDS = 5.0


@dataclass(eq=False)
class Sent:
    """A message on its way.

    Attributes:
        group: the process group that carries it.
        work: waits until the send has started, and returns it; an error there is this rank's.
        message: the buffer, which Gloo reads until the work is done.
        peer: the receiver.
        traffic: where its bytes are counted.
        begin: when it was handed over, in nanoseconds of `time.perf_counter_ns`.
    """

    group: dist.ProcessGroup
    work: Callable[[], Any]
    message: Tensor
    peer: int
    traffic: Traffic
    begin: int = field(default_factory=time.perf_counter_ns)


@dataclass(eq=False)
class _Entry:
    peer: int
    sent: Sent | None  # None: it has left, or failed
    error: Exception | None = None
    ours: bool = False  # the error is this rank's own


class Outbox:
    """Messages that the stages of this rank are sending in a group, in the order of sending."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        self._nbytes = 0
        self._last = 0.0  # time when a message last left
        self._draining = self._closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, sent: Sent) -> None:
        """Keep a message until its peer has it; returns at once."""
        sent.traffic.hold(sent.message.numel())
        with self._changed:
            self._entries.append(_Entry(sent.peer, sent))
            self._nbytes += sent.message.numel()
            if self._thread is None:
                self._thread = threading.Thread(target=self._reap, name="lowbit-outbox", daemon=True)
                self._thread.start()
                _running.add(self)
            if self._nbytes >= _BATCH_BYTES or sent.traffic.trace is not None:
                self._changed.notify_all()

    def drain(self, patience: timedelta, blaming: Callable[[int], AbstractContextManager[None]]) -> None:
        """Wait until everything has left.

        Args:
            patience: how long to wait for one message.
            blaming: turns an error of a peer into the one to raise; an error of this rank's device is raised as it is.
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
                if entry.sent is None:
                    self._entries.popleft()
            with contextlib.nullcontext() if entry.ours else blaming(entry.peer):
                if entry.sent is not None:
                    self.sever()
                    raise RuntimeError(f"Timed out waiting {round(1000 * limit)}ms for a message to be taken")
                if entry.error is not None:
                    raise entry.error

    def sever(self) -> None:
        """Give up the messages that have not left."""
        sent = next((entry.sent for entry in list(self._entries) if entry.sent), None)
        if sent is not None:
            sever(sent.group)

    def close(self) -> None:
        """Let the thread end once there is nothing to wait for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Give up the messages that have not left, and wait until the thread has ended."""
        self.close()
        self.sever()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)

    def _reap(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                waiting = [entry for entry in self._entries if entry.sent is not None]
                if not waiting:
                    return
            while waiting:  # without a reference to messages that have left
                self._finish(waiting.pop(0))

    def _is_decided(self) -> bool:
        """Whether `drain` need not wait: nothing is left, or the oldest message failed."""
        return not self._entries or self._entries[0].sent is None

    def _has_work(self) -> bool:
        under_way = [entry.sent for entry in self._entries if entry.sent]
        traced = any(sent.traffic.trace is not None for sent in under_way)  # for the time when it leaves
        enough = self._nbytes >= _BATCH_BYTES or self._draining or traced
        return self._closed or (enough and bool(under_way))

    def _finish(self, entry: _Entry) -> None:
        sent = entry.sent
        assert sent is not None
        entry.ours = True
        try:
            work = sent.work()
            entry.ours = False
            work.wait(_UNLIMITED)
        except Exception as error:  # `drain` raises it
            entry.error = error
        nbytes = sent.message.numel()
        if sent.traffic.trace is not None:
            sent.traffic.trace.add_sent(sent.peer, sent.begin, time.perf_counter_ns(), nbytes)
        sent.traffic.hold(-nbytes)
        with self._changed:
            entry.sent = None
            self._nbytes -= nbytes
            self._last = time.monotonic()
            while self._entries and (first := self._entries[0]).sent is None and not first.error:
                self._entries.popleft()
            if self._is_decided():
                self._changed.notify_all()


_outboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Outbox] = weakref.WeakKeyDictionary()
_running: weakref.WeakSet[Outbox] = weakref.WeakSet()


def outbox_of(group: dist.ProcessGroup) -> Outbox:
    """The one outbox of a group in this process."""
    if group not in _outboxes:
        outbox = _outboxes[group] = Outbox()
        weakref.finalize(group, outbox.close)
    return _outboxes[group]


def sever(group: dist.ProcessGroup) -> None:
    """Close all of this rank's connections in a Gloo group, even a destroyed one; whoever waits there fails at once.

    This process goes on, and the store of the group is as usable as before.
    """
    # A wait on Gloo that times out closes the connections to all peers, since no half of a message may stay behind.
    # A connection that is closed already fails without that, so the next peer is tried.
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    for device in range(_MOST_DEVICES):  # Gloo chooses among its devices by the tag
        for peer in others:
            try:
                nothing = torch.empty(1, dtype=torch.uint8)
                group.recv([nothing], peer, _SEVER_TAG + device).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    break


@atexit.register
def _end_all() -> None:
    for outbox in list(_running):
        outbox.end()
