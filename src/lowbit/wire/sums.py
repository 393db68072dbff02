"""Sums of a few numbers over all ranks, once a step: one message to the first rank and one back.

The first rank of a pipeline is the last to finish a step and the first to begin the next: it continues at once, where
an all-reduce would take several round trips.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire.checksum import sealed_bytes
from lowbit.wire.messages import Expected, Messages, Sent

_FIRST = 0
SUMS = "sums"


class Sums:
    """Add up the same few numbers of every rank, in the order of the ranks.

    `group`: over Gloo. `count`: how many numbers. `sent_to`: bytes that this rank sends to each other rank for a sum.
    """

    def __init__(self, group: dist.ProcessGroup | None, count: int, *, timeout: float, checksums: bool) -> None:
        self._messages = Messages(group, SUMS, timeout=timeout, checksums=checksums)
        self._nbytes = count * torch.float64.itemsize
        self._others = range(1, self._messages.ranks)
        receivers = self._others if self._messages.rank == _FIRST else [_FIRST]
        self.sent_to = dict.fromkeys(receivers, sealed_bytes(self._nbytes, checksums))
        self._sent: list[Sent] = []
        self._expected: list[Expected] = []
        self._expect()

    def of(self, values: Tensor) -> Tensor:
        """Return the sums over all ranks, the same on every rank. values: float64 (count,)."""
        while self._sent:  # sent in the previous step
            self._sent.pop().wait()
        if self._messages.rank != _FIRST:
            self._sent = [self._messages.send(values, _FIRST)]
            return self._received()[0]
        sums = values.clone()
        for others in self._received():
            sums += others
        self._sent = [self._messages.send(sums, rank) for rank in self._others]
        return sums

    def _received(self) -> list[Tensor]:
        payloads = [message.wait() for message in self._expected]
        self._expect()
        return [payload.clone().view(torch.float64) for payload in payloads]

    def _expect(self) -> None:
        """Post the next receives: a message that is not expected takes another round trip."""
        sources = self._others if self._messages.rank == _FIRST else [_FIRST]
        self._expected = [self._messages.expect(self._nbytes, rank) for rank in sources if self._messages.ranks > 1]
