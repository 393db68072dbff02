"""Receives over Gloo, posted ahead of the schedule, as many as fit into a window.

Gloo asks the peer before it sends a message without a posted receive, which takes a round trip. So receives are posted
a bandwidth-delay product ahead: 12.5 MB at 1 Gbit/s and 100 ms.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from lowbit.wire.mailbox import Expected, Mailbox, Route

WINDOW_BYTES = 16 << 20
WINDOW_MESSAGES = 4  # fewest messages in a window, whatever their size


@dataclass
class _Window:
    """Messages expected together; number and bytes of those whose receives are posted."""

    later: deque[Route] = field(default_factory=deque)
    messages: int = 0
    nbytes: int = 0


class Inbox:
    """Messages that a stage will take in a step; `buffer`: as for `Mailbox.expect`."""

    def __init__(self, mailbox: Mailbox, buffer: Callable[[int], Tensor] | None = None) -> None:
        self._mailbox, self._traffic, self._buffer = mailbox, mailbox.traffic, buffer
        self._expected: dict[Route, tuple[int, _Window]] = {}  # not posted yet; payload bytes and window of each
        self._posted: dict[Route, tuple[Expected, _Window]] = {}

    def expect(self, messages: Iterable[tuple[Route, int]]) -> None:
        """Post as many receives as fit into a new window, and the others as these messages are taken."""
        window = _Window()
        for route, size in messages:
            self._expected[route] = size, window
            window.later.append(route)
        self._fill(window)

    @contextlib.contextmanager
    def taking(self, route: Route, size: int) -> Iterator[Expected]:
        """Yield a message for the block to wait for; its receive is posted first if it is not yet."""
        if route not in self._posted:
            _, window = self._expected.pop(route, (size, _Window()))
            self._start(route, size, window)
        message, window = self._posted.pop(route)
        try:
            yield message
        finally:
            window.messages -= 1
            window.nbytes -= message.nbytes
            self._traffic.hold(-message.nbytes)
        self._fill(window)

    def _fill(self, window: _Window) -> None:
        while window.later:
            route = window.later[0]
            if route in self._expected:  # not already taken out of order
                size, _ = self._expected[route]
                whole = size + self._mailbox.checksums.room
                if window.messages >= WINDOW_MESSAGES and window.nbytes + whole > WINDOW_BYTES:
                    return
                del self._expected[route]
                self._start(route, size, window)
            window.later.popleft()

    def _start(self, route: Route, size: int, window: _Window) -> None:
        message = self._mailbox.expect(route, size, buffer=self._buffer)
        self._posted[route] = message, window
        window.messages += 1
        window.nbytes += message.nbytes
        self._traffic.hold(message.nbytes)
