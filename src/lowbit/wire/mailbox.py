"""Point-to-point messages over Gloo: with a length, a checksum, a time limit, and errors that name the failed rank.

If the ends disagree about a length, both get an error with both lengths: of different size classes (`tags`), message
and the receive never meet, and both ends state what they wait for (`failure`); of one class, the checksum shows it.

A thread of the `Outbox` waits for sends, so that the memory of each message is released once its peer has it, without
a time limit, because in a long step a peer may receive a message minutes later; only `drain` has one. A thread that
returns from Gloo while the interpreter ends would crash the process, so `sever` abandons messages first.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import tags
from lowbit.wire.checksum import Checksums, damaged
from lowbit.wire.connections import connections_of, pieces
from lowbit.wire.errors import PeerError
from lowbit.wire.failure import FailureBoard, MessageInFlight, Route, wrong_length
from lowbit.wire.traffic import Traffic

_SHORTEST = timedelta(milliseconds=1)  # Gloo takes 0 for no limit
_MOST_DEVICES = 8  # network devices of a Gloo group, each with its own connections


class Mailbox:
    """Sends and receives messages of one conversation within a Gloo group, on the CPU.

    `board`: finds the rank that failed; may be set later, but before the first message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        checksums: Checksums,
        board: FailureBoard | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.group, self.checksums, self.traffic = group, checksums, traffic or Traffic()
        if board is not None:
            self.board = board

    def send(self, message: Tensor, place: tuple[int, ...], *routes: Route, expected: int | None = None) -> list[Sent]:
        """Seal a message and start to send it to one or several ranks.

        `message`: 1-D uint8 whose last bytes are free for the checksum; do not write to it until it has been sent.
        `place`: identifies it in the conversation; the receiver passes the same. `expected`: bytes that the receiver
        has posted its receive for; None: the length of this message.
        """
        with self.traffic.timing("checksum_seconds"):
            self.checksums.seal(message, *place)
        # Tags and pieces follow from the length that the receiver expects, so that both ends cut alike.
        sent, nbytes = [], message.numel() if expected is None else expected
        for route in routes:
            works = [
                _started(carrier.send, [message[piece]], route.peer, tags.tag(route.channel, nbytes))
                for carrier, piece in pieces(self.group, route.channel, nbytes)
            ]
            sent.append(Sent(self.board, route, nbytes, False, self.group, works, message))
        return sent

    def expect(
        self, route: Route, nbytes: int, place: tuple[int, ...] = (), buffer: Callable[[int], Tensor] | None = None
    ) -> Expected:
        """Post the receive of a message of `nbytes` of payload; one that is posted late costs another round trip.

        `place`: as for `send`; may be set later, but before the wait. `buffer`: called with a number of bytes, returns
        at least as much memory to receive in: 1-D uint8 on the CPU.
        """
        nbytes += self.checksums.room
        # Without checksums nothing would show that a longer message was cut off: then Gloo has to end the process.
        room = tags.capacity(nbytes) if self.checksums.enabled else nbytes
        memory = (buffer or partial(torch.empty, dtype=torch.uint8, device="cpu"))(room)
        works = [
            _started(carrier.recv, [memory[:room][piece]], route.peer, tags.tag(route.channel, nbytes))
            for carrier, piece in pieces(self.group, route.channel, nbytes)
        ]
        return Expected(self.board, route, nbytes, True, self.group, works, self, memory, place)


def _started(start: Callable[..., dist.Work], *args: Any) -> dist.Work | RuntimeError:
    """Start to send or receive; an error, of a peer that has ended, is for the wait to raise."""
    try:
        return start(*args)
    except RuntimeError as error:
        return error


def _wait(works: Sequence[dist.Work | RuntimeError], patience: timedelta, group: dist.ProcessGroup) -> None:
    begin, left = time.monotonic(), patience
    try:
        for work in works:
            if isinstance(work, RuntimeError):
                raise work
            work.wait(left)
            left = max(_SHORTEST, patience - timedelta(seconds=time.monotonic() - begin))  # together, not each
    except RuntimeError as error:
        # Gloo has closed all connections that are like the one of the piece that did not pass, but no others.
        if len(works) > 1 and "timed out" in str(error).lower():
            sever(group)
        raise


@dataclass(eq=False)
class Sent(MessageInFlight):
    """A message that is being sent. Gloo reads from `message` until `wait` has returned."""

    group: dist.ProcessGroup
    works: list[dist.Work | RuntimeError]
    message: Tensor

    def wait(self) -> None:
        """Wait until the peer has received it; PeerError: the peer ended, or did not in time."""
        with self.board.blaming(self.route.peer):
            self.leave(self.board.patience)

    def leave(self, patience: timedelta) -> None:
        """Wait with another time limit, and raise Gloo's own error."""
        _wait(self.works, patience, self.group)
        self.done()


