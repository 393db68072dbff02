"""Hidden states from one stage to the next, whose sizes both ends know, with receives posted ahead.

Gloo sends a message once its receive is posted. A receiver that posts one only when it needs the message has the link
idle while it computes, and waits for another trip to the sender. So it keeps some receives posted, each as large as the
message before. The sender counts them as well. A shorter message fits one of them: Gloo fills the beginning of it. For
each that is too short for the next message the sender sends an empty message, and the receiver posts another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from torch import Tensor

from lowbit.ranks.messages import Expected, Messages, Sent

AHEAD = 2
"""Receives that are posted ahead."""
_MOST_SENT = 4  # messages on their way that a sender keeps


class Outgoing:
    """The sender's end. peer: the next stage; None: there is none."""

    def __init__(self, messages: Messages, peer: int | None) -> None:
        self._messages, self._peer = messages, peer
        self._posted: deque[int] = deque()  # bytes of payload that they have room for
        self._sent: deque[Sent] = deque()

    def send(self, payload: Tensor) -> int:
        """Start to send; returns the bytes that travel, and waits only while many messages are on their way.

        Raises:
            PeerError: the peer ended, or did not take an earlier message in time.
        """
        size = payload.numel()
        total = 0
        while self._posted and self._posted.popleft() < size:
            total += self._put(payload[:0])
        total += self._put(payload)
        while len(self._posted) < AHEAD:
            self._posted.append(size)
        while len(self._sent) > _MOST_SENT:
            self._sent.popleft().wait()
        return total

    def drain(self) -> None:
        """Wait until the peer has everything.

        Raises:
            PeerError: it ended, or did not take it in time.
        """
        while self._sent:
            self._sent.popleft().wait()

    def _put(self, payload: Tensor) -> int:
        assert self._peer is not None  # the last stage sends none
        self._sent.append(self._messages.send(payload, self._peer))
        return self._sent[-1].message.numel()


class Incoming:
    """The receiver's end. peer: the previous stage; None: there is none."""

    def __init__(self, messages: Messages, peer: int | None) -> None:
        self._messages, self._peer = messages, peer
        self._posted: deque[tuple[int, Expected]] = deque()

    def receive(self, size: int, about: str) -> Tensor:
        """Wait for the next payload, uint8 (size,) on the CPU. about: its name in errors.

        Raises:
            PeerError: the peer ended, or did not send in time. DamagedError: it did not arrive as it was sent.
        """
        short: list[Expected] = []
        found: Expected | None = None
        while self._posted and found is None:
            room, expected = self._posted.popleft()
            if room < size:
                short.append(expected)
            else:
                found = expected
        found = found or self._post(size, about)
        while len(self._posted) < AHEAD:
            self._posted.append((size, self._post(size, "hidden states")))
        for expected in short:
            self._beginning(expected, 0).wait()
        return self._beginning(found, size).wait()

    def _post(self, size: int, about: str) -> Expected:
        assert self._peer is not None  # the first stage receives none
        return self._messages.expect(size, self._peer, about)

    @staticmethod
    def _beginning(expected: Expected, size: int) -> Expected:
        return replace(expected, message=expected.message[: size + expected.checksums.room])
