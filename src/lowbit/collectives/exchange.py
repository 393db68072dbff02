"""How the pieces of a collective travel: as messages with receives posted early, or through the engine's collectives.

A collective is a number of lanes. On a lane every rank sends something to every rank (itself included) and takes what
every rank sent to it. `Mail` makes each of these a message of its own: Gloo then uses both directions of the link
at once, starts as soon as the first piece is coded, and says which peer failed. Other backends match messages by their
order alone, so `Rounds` makes each lane one all-to-all or all-gather of the engine, in the same order on every rank.
Behind each payload travel the bytes of its checksum, if there are any (`lowbit.ranks.checksum`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.ranks import pytorch
from lowbit.ranks.checksum import Checksums, Verdicts, damaged
from lowbit.ranks.failure import FailureBoard

LANES = 1 << 14
_ALIGN = 64
_TAG_BASE = 1 << 30  # above the tags of pipeline stages


class Wire(Protocol):
    """What an algorithm needs. Each lane is `open`, then `box` and `send` for every receiver, then `take`."""

    rank: int
    ranks: int

    def open(self, lane: int, incoming: Sequence[int], outgoing: Sequence[int]) -> None:
        """Prepare a lane.

        Args:
            lane: its number.
            incoming: bytes from each rank; outgoing: bytes to each rank, or a single number if all get the same.
        """
        ...

    def box(self, lane: int, to: int = 0) -> Tensor:
        """Where to put what goes to a rank: uint8, as many bytes as announced."""
        ...

    def send(self, lane: int, to: int = 0) -> None:
        """What is in the box may leave. On a lane where all get the same, `to` means everybody."""
        ...

    def take(self, lane: int, source: int) -> Tensor:
        """Wait for what a rank sent: uint8, as many bytes as announced.

        Raises:
            DamagedError: it is not what was sent; a wire may also leave that to `finish`.
        """
        ...

    def finish(self) -> None:
        """Wait until everything that this rank sent has left.

        Raises:
            DamagedError: something that was taken is not what was sent.
        """
        ...


class Scratch:
    """Memory for payloads that is kept between calls: fresh pages would cost more than coding what goes into them.

    As much as the call that needed most: what several blocks were needed for is a single one from the next call on.
    """

    def __init__(self) -> None:
        self._blocks: dict[torch.device, list[Tensor]] = {}
        self._used: dict[torch.device, list[int]] = {}
        self._most: dict[torch.device, int] = {}

    def reset(self) -> None:
        """All memory may be used again."""
        for device, used in self._used.items():
            self._most[device] = max(self._most.get(device, 0), sum(used))
            if len(used) > 1:
                self._blocks[device].clear()
                used.clear()
            used[:] = [0] * len(used)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """So many bytes, aligned, until the next `reset`."""
        size = -(-nbytes // _ALIGN) * _ALIGN
        blocks, used = self._blocks.setdefault(device, []), self._used.setdefault(device, [])
        for i, block in enumerate(blocks):
            if used[i] + size <= block.numel():
                used[i] += size
                return block[used[i] - size : used[i] - size + nbytes]
        least = 1 << 20 if blocks else max(1 << 20, self._most.get(device, 0))
        with torch.inference_mode(False):  # to be written to in any mode
            blocks.append(torch.empty(max(size, least), dtype=torch.uint8, device=device))
        used.append(size)
        return blocks[-1][:nbytes]

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.numel() for blocks in self._blocks.values() for block in blocks)


@dataclass(frozen=True)
class Marks:
    """What tells the messages of a call from all others.

    Args:
        checksums: of this call. about: the call, for errors. names: of the ranks.
    """

    checksums: Checksums
    about: str
    names: Sequence[str]

    def message(self, lane: int, source: int) -> str:
        """A message, for errors."""
        return f"{self.about}, lane {lane}: the message from {self.names[source]}"


@dataclass
class _Lane:
    """Buffers of a lane, one row a rank; a single outgoing row if all get the same."""

    incoming: Tensor
    outgoing: Tensor
    sizes_in: Sequence[int]
    sizes_out: Sequence[int]
    arriving: dict[int, dist.Work] = field(default_factory=dict)
    filled: int = 0


class _Buffered:
    """Buffers of lanes, alike on every kind of wire."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, scratch: Scratch, marks: Marks) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._device, self._scratch = group, device, scratch
        self._marks, self._checksums = marks, marks.checksums
        self._lanes: dict[int, _Lane] = {}

    def _allocate(self, lane: int, incoming: Sequence[int], outgoing: Sequence[int]) -> _Lane:
        longest = max(*incoming, *outgoing)
        slot = -(-(longest + self._checksums.room) // _ALIGN) * _ALIGN if longest else 0
        rows = [self._scratch.take(slot * n, self._device) for n in (self.ranks, len(outgoing))]
        received, sent = (row.view(-1, slot) if slot else row for row in rows)
        made = _Lane(received, sent, incoming, outgoing)
        self._lanes[lane] = made
        return made

    def _place(self, lane: int, source: int, to: int) -> tuple[int, int, int]:
        """What the checksum of a message says that it is; the same `to` for all on a lane where all get the same."""
        return lane, source, -1 if len(self._lanes[lane].sizes_out) == 1 else to


class Mail(_Buffered):
    """A message with a tag for each lane and pair of ranks.

    Args:
        group: of a backend with tags (Gloo); device: of the payloads; scratch: memory for them.
        board: finds out who failed. number: of this kind of call and layer, from 0 to 32767: it goes into the tags, so
            that others do not take its bytes. marks: of the call.
    """

    name = "messages"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        scratch: Scratch,
        board: FailureBoard,
        number: int,
        marks: Marks,
    ) -> None:
        super().__init__(group, device, scratch, marks)
        self._board, self._base = board, _TAG_BASE + number * LANES
        self._leaving: list[tuple[int, dist.Work]] = []

    def open(self, lane: int, incoming: Sequence[int], outgoing: Sequence[int]) -> None:
        made = self._allocate(lane, incoming, outgoing)
        for source, size in enumerate(incoming):
            if size and source != self.rank:
                with self._blaming(source):
                    work = dist.irecv(
                        made.incoming[source, : size + self._checksums.room],
                        group=self._group,
                        group_src=source,
                        tag=self._base + lane,
                    )
                assert work is not None  # only for ranks outside the group
                made.arriving[source] = work

    def box(self, lane: int, to: int = 0) -> Tensor:
        row, size = self._outgoing(lane, to)
        return row[:size]

    def _outgoing(self, lane: int, to: int) -> tuple[Tensor, int]:
        """Where a message is made, and the bytes of its payload."""
        made = self._lanes[lane]
        if len(made.sizes_out) == 1 or to == self.rank:  # taken from here again, by this rank
            return made.incoming[self.rank], made.sizes_in[self.rank]
        return made.outgoing[to], made.sizes_out[to]

    def send(self, lane: int, to: int = 0) -> None:
        everybody = len(self._lanes[lane].sizes_out) == 1
        peers = [(self.rank + i) % self.ranks for i in range(1, self.ranks)] if everybody else [to]
        row, size = self._outgoing(lane, to)
        payload = row[: size + self._checksums.room]
        if size and peers != [self.rank]:
            self._checksums.seal(payload, *self._place(lane, self.rank, to))
        for peer in peers:
            if peer != self.rank and size:
                with self._blaming(peer):
                    work = dist.isend(payload, group=self._group, group_dst=peer, tag=self._base + lane)
                assert work is not None
                self._leaving.append((peer, work))

    def take(self, lane: int, source: int) -> Tensor:
        made = self._lanes[lane]
        if (work := made.arriving.pop(source, None)) is not None:
            with self._blaming(source):
                work.wait(self._board.patience)
            arrived = made.incoming[source, : made.sizes_in[source] + self._checksums.room]
            if not self._checksums.intact(arrived, *self._place(lane, source, self.rank)):
                raise damaged(self._marks.message(lane, source), source)
        return made.incoming[source, : made.sizes_in[source]]

    def finish(self) -> None:
        for peer, work in self._leaving:
            with self._blaming(peer):
                work.wait(self._board.patience)

    @contextlib.contextmanager
    def _blaming(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._board.blame(peer, error) from error


class Rounds(_Buffered):
    """A collective of the engine for each lane; rows are padded to the longest.

    Checksums are made and compared where the payloads are, and the host looks at the outcome in `finish`.

    Args:
        group: of any backend; device: of the payloads; scratch: memory for them; marks: of the call.
    """

    name = "collectives"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, scratch: Scratch, marks: Marks) -> None:
        super().__init__(group, device, scratch, marks)
        self._verdicts = Verdicts()
        self._taken: set[tuple[int, int]] = set()

    def open(self, lane: int, incoming: Sequence[int], outgoing: Sequence[int]) -> None:
        # Rows must be equally long on all ranks: a lane where all get the same is as wide as its longest row, and
        # one where they do not is, too, since `outgoing` lists what every rank's row would be.
        self._allocate(lane, incoming, outgoing)

    def box(self, lane: int, to: int = 0) -> Tensor:
        made = self._lanes[lane]
        row = 0 if len(made.sizes_out) == 1 else to
        return made.outgoing[row, : made.sizes_out[row]]

    def send(self, lane: int, to: int = 0) -> None:
        made = self._lanes[lane]
        row = 0 if len(made.sizes_out) == 1 else to
        if size := made.sizes_out[row]:
            message = made.outgoing[row, : size + self._checksums.room]
            self._checksums.seal_there(message, *self._place(lane, self.rank, to))
        made.filled += 1
        if made.filled == len(made.sizes_out) and made.incoming.numel():
            if len(made.sizes_out) == 1:
                flat = made.incoming.view(-1), made.outgoing.view(-1)
                work = pytorch.gather(*flat, self._group, async_op=True)
            else:
                work = dist.all_to_all_single(made.incoming, made.outgoing, group=self._group, async_op=True)
            assert work is not None
            made.arriving[self.rank] = work

    def take(self, lane: int, source: int) -> Tensor:
        made = self._lanes[lane]
        if (work := made.arriving.pop(self.rank, None)) is not None:
            work.wait()
        size = made.sizes_in[source]
        if size and self._checksums.enabled and (lane, source) not in self._taken:
            self._taken.add((lane, source))
            arrived = made.incoming[source, : size + self._checksums.room]
            damage = self._checksums.damage_there(arrived, *self._place(lane, source, self.rank))
            self._verdicts.note(damage, self._marks.message(lane, source), source)
        return made.incoming[source, :size]

    def finish(self) -> None:
        """What has been taken has also left; but whether it was intact is looked at here."""
        self._verdicts.settle()
