"""Announcement of a pass: one small message from the rank with the first stage to all others.

`send` sends a value that JSON can hold, waits for nobody, and returns the bytes sent; `receive` waits for it; `finish`
waits until all has left, so that this rank may end. `number` counts passes, the same on all ranks.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire.checksum import Checksums, damaged
from lowbit.wire.errors import PeerError
from lowbit.wire.failure import FailureBoard
from lowbit.wire.store import BoundedStore

MESSAGE_BYTES = 512
"""Bytes of the message, without its checksum: JSON, padded with blanks."""

_AHEAD = 4  # receives that are posted ahead; the first stage may be so many passes ahead of the last
# Seconds between two looks into the store: a share of those waited.
_SHORTEST, _LONGEST, _SHARE = 0.0005, 0.01, 0.05
_KEPT_PASSES = 1024  # whose messages stay in the store; the first stage may be so far ahead there


def choose(group: dist.ProcessGroup, source: int, board: FailureBoard, checksums: Checksums, tag: int) -> Announcements:
    """Announcements of rank `source`: by Gloo's messages, or through the group's store where the group has no Gloo."""
    if "gloo" in dist.get_backend_config(group):
        return _Direct(group, source, board, checksums, tag)
    return _ThroughStore(group, source, board)


class _Direct:
    """By Gloo's messages; they take half a round trip, because receives are posted ahead of their passes."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, board: FailureBoard, checksums: Checksums, tag: int
    ) -> None:
        self._group, self._source, self._board = group, source, board
        self._checksums, self._tag = checksums, tag
        self._others = [rank for rank in range(dist.get_world_size(group)) if rank != source]
        self._sends: list[tuple[int, dist.Work]] = []
        self._sent = torch.empty(0, dtype=torch.uint8)
        self._receives: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, number: int, value: Any) -> int:
        text = json.dumps(value).encode()
        if len(text) > MESSAGE_BYTES:
            raise ValueError(f"an announcement has {len(text)} bytes; allowed: {MESSAGE_BYTES}")
        padded = text.ljust(MESSAGE_BYTES) + bytes(self._checksums.room)
        self._sent = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        self._checksums.seal(self._sent, number, self._source, self._tag)
        for rank in self._others:
            with self._board.blaming(rank):
                work = dist.isend(self._sent, group=self._group, group_dst=rank, tag=self._tag)
            assert work is not None  # only for ranks outside the group
            self._sends.append((rank, work))
        return len(self._others) * self._sent.numel()

    def receive(self, number: int) -> Any:
        with self._board.blaming(self._source):
            while len(self._receives) < _AHEAD:
                message = torch.empty(MESSAGE_BYTES + self._checksums.room, dtype=torch.uint8)
                work = dist.irecv(message, group=self._group, group_src=self._source, tag=self._tag)
                assert work is not None
                self._receives.append((work, message))
            work, message = self._receives.popleft()
            work.wait(self._board.patience)
        if not self._checksums.intact(message, number, self._source, self._tag):
            raise damaged(f"the announcement of pass {number}", self._source)
        return _parsed(message[:MESSAGE_BYTES].numpy().tobytes(), self._source)

    def finish(self) -> None:
        while self._sends:
            rank, work = self._sends.pop()
            with self._board.blaming(rank):
                work.wait(self._board.patience)


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