@dataclass(eq=False)
class Expected(MessageInFlight):
    """A message whose receive is posted. `place`: as for `Mailbox.send`."""

    group: dist.ProcessGroup
    works: list[dist.Work | RuntimeError]
    mailbox: Mailbox
    memory: Tensor
    place: tuple[int, ...]

    def wait(self, nbytes: int | None = None) -> Tensor:
        """Wait for the message and return its payload: 1-D uint8 on the CPU, of `nbytes` if shorter than expected.

        DamagedError: it did not arrive as it was sent. PeerError: the peer ended, was late, or sent another length.
        """
        checksums, timing = self.mailbox.checksums, self.mailbox.traffic.timing
        with self.board.blaming(self.route.peer), timing("wait_seconds", message=self.route.about):
            _wait(self.works, self.board.patience, self.group)
        self.done()
        end = self.nbytes if nbytes is None else nbytes + checksums.room
        with timing("checksum_seconds"):
            intact = checksums.intact(self.memory[:end], *self.place)
        if intact:
            return self.memory[: end - checksums.room]
        # A valid checksum at another place means another length, not damage.
        if (sent := checksums.end_of(self.memory, *self.place)) is None:
            raise damaged(self.route.about, self.route.peer)
        error = PeerError(wrong_length(self.route.about, sent, self.board.own_name, end), self.route.peer)
        self.board.give_up(error, partial(sever, self.mailbox.group))
        raise error


def sever(group: dist.ProcessGroup) -> None:
    """Close all of this rank's connections in a Gloo group, even a destroyed one, but not its store's: waits fail."""
    # A Gloo wait that times out closes the connections to all peers, so that no half of a message is left behind.
    # A wait on a connection that is closed already fails without that effect, so the next peer is tried.
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    first = tags.tag(tags.NEVER.first, 0)
    for carrier, device in product(connections_of(group), range(_MOST_DEVICES)):  # Gloo chooses a device by the tag
        for peer in others:
            try:
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                carrier.recv([nothing], peer, first + device).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    break


_UNLIMITED = timedelta(days=3650)  # Gloo adds it to the time of day; more could overflow
# The thread sleeps while fewer bytes are on their way: waking it costs more than holding this memory.
_BATCH_BYTES = 1 << 18
_EXIT_SECONDS = 5.0


@dataclass(eq=False)
class _Entry:
    """A message that is being sent: `group` carries it, until it has been sent, or has failed (None).

    `start`: waits until the send has started, and returns it; its errors are raised unchanged. `begin`: of `put`, in
    nanoseconds. `ours`: whether to raise `error` unchanged instead of blaming the peer.
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
        self.entries: deque[_Entry] = deque()
        self._nbytes = 0
        self._last = 0.0  # when the last send finished
        self._draining = self._closed = False
        self.thread: threading.Thread | None = None

    def put(
        self, group: dist.ProcessGroup, start: Callable[[], Sent], peer: int, nbytes: int, traffic: Traffic
    ) -> None:
        """Hold a message until its peer has it; returns at once. The arguments are attributes of `_Entry`."""
        traffic.hold(nbytes)
        with self._changed:
            self.entries.append(_Entry(group, start, peer, nbytes, traffic))
            self._nbytes += nbytes
            if self.thread is None:
                self.thread = threading.Thread(target=self._reap, name="lowbit-outbox", daemon=True)
                self.thread.start()
                _running.add(self)
            if self._nbytes >= _BATCH_BYTES or traffic.trace is not None:
                self._changed.notify_all()

    def drain(self, patience: timedelta, blaming: Callable[[int], AbstractContextManager[None]]) -> None:
        """Wait until everything has been sent, at most `patience` for each; `blaming` explains a peer's error."""
        limit = patience.total_seconds()
        while True:
            start = time.monotonic()
            with self._changed:
                self._draining = True
                self._changed.notify_all()
                left = limit
                while not self._changed.wait_for(self._is_decided, left):
                    # Each send that finishes renews the limit: a slow link is not a dead peer.
                    left = max(start, self._last) + limit - time.monotonic()
                    if left <= 0:
                        break
                self._draining = False
                if not self.entries:
                    return
                entry = self.entries[0]
                if entry.group is None:
                    self.entries.popleft()
            with contextlib.nullcontext() if entry.ours else blaming(entry.peer):
                if entry.group is not None:
                    # The thread waits for this send without a limit; closing the connections ends that wait.
                    self.sever()
                    raise RuntimeError(f"Timed out waiting {round(1000 * limit)}ms for a message to be taken")
                if entry.error is not None:
                    raise entry.error

    def sever(self) -> None:
        group = next((entry.group for entry in list(self.entries) if entry.group), None)
        if group is not None:
            sever(group)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _reap(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                waiting = [entry for entry in self.entries if entry.group is not None]
                # The outbox was closed, and holds nothing more.
                if not waiting:
                    return
            while waiting:  # `pop`: keep no reference to a message that has been sent
                self._finish(waiting.pop(0))

    def _is_decided(self) -> bool:
        # Whether `drain` can return or raise: nothing is left, or the oldest message failed.
        return not self.entries or self.entries[0].group is None

    def _has_work(self) -> bool:
        under_way = [entry for entry in self.entries if entry.group]
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
            while self.entries and (first := self.entries[0]).group is None and not first.error:
                self.entries.popleft()
            if self._is_decided():
                self._changed.notify_all()


_outboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Outbox] = weakref.WeakKeyDictionary()
_running: weakref.WeakSet[Outbox] = weakref.WeakSet()


def outbox_of(group: dist.ProcessGroup) -> Outbox:
    """Return this process's outbox for a group; there is one per group."""
    if group not in _outboxes:
        outbox = _outboxes[group] = Outbox()
        # Otherwise its thread would wait forever for messages of a group that is gone.
        weakref.finalize(group, outbox.close)
    return _outboxes[group]


@atexit.register
def _end_all() -> None:
    """Abandon the messages that have not been sent, and wait until the threads have ended."""
    for outbox in list(_running):
        outbox.close()
        # The thread may be in a wait without a limit, which only closed connections end.
        outbox.sever()
        if outbox.thread is not None:
            outbox.thread.join(_EXIT_SECONDS)
