"""Sends hidden states of sizes that both ends know from one stage to the next, with receives posted ahead.

Gloo sends a message once its receive is posted. If the receiver posted it only when it needs the message, the link
would be idle while it computes, and it would wait for another round trip. So it keeps some receives posted, each as
large as the last message. The sender keeps track of them. A shorter message fits: Gloo fills the beginning. For each
receive that is too small for the next message the sender sends an empty one, and the receiver posts another.
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
"""Number of receives that are posted ahead."""
SPLIT = 1 << 16
"""Bytes of a payload from which on the ranks that share a stage each send a part of it."""
_MOST_SENT = 4  # messages on their way that a sender keeps


class Outgoing:
    """The sender's end. `peer`: the next stage, or None on the last one."""

    def __init__(self, messages: Messages, peer: int | None) -> None:
        self._messages, self._peer = messages, peer
        self._posted: deque[int] = deque()  # sizes of the receiver's posted receives, in bytes of payload
        self._sent: deque[Sent] = deque()

    def send(self, payload: Tensor) -> int:
        """Start to send and return the bytes that travel; wait only while many messages are on their way.

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
            PeerError: the peer ended, or did not take it in time.
        """
        while self._sent:
            self._sent.popleft().wait()

    def _put(self, payload: Tensor, expected: int) -> int:
        assert self._peer is not None  # the last stage sends none
        self._sent.append(self._messages.send(payload, self._peer, expected=expected))
        return self._sent[-1].message.numel()


class Incoming:
    """The receiver's end. `peer`: the previous stage, or None on the first one."""

    def __init__(self, messages: Messages, peer: int | None) -> None:
        self._messages, self._peer = messages, peer
        self._posted: deque[tuple[int, Expected]] = deque()

    def receive(self, size: int, about: str) -> Tensor:
        """Wait for the next payload, uint8 (size,) on the CPU. `about`: its name in errors.

        Raises:
            PeerError: the peer ended, or did not send in time. DamagedError: the payload arrived damaged.
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
    """Splits the rows of hidden states among the ranks that share a stage, and puts them together after receiving.

    These ranks hold the same hidden states, so without this a link would carry them once for each rank.

    Args:
        codec: format of the hidden states. group: ranks that share a stage; None: only this one.
        timeout: seconds to wait for them.
    """

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._codec, self._group, self._timeout = codec, group, timeout
        self.ranks = 1 if group is None else dist.get_world_size(group)

    def encode(self, x: Tensor) -> tuple[Tensor, int]:
        """Encode this rank's share of hidden states (batch, tokens, width); return payload and number of elements."""
        shape = self._shape(x.shape)
        if shape != x.shape:
            rows = x.reshape(-1, x.shape[-1])
            rows = F.pad(rows, (0, 0, 0, shape[1] * self.ranks - len(rows)))
            x = rows.view(self.ranks, *shape)[dist.get_rank(self._group)]
        return open_session(self._codec, shape=x.shape, dtype=x.dtype, device=x.device).encode(x), x.numel()

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
        """Number of bytes that this rank sends or receives for hidden states of this shape."""
        return open_session(self._codec, shape=self._shape(shape), dtype=dtype, device=device).nbytes()

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Decode this rank's share and gather those of the others; return the whole hidden states."""
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
        """Return the shape of what a rank sends: its share of the rows, or everything if that is small."""
        whole = torch.Size(shape)
        if self.ranks == 1 or self._codec.nbytes(whole) < SPLIT:
            return whole
        return torch.Size((1, -(-shape[0] * shape[1] // self.ranks), shape[2]))
