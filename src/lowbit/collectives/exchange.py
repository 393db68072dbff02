"""Transports for the payloads of a collective. On a lane, every rank sends a payload to every rank, itself included.

`MessageExchange` sends messages, which use both directions of a link, start with the first chunk and show which peer
failed. Other backends match messages by order, so `CollectiveExchange` makes each lane one all-to-all or all-gather.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import pytorch
from lowbit.wire.checksum import Checksums, Verdicts
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Mailbox, Route, Sent
from lowbit.wire.tags import COLLECTIVES, capacity

ALIGN = 64
"""Alignment of payloads in bytes."""
_LEAST = 1 << 20  # fewest bytes of a block


class Scratch:
    """Memory for one call at a time, as much as the largest has needed; several blocks become one for the next call."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, list[Tensor]] = {}
        self._used: dict[torch.device, list[int]] = {}
        self._most: dict[torch.device, int] = {}

    def reset(self) -> None:
        for device, used in self._used.items():
            self._most[device] = max(self._most.get(device, 0), sum(used))
            if len(used) > 1:
                self._blocks[device].clear()
                used.clear()
            used[:] = [0] * len(used)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return `nbytes` bytes, aligned, for use until the next `reset`."""
        size = -(-nbytes // ALIGN) * ALIGN
        blocks, used = self._blocks.setdefault(device, []), self._used.setdefault(device, [])
        for i, block in enumerate(blocks):
            if used[i] + size <= block.numel():
                used[i] += size
                return block[used[i] - size : used[i] - size + nbytes]
        least = _LEAST if blocks else max(_LEAST, self._most.get(device, 0))
        with torch.inference_mode(False):  # so that it can be written to in any mode
            blocks.append(torch.empty(max(size, least), dtype=torch.uint8, device=device))
        used.append(size)
        return blocks[-1][:nbytes]

    def nbytes(self) -> int:
        return sum(block.numel() for blocks in self._blocks.values() for block in blocks)


@dataclass(frozen=True)
class Marks:
    """Identity of a call's messages: its checksums and, for errors, its description and the ranks' names."""

    checksums: Checksums
    about: str
    names: Sequence[str]

    def message(self, lane: int, source: int) -> str:
        return f"{self.about}, lane {lane}: the message from {self.names[source]}"


@dataclass
class _LaneBuffers:
    """Buffers of a lane, one row per rank; a single outgoing row if all ranks get the same payload."""

    incoming: Tensor
    outgoing: Tensor
    sizes_in: Sequence[int]
    sizes_out: Sequence[int]
    arriving: dict[int, Any] = field(default_factory=dict)
    filled: int = 0

    @property
    def same_for_all(self) -> bool:
        return len(self.sizes_out) == 1


class PayloadExchange(ABC):
    """Carries the payloads of a call. For each lane: `open`, then `box` and `send` for every receiver, then `take`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, scratch: Scratch, marks: Marks) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        self._group, self._device, self._scratch = group, device, scratch
        self._marks, self._checksums = marks, marks.checksums
        self._lanes: dict[int, _LaneBuffers] = {}

    def open(self, number: int, incoming: Sequence[int], outgoing: Sequence[int]) -> None:
        """Prepare a lane. A lane without bytes needs no `send`; payloads taken from it are empty.

        `incoming`: bytes from each rank. `outgoing`: bytes to each rank, or one number if all get the same payload.
        Collectives pad rows to the longest in a rank's lists, which must be equal on all ranks; else use messages.
        """
        # The longest row is equal on all ranks, because one of the two lists has the bytes of every rank.
        longest = max(*incoming, *outgoing)
        slot = -(-(longest + self._checksums.room) // ALIGN) * ALIGN if longest else 0
        rows = (self.ranks, self._room(slot)), (len(outgoing), slot)
        received, sent = (self._scratch.take(n * size, self._device).view(n, size) for n, size in rows)
        self._lanes[number] = _LaneBuffers(received, sent, incoming, outgoing)

    def box(self, lane: int, to: int = 0) -> Tensor:
        row, size = self._outgoing(self._lanes[lane], to)
        return row[:size]

    @abstractmethod
    def send(self, lane: int, to: int = 0) -> None:
        """Send the payload in the box; on a lane where all ranks get the same payload, send it to all."""

    @abstractmethod
    def take(self, lane: int, source: int) -> Tensor:
        """Wait for a rank's payload: uint8, as many bytes as announced; it, or `finish`, raises a DamagedError."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all of this rank's sends have finished; DamagedError as `take`."""

    def _room(self, nbytes: int) -> int:
        """Size of the buffer to receive a message of up to `nbytes` in."""
        return nbytes

    @abstractmethod
    def _outgoing(self, lane: _LaneBuffers, to: int) -> tuple[Tensor, int]:
        """Return the row for a message to a rank, and the bytes of its payload."""

    def _place(self, lane: int, source: int, to: int) -> tuple[int, int, int]:
        """Place of a message for its checksum; all receivers have the same one if all get the same payload."""
        return lane, source, -1 if self._lanes[lane].same_for_all else to


class MessageExchange(PayloadExchange):
    """Sends a tagged message for each lane and pair of ranks, over Gloo.

    `digest`, of this kind of call and layer, selects the channels, so that other calls hardly get its bytes.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, scratch: Scratch, marks: Marks,
        board: FailureBoard, digest: int,
    ) -> None:  # fmt: skip
        super().__init__(group, device, scratch, marks)
        self._mailbox = Mailbox(group, marks.checksums, board)
        self._channels = COLLECTIVES.channels(digest % COLLECTIVES.members)
        self._sent: list[Sent] = []

    def open(self, number: int, incoming: Sequence[int], outgoing: Sequence[int]) -> None:
        super().open(number, incoming, outgoing)
        lane = self._lanes[number]
        for source, size in enumerate(incoming):
            if size and source != self.rank:
                place, row = self._place(number, source, self.rank), lane.incoming[source]
                lane.arriving[source] = self._mailbox.expect(
                    self._route(number, source, source), size, place, lambda nbytes, row=row: row[:nbytes]
                )

    def _room(self, nbytes: int) -> int:
        return capacity(nbytes) if nbytes else 0

    def _route(self, lane: int, peer: int, source: int) -> Route:
        return Route(peer, self._channels[lane], self._marks.message(lane, source))

    def _outgoing(self, lane: _LaneBuffers, to: int) -> tuple[Tensor, int]:
        if lane.same_for_all or to == self.rank:  # this rank reads it from the same row
            return lane.incoming[self.rank], lane.sizes_in[self.rank]
        return lane.outgoing[to], lane.sizes_out[to]

    def send(self, lane: int, to: int = 0) -> None:
        row, size = self._outgoing(self._lanes[lane], to)
        others = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        receivers = others if self._lanes[lane].same_for_all else [to] if to != self.rank else []
        if size and receivers:
            routes = (self._route(lane, peer, self.rank) for peer in receivers)
            message, place = row[: size + self._checksums.room], self._place(lane, self.rank, to)
            self._sent += self._mailbox.send(message, place, *routes)

    def take(self, lane: int, source: int) -> Tensor:
        buffers = self._lanes[lane]
        if (message := buffers.arriving.pop(source, None)) is not None:
            return message.wait()
        return buffers.incoming[source][: buffers.sizes_in[source]]

    def finish(self) -> None:
        for sent in self._sent:
            sent.wait()


class CollectiveExchange(PayloadExchange):
    """Runs one of PyTorch's collectives for each lane, on any backend; checksums stay on the device until `finish`."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, scratch: Scratch, marks: Marks, timeout: float
    ) -> None:
        super().__init__(group, device, scratch, marks)
        self._timeout = timeout
        self._verdicts = Verdicts()
        self._taken: set[tuple[int, int]] = set()

    def _outgoing(self, lane: _LaneBuffers, to: int) -> tuple[Tensor, int]:
        row = 0 if lane.same_for_all else to
        return lane.outgoing[row], lane.sizes_out[row]

    def send(self, lane: int, to: int = 0) -> None:
        buffers = self._lanes[lane]
        row, size = self._outgoing(buffers, to)
        if size:
            self._checksums.seal_there(row[: size + self._checksums.room], *self._place(lane, self.rank, to))
        buffers.filled += 1
        if buffers.filled == len(buffers.sizes_out) and buffers.incoming.numel():
            if buffers.same_for_all:
                flat = buffers.incoming.view(-1), buffers.outgoing.view(-1)
                work = pytorch.gather(*flat, self._group, async_op=True)
            else:
                work = pytorch.exchange(buffers.incoming, buffers.outgoing, self._group)
            assert work is not None
            buffers.arriving[self.rank] = work

    def take(self, lane: int, source: int) -> Tensor:
        buffers = self._lanes[lane]
        self._arrive(buffers)
        row, size = buffers.incoming[source], buffers.sizes_in[source]
        if size and self._checksums.enabled and (lane, source) not in self._taken:
            self._taken.add((lane, source))
            message = row[: size + self._checksums.room]
            damage = self._checksums.damage_there(message, *self._place(lane, source, self.rank))
            self._verdicts.note(damage, self._marks.message(lane, source), source)
        return row[:size]

    def damaged(self) -> Tensor | None:
        """Whether a payload that was taken is damaged: bool () on the device, None if unknown. Replaces `finish`."""
        self._arrive(*self._lanes.values())
        return self._verdicts.combined()

    def finish(self) -> None:
        self._arrive(*self._lanes.values())
        self._verdicts.settle()

    def _arrive(self, *lanes: _LaneBuffers) -> None:
        """Wait for the collectives of lanes, even if nobody takes from them: they write to memory of this call."""
        for buffers in lanes:
            if (work := buffers.arriving.pop(self.rank, None)) is not None:
                pytorch.wait_within(work, self._group, self._timeout, self._device)
