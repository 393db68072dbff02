"""Announcement of a pass: one small message from the rank with the first stage to all others.

`send` does not wait, and returns the bytes sent; `finish` waits until everything has been sent. `number` counts passes.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from lowbit.wire.checksum import Checksums
from lowbit.wire.errors import PeerError
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Expected, Mailbox, Route, Sent
from lowbit.wire.store import BoundedStore

MESSAGE_BYTES = 512
"""Bytes of the message, without its checksum: JSON, padded with blanks."""

_AHEAD = 4  # receives posted ahead: the first stage may be this many passes ahead of the last
# Seconds between two reads of the store: a share of the time waited so far, within these limits.
_SHORTEST, _LONGEST, _SHARE = 0.0005, 0.01, 0.05
_KEPT_PASSES = 1024  # messages kept in the store: the first stage may be this many passes ahead there


def choose(
    group: dist.ProcessGroup, source: int, board: FailureBoard, checksums: Checksums, channel: int
) -> Announcements:
    """Return the announcements of rank `source`: Gloo messages, or through the store if the group has no Gloo."""
    if "gloo" in dist.get_backend_config(group):
        return _Direct(Mailbox(group, checksums, board), source, channel)
    return _ThroughStore(group, source, board)


class _Direct:
    """By Gloo messages; each takes half a round trip, because receives are posted ahead of their passes."""

    def __init__(self, mailbox: Mailbox, source: int, channel: int) -> None:
        self._mailbox, self._source, self._channel = mailbox, source, channel
        self._sent: list[Sent] = []
        self._expected: deque[Expected] = deque()

    def send(self, number: int, value: Any) -> int:
        text = json.dumps(value).encode()
        if len(text) > MESSAGE_BYTES:
            raise ValueError(f"an announcement has {len(text)} bytes; allowed: {MESSAGE_BYTES}")
        padded = text.ljust(MESSAGE_BYTES) + bytes(self._mailbox.checksums.room)
        message = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        others = [self._route(rank, number) for rank in range(self._mailbox.group.size()) if rank != self._source]
        self._sent += self._mailbox.send(message, (number, self._source, self._channel), *others)
        return len(others) * message.numel()

    def receive(self, number: int) -> Any:
        while len(self._expected) < _AHEAD:
            coming = number + len(self._expected)
            place = coming, self._source, self._channel
            self._expected.append(self._mailbox.expect(self._route(self._source, coming), MESSAGE_BYTES, place))
        return _parsed(self._expected.popleft().wait().numpy().tobytes(), self._source)

    def finish(self) -> None:
        while self._sent:
            self._sent.pop().wait()

    def _route(self, peer: int, number: int) -> Route:
        return Route(peer, self._channel, f"the announcement of pass {number}")


class _ThroughStore:
    """By keys of the group's store; for NCCL, whose messages would make the host wait for the device."""

    def __init__(self, group: dist.ProcessGroup, source: int, board: FailureBoard) -> None:
        self._limit = board.patience.total_seconds()
        self._store = BoundedStore(group, self._limit)
        self._source, self._topic = source, board.topic

    def send(self, number: int, value: Any) -> int:
        text = json.dumps(value)
        self._store.append(self._key(number), text)
        if number >= _KEPT_PASSES:
            self._store.delete_key(self._key(number - _KEPT_PASSES))
        return len(text)

    def receive(self, number: int) -> Any:
        start = time.monotonic()
        while not (text := self._store.read(self._key(number))):
            waited = time.monotonic() - start
            if waited > self._limit:
                raise PeerError(f"rank {self._source} announced no step within {self._limit:g} s", self._source)
            time.sleep(min(_LONGEST, max(_SHORTEST, _SHARE * waited)))
        return _parsed(text, self._source)

    def finish(self) -> None:
        pass

    def _key(self, number: int) -> str:
        return f"lowbit/pass/{self._topic}/{number}"


Announcements = _Direct | _ThroughStore


def _parsed(text: bytes, source: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"rank {source} sent an announcement that is not JSON: {error}", source) from None
