"""What a stage will receive over Gloo: receives are posted ahead of the schedule, as many as fit into a window."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakMethod

import torch.distributed as dist
from torch import Tensor

from lowbit.pipeline.traffic import Traffic

# Gloo asks the peer before it sends what has no receive yet, which takes a round trip; so receives are posted a
# bandwidth-delay product ahead: 12.5 MB at 1 Gbit/s and 100 ms.
WINDOW_BYTES = 16 << 20
WINDOW_MESSAGES = 4  # at least so many, whatever their size

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Lane(Generic[Key]):
    later: deque[Key] = field(default_factory=deque)
    messages: int = 0  # posted
    nbytes: int = 0  # of those


class Inbox(Generic[Key]):
    """Messages that are to be taken in a step; `len` of it are left.

    Args:
        post: method that starts to receive one, given its key and size: the work, and the memory it is received in.
        traffic: where bytes that are held are counted.
    """

    def __init__(self, post: Callable[[Key, int], tuple[dist.Work, Tensor]], traffic: Traffic) -> None:
        # Weakly: what posts has this inbox, and a circle would keep the group's connections open.
        self._post, self._traffic = WeakMethod(post), traffic
        self._expected: dict[Key, tuple[int, _Lane[Key]]] = {}  # to be posted
        self._posted: dict[Key, tuple[dist.Work, Tensor, _Lane[Key]]] = {}

    def __len__(self) -> int:
        return len(self._expected) + len(self._posted)

    def expect(self, messages: Iterable[tuple[Key, int]]) -> None:
        """Post as many as fit into a window of their own, and the others as these are taken."""
        lane: _Lane[Key] = _Lane()
        for key, size in messages:
            self._expected[key] = size, lane
            lane.later.append(key)
        self._fill(lane)

    @contextlib.contextmanager
    def taking(self, key: Key, size: int) -> Iterator[tuple[dist.Work, Tensor]]:
        """A message, for the block to wait for; posted at once if it is not yet, expected or not."""
        if key not in self._posted:
            _, lane = self._expected.pop(key, (size, _Lane()))
            self._start(key, size, lane)
        work, message, lane = self._posted.pop(key)
        try:
            yield work, message
        finally:
            lane.messages -= 1
            lane.nbytes -= message.numel()
            self._traffic.hold(-message.numel())
        self._fill(lane)

    def _fill(self, lane: _Lane[Key]) -> None:
        while lane.later:
            key = lane.later[0]
            if key in self._expected:  # nobody has taken it out of order
                size, _ = self._expected[key]
                if lane.messages >= WINDOW_MESSAGES and lane.nbytes + size > WINDOW_BYTES:
                    return
                del self._expected[key]
                self._start(key, size, lane)
            lane.later.popleft()

    def _start(self, key: Key, size: int, lane: _Lane[Key]) -> None:
        post = self._post()
        assert post is not None  # its object is calling
        work, message = post(key, size)
        self._posted[key] = work, message, lane
        lane.messages += 1
        lane.nbytes += message.numel()
        self._traffic.hold(message.numel())
