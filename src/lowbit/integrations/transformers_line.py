"""Hidden states from one stage to the next, whose sizes both ends know, with receives posted ahead.

Gloo sends a message once its receive is posted. A receiver that posts one only when it needs the message has the link
idle while it computes, and waits for another trip to the sender. So it keeps some receives posted, each as large as the
message before. The sender counts them as well. A shorter message fits one of them: Gloo fills the beginning of it. For
each that is too short for the next message the sender sends an empty message, and the receiver posts another.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowbit.codecs import Codec
from lowbit.codecs.foreign import open_session
from lowbit.wire import pytorch
from lowbit.wire.messages import Expected, Messages, Sent

AHEAD = 2
"""Receives that are posted ahead."""
SPLIT = 1 << 16
"""Bytes of a payload from which on the ranks that share a stage send a part of it each."""
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
        size = room = payload.numel()
        total = 0
        while self._posted and (room := self._posted.popleft()) < size:
            total += self._put(payload[:0], room)
        total += self._put(payload, max(room, size))
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

    def _put(self, payload: Tensor, expected: int) -> int:
        assert self._peer is not None  # the last stage sends none
        self._sent.append(self._messages.send(payload, self._peer, expected=expected))
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
            expected.wait(0)
        return found.wait(size)

    def _post(self, size: int, about: str) -> Expected:
        assert self._peer is not None  # the first stage receives none
        return self._messages.expect(size, self._peer, about)


class Shares:
    """Hidden states of which each of the ranks that share a stage sends some rows, and gets the others' from them.

    Those ranks hold the same hidden states, so without this a link would carry them once for each.

    Args:
        codec: format of the hidden states. group: ranks that share a stage; None: this one alone.
        timeout: seconds to wait for them.
    """

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._codec, self._group, self._timeout = codec, group, timeout
        self.ranks = 1 if group is None else dist.get_world_size(group)

    def encode(self, x: Tensor) -> tuple[Tensor, int]:
        """The payload that this rank sends of hidden states (batch, tokens, width), and the elements in it."""
        shape = self._shape(x.shape)
        if shape != x.shape:
            rows = x.reshape(-1, x.shape[-1])
            rows = F.pad(rows, (0, 0, 0, shape[1] * self.ranks - len(rows)))
            x = rows.view(self.ranks, *shape)[dist.get_rank(self._group)]
        return open_session(self._codec, shape=x.shape, dtype=x.dtype, device=x.device).encode(x), x.numel()

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
        """Bytes that this rank sends or receives of hidden states of a shape."""
        return open_session(self._codec, shape=self._shape(shape), dtype=dtype, device=device).nbytes()

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The hidden states, from what this rank has received."""
        part = self._shape(shape)
        session = open_session(self._codec, shape=part, dtype=dtype, device=device)
        if part == torch.Size(shape):
            return session.decode(payload.to(device))
        assert self._group is not None
        payload = payload.to("cpu" if "gloo" in dist.get_backend_config(self._group) else device)
        parts = payload.new_empty(self.ranks * payload.numel())
        work = pytorch.gather(parts, payload, self._group, async_op=True)
        pytorch.finish(work, self._group, self._timeout)
        states = [session.decode(each.to(device)).view(part[1], -1) for each in parts.view(self.ranks, -1)]
        return torch.cat(states)[: shape[0] * shape[1]].view(shape)

    def _shape(self, shape: tuple[int, ...]) -> torch.Size:
        """Return the shape of what a rank sends: its share of the rows, or everything where that is little."""
        whole = torch.Size(shape)
        if self.ranks == 1 or self._codec.nbytes(whole) < SPLIT:
            return whole
        return torch.Size((1, -(-shape[0] * shape[1] // self.ranks), shape[2]))
