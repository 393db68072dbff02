"""Receives over Gloo, posted ahead of the schedule: as many as fit into a window.

Gloo asks the peer before it sends a message without a posted receive, which takes a round trip. So receives are posted
a bandwidth-delay product ahead: 12.5 MB at 1 Gbit/s and 100 ms.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakMethod

import torch.distributed as dist
from torch import Tensor

from lowbit.wire.traffic import Traffic

WINDOW_BYTES = 16 << 20
WINDOW_MESSAGES = 4  # at least so many, whatever their size


@dataclass(frozen=True)
class Route:
    """The peer's rank and the tag of a message, both within the group; and its name in errors."""

    peer: int
    tag: int
    about: str = field(default="a message", compare=False)


@dataclass
class _Window:
    """Messages that were expected together, and the number and size of those that are posted."""

    later: deque[Route] = field(default_factory=deque)
    messages: int = 0
    nbytes: int = 0


class Inbox:
    """Messages that a stage will take in a step.

    Args:
        post: method that posts a receive, given the route and size: returns the work and the buffer.
        traffic: where bytes that are held are counted.
    """

    def __init__(self, post: Callable[[Route, int], tuple[dist.Work, Tensor]], traffic: Traffic) -> None:
        # Weakly: the method's object owns this inbox, and a circle would keep the group's connections open.
        self._post, self._traffic = WeakMethod(post), traffic
        self._expected: dict[Route, tuple[int, _Window]] = {}  # to be posted
        self._posted: dict[Route, tuple[dist.Work, Tensor, _Window]] = {}

    def expect(self, messages: Iterable[tuple[Route, int]]) -> None:
        """Post as many as fit into a window of their own, and the others as these are taken."""
        window = _Window()
        for route, size in messages:
            self._expected[route] = size, window
            window.later.append(route)
        self._fill(window)

    @contextlib.contextmanager
    def taking(self, route: Route, size: int) -> Iterator[tuple[dist.Work, Tensor]]:
        """A message, for the block to wait for; its receive is posted at once if it is not yet."""
        if route not in self._posted:
            _, window = self._expected.pop(route, (size, _Window()))
            self._start(route, size, window)
        work, message, window = self._posted.pop(route)
        try:
            yield work, message
        finally:
            window.messages -= 1
            window.nbytes -= message.numel()
            self._traffic.hold(-message.numel())
        self._fill(window)

    def _fill(self, window: _Window) -> None:
        while window.later:
            route = window.later[0]
            if route in self._expected:  # nobody has taken it out of order
                size, _ = self._expected[route]
                if window.messages >= WINDOW_MESSAGES and window.nbytes + size > WINDOW_BYTES:
                    return
                del self._expected[route]
                self._start(route, size, window)
            window.later.popleft()

    def _start(self, route: Route, size: int, window: _Window) -> None:
        post = self._post()
        assert post is not None  # its object is calling
        work, message = post(route, size)
        self._posted[route] = work, message, window
        window.messages += 1
        window.nbytes += message.numel()
        self._traffic.hold(message.numel())
