"""What the rank with a pipeline's first stage tells all others at the start of a pass: one small message, one way."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.collectives.checksum import Checksums, damaged
from lowbit.collectives.failure import FailureBoard, PeerError
from lowbit.collectives.store import BoundedStore

MESSAGE_BYTES = 512
"""Bytes of the message, without its checksum: JSON, padded with blanks."""

_TAG = 1 << 29  # away from the small tags that a program may use itself
_UNDER_WAY = 64  # passes that the first stage may be ahead of the last
_POLL = 0.0005  # seconds between two looks into the store
_KEPT = (
    1024  # passes whose message is left in the store: so many may the first stage be ahead there
)


class Announcements(Protocol):
    """One message for each pass after the first, from one rank to all others."""

    def tell(self, number: int, value: Any) -> int:
        """Tell all others; does not wait for them. Returns bytes sent. value: what JSON can hold."""
        ...

    def hear(self, number: int) -> Any:
        """Wait for what is told.

        Raises:
            PeerError: nothing came in time, or no JSON.
        """
        ...


def choose(
    group: dist.ProcessGroup, source: int, board: FailureBoard, checksums: Checksums
) -> Announcements:
    """The way of a group: Gloo's messages from rank `source`; the group's store where there is no Gloo.

    Args:
        group: the ranks; board: who failed first; checksums: of the messages.
    """
    if "gloo" in dist.get_backend_config(group):
        return _Direct(group, source, board, checksums)
    return _ThroughStore(group, source, board)


class _Direct:
    """Messages of Gloo's; half a round trip."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, board: FailureBoard, checksums: Checksums
    ) -> None:
        self._group, self._source, self._board = group, source, board
        self._checksums = checksums
        others = set(range(dist.get_world_size(group))) - {source}
        self._others = sorted(others)
        self._under_way: deque[list[tuple[int, dist.Work, Tensor]]] = deque()

    def tell(self, number: int, value: Any) -> int:
        message = torch.empty(MESSAGE_BYTES + self._checksums.room, dtype=torch.uint8)
        message[:MESSAGE_BYTES] = _padded(value)
        self._checksums.seal(message, number, self._source, _TAG)
        sends = []
        for rank in self._others:
            with self._board.blaming(rank):
                work = dist.isend(message, group=self._group, group_dst=rank, tag=_TAG)
            assert work is not None  # only for ranks outside the group
            sends.append((rank, work, message))
        self._under_way.append(sends)
        if len(self._under_way) > _UNDER_WAY:
            for rank, work, _ in self._under_way.popleft():
                with self._board.blaming(rank):
                    work.wait(self._board.patience)
        return len(self._others) * message.numel()

    def hear(self, number: int) -> Any:
        message = torch.empty(MESSAGE_BYTES + self._checksums.room, dtype=torch.uint8)
        with self._board.blaming(self._source):
            work = dist.irecv(message, group=self._group, group_src=self._source, tag=_TAG)
            assert work is not None
            work.wait(self._board.patience)
        if not self._checksums.intact(message, number, self._source, _TAG):
            raise damaged(f"the announcement of pass {number}", self._source)
        return _parsed(message[:MESSAGE_BYTES].numpy().tobytes(), self._source)


class _ThroughStore:
    """A key of the group's store; for NCCL, whose messages would make the host wait for the device."""

    def __init__(self, group: dist.ProcessGroup, source: int, board: FailureBoard) -> None:
        self._limit = board.patience.total_seconds()
        self._store = BoundedStore(group, self._limit)
        self._source, self._topic = source, board.topic

    def tell(self, number: int, value: Any) -> int:
        text = json.dumps(value)
        self._store.append(self._key(number), text)
        if number >= _KEPT:
            self._store.delete_key(self._key(number - _KEPT))
        return len(text)

    def hear(self, number: int) -> Any:
        start = time.monotonic()
        while not (text := self._store.read(self._key(number))):
            if time.monotonic() > start + self._limit:
                raise PeerError(
                    f"rank {self._source} announced no pass within {self._limit:g} s", self._source
                )
            time.sleep(_POLL)
        return _parsed(text, self._source)

    def _key(self, number: int) -> str:
        return f"lowbit/pass/{self._topic}/{number}"


def _padded(value: Any) -> Tensor:
    text = json.dumps(value).encode()
    if len(text) > MESSAGE_BYTES:
        raise ValueError(f"an announcement has {len(text)} bytes; allowed: {MESSAGE_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(MESSAGE_BYTES)), dtype=torch.uint8)


def _parsed(text: bytes, source: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"rank {source} announced no JSON: {error}", source) from None
