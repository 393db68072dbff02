"""Single messages between two ranks, beside a pipeline's traffic, with a time limit and a checksum.

They arrive in the order in which they were sent, so both ends count them. Gloo carries them, from and to the CPU.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire.checksum import Checksums, damaged
from lowbit.wire.failure import FailureBoard
from lowbit.wire.groups import default_group, next_round, rank_names
from lowbit.wire.objects import MOST_BYTES, parse_json
from lowbit.wire.sent import note_sent

_SIZE_BYTES = 8
_FIRST_TAG = 1 << 27  # away from the small ones that a program may use itself


@dataclass(frozen=True)
class Sent:
    """A message on its way."""

    board: FailureBoard
    work: dist.Work
    message: Tensor  # Gloo reads from it until the work is done
    to: int

    def wait(self) -> None:
        """Return when the peer has received it.

        Raises:
            PeerError: the peer ended, or did not receive it in time.
        """
        with self.board.blaming(self.to):
            self.work.wait(self.board.patience)


@dataclass(frozen=True)
class Expected:
    """A message whose receive is posted."""

    board: FailureBoard
    work: dist.Work
    message: Tensor
    source: int
    checksums: Checksums
    place: tuple[int, ...]  # sender, receiver and number
    name: str  # for errors

    def wait(self) -> Tensor:
        """Return the payload when it has arrived: uint8, one dimension, on the CPU.

        Raises:
            DamagedError: it did not arrive as it was sent.
            PeerError: the peer ended, or did not send in time.
        """
        with self.board.blaming(self.source):
            self.work.wait(self.board.patience)
        if not self.checksums.intact(self.message, *self.place):
            raise damaged(self.name, self.source)
        return self.message[: self.message.numel() - self.checksums.room]


class Messages:
    """The messages of one purpose; all ranks of the group make their objects in the same order.

    Args:
        group: the ranks, over Gloo; None: the default group.
        purpose: such as "evaluation", for errors and for the count of what is sent (`lowbit.wire.sent`).
        timeout: seconds after which a peer that does not answer is an error.
        checksums: whether 8 bytes behind each payload tell if it arrived as it was sent; the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, purpose: str, *, timeout: float, checksums: bool = True
    ) -> None:
        self._group, self._purpose = group or default_group(), purpose
        self.rank, self.ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        topic = f"messages/{purpose}/{next_round(self._group, f'messages/{purpose}')}"
        self._names = rank_names(self._group)
        self._board = FailureBoard(self._group, topic, self._names, timeout)
        self._checksums = Checksums(topic, enabled=checksums)
        # A tag of its own: receives may be posted long before their messages arrive, after those of another purpose.
        self._tag = _FIRST_TAG + next_round(self._group, "messages")
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def send(self, payload: Tensor, to: int) -> Sent:
        """Start to send. payload: any tensor, of which a copy travels; to: a rank of the group.

        Raises:
            PeerError: the peer ended.
        """
        flat = payload.detach().reshape(-1).view(torch.uint8)
        message = torch.empty(flat.numel() + self._checksums.room, dtype=torch.uint8)
        message[: flat.numel()].copy_(flat)
        self._checksums.seal(message, self.rank, to, self._sent[to])
        self._sent[to] += 1
        with self._board.blaming(to):
            work = dist.isend(message, group=self._group, group_dst=to, tag=self._tag)
        assert work is not None  # only for ranks outside the group
        note_sent(self._purpose, message.numel())
        return Sent(self._board, work, message, to)

    def expect(self, nbytes: int, source: int, about: str = "") -> Expected:
        """Post the receive of the next message of a rank, whose length must be known.

        Gloo sends a message once its receive is posted: one that is not expected yet takes another round trip.

        Args:
            nbytes: of its payload. source: a rank of the group. about: its name in errors.

        Raises:
            PeerError: the peer ended.
        """
        message = torch.empty(nbytes + self._checksums.room, dtype=torch.uint8)
        with self._board.blaming(source):
            work = dist.irecv(message, group=self._group, group_src=source, tag=self._tag)
        assert work is not None  # only for ranks outside the group
        place = source, self.rank, self._expected[source]
        self._expected[source] += 1
        name = f"{self._purpose}, {about or 'message'}, number {place[-1]}: the message from {self._names[source]}"
        return Expected(self._board, work, message, source, self._checksums, place, name)

    def receive(self, nbytes: int, source: int, about: str = "") -> Tensor:
        """Post the receive of a rank's next message and wait for it; as `expect` and `Expected.wait`."""
        return self.expect(nbytes, source, about).wait()

    def send_json(self, value: Any, to: int) -> None:
        """Send a value as JSON, and wait until the peer has it; two messages, of 8 bytes and of the text.

        Raises:
            TypeError: JSON cannot hold `value`.
            ValueError: a text of more than 64 MiB.
            PeerError: the peer ended, or did not receive it in time.
        """
        text = json.dumps(value).encode()
        if len(text) > MOST_BYTES:
            raise ValueError(f"value has {len(text)} bytes of JSON; allowed: at most {MOST_BYTES}")
        size = self.send(torch.tensor([len(text)]), to)
        body = self.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to)
        size.wait()
        body.wait()

    def receive_json(self, source: int, about: str = "") -> Any:
        """The value that a rank sent with `send_json`.

        Raises:
            DamagedError, PeerError: as `receive`.
            ValueError: a length that is not allowed, or no JSON.
        """
        size = int(self.receive(_SIZE_BYTES, source, about).view(torch.int64))
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"{self._names[source]} announces {size} bytes of JSON; allowed: 1 to {MOST_BYTES}")
        return parse_json(self.receive(size, source, about), f"{self._names[source]} sent text that is not JSON")
