"""Conversations: single messages between two ranks, outside of a pipeline's traffic, with a time limit and a checksum.

Both ends count a conversation's messages. Gloo carries them between CPUs.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import tags
from lowbit.wire.checksum import Checksums
from lowbit.wire.failure import FailureBoard
from lowbit.wire.groups import default_group, next_round, rank_names
from lowbit.wire.json_values import MOST_BYTES, parse_json
from lowbit.wire.mailbox import Expected, Mailbox, Route, Sent
from lowbit.wire.traffic import note_sent

_SIZE_BYTES = 8


class Messages:
    """Messages for one purpose; all ranks of the group must create these objects in the same order.

    Args:
        group: the ranks, over Gloo; None: the default group.
        purpose: such as "evaluation", for errors and for the count of sent bytes (`lowbit.wire.traffic`).
        timeout: seconds after which a peer that does not answer is an error.
        checksums: whether an 8-byte checksum follows each payload; the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, purpose: str, *, timeout: float, checksums: bool = True
    ) -> None:
        group, self._purpose = group or default_group(), purpose
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        topic = f"messages/{purpose}/{next_round(group, f'messages/{purpose}')}"
        self._names = rank_names(group)
        board = FailureBoard(group, topic, self._names, timeout)
        self._mailbox = Mailbox(group, Checksums(topic, enabled=checksums), board)
        # Own channels: a receive may be posted long before its message, and messages of other purposes arrive first.
        self._channels = tags.CONVERSATIONS.channels(next_round(group, "messages"))
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def send(self, payload: Tensor, to: int, *, expected: int | None = None) -> Sent:
        """Start to send a copy of a tensor; `expected`: payload bytes that the receiver expects, by default its own."""
        flat, room = payload.detach().reshape(-1).view(torch.uint8), self._mailbox.checksums.room
        message = torch.empty(flat.numel() + room, dtype=torch.uint8)
        message[: flat.numel()].copy_(flat)
        number, whole = self._sent[to], None if expected is None else expected + room
        self._sent[to] += 1
        route = self._route(to, number, "message", self.rank)
        (sent,) = self._mailbox.send(message, (self.rank, to, number), route, expected=whole)
        note_sent(self._purpose, message.numel())
        return sent

    def expect(self, nbytes: int, source: int, about: str = "") -> Expected:
        """Post the receive of a rank's next message, of `nbytes` of payload; `about` is its name in errors.

        A message whose receive is not posted when it is sent takes another round trip.
        """
        number = self._expected[source]
        self._expected[source] += 1
        route = self._route(source, number, about or "message", source)
        return self._mailbox.expect(route, nbytes, (source, self.rank, number))

    def _route(self, peer: int, number: int, about: str, sender: int) -> Route:
        name = f"{self._purpose}, {about}, number {number}: the message from {self._names[sender]}"
        return Route(peer, self._channels[number % len(self._channels)], name)

    def receive(self, nbytes: int, source: int, about: str = "") -> Tensor:
        """Post the receive of a rank's next message and wait for it; see `expect` and `Expected.wait`."""
        return self.expect(nbytes, source, about).wait()

    def send_json(self, value: Any, to: int) -> None:
        """Send JSON of up to 64 MiB in two messages, its length and the text, and wait until the peer has both."""
        text = json.dumps(value).encode()
        if len(text) > MOST_BYTES:
            raise ValueError(f"value has {len(text)} bytes of JSON; allowed: at most {MOST_BYTES}")
        size = self.send(torch.tensor([len(text)]), to)
        body = self.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to)
        size.wait()
        body.wait()

    def receive_json(self, source: int, about: str = "") -> Any:
        """Receive a value that a rank sent with `send_json`; as `receive`, or ValueError: its length, or not JSON."""
        size = int(self.receive(_SIZE_BYTES, source, about).view(torch.int64))
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"{self._names[source]} announces {size} bytes of JSON; allowed: 1 to {MOST_BYTES}")
        return parse_json(self.receive(size, source, about), f"{self._names[source]} sent text that is not JSON")
