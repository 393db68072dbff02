"""Send the tensors of a checkpoint from the disk that has them to the ranks that resume from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.train.checkpoints.manifest import step_name
from lowbit.train.checkpoints.save import together
from lowbit.train.checkpoints.search import SavedStep
from lowbit.train.checkpoints.share import DTYPES, Reader
from lowbit.wire.messages import Messages, gather_json

Item = tuple[int, str]
"""A tensor in a checkpoint: the rank that wrote the share, and the tensor's name in it."""

_PIECE_BYTES = 8 << 20  # of a tensor that is sent
_OVER = object()


class ShareExchange:
    """Reads tensors from this rank's disk, or receives them from a rank that has the share on its disk.

    All ranks take part in all transfers in the same order, one piece to each receiver in turn. So there is no deadlock,
    and no wait is longer than sending one piece to every rank takes. The whole exchange may exceed the time limit.

    Args:
        folder: of checkpoints on this rank's disk. timeout: seconds to wait for a piece.
    """

    def __init__(self, saved: SavedStep, folder: Path, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._saved, self._group = saved, group
        self._messages = Messages(group, "checkpoints", timeout=timeout)
        self._rank = self._messages.rank
        own = [share for share, holder in saved.holders.items() if holder == self._rank]
        self._readers = {share: Reader(folder / step_name(saved.step) / f"rank-{share}") for share in own}
        self._received: dict[Item, Tensor] = {}

    def run(self, wanted: list[Item]) -> dict[Item, Tensor]:
        """Return the tensors that this rank wants, on the CPU; every rank must call it.

        Raises:
            DamagedError: a tensor arrived damaged. PeerError: a rank ended or does not answer.
        """
        wanted_by_rank = gather_json(wanted, self._group)

        def transfer() -> None:
            under_way = [self._pieces(receiver, items) for receiver, items in enumerate(wanted_by_rank)]
            while under_way:
                under_way = [pieces for pieces in under_way if next(pieces, _OVER) is not _OVER]

        together(transfer, self._group)
        return self._received

    def _pieces(self, receiver: int, items: list[Item]) -> Iterator[None]:
        """Do this rank's part in sending `items` to a receiver; yield after each piece."""
        for share, name in items:
            holder, entry = self._saved.holders[share], self._saved.shares[share].tensors[name]
            if self._rank == holder:
                tensor = self._readers[share](name)
            else:  # neither sends nor receives: this rank only keeps the order, without memory for the tensor
                device = "cpu" if self._rank == receiver else "meta"
                tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
            if holder != receiver:
                for piece in tensor.view(-1).view(torch.uint8).split(_PIECE_BYTES):
                    if self._rank == holder:
                        self._messages.send(piece, receiver).wait()
                    elif self._rank == receiver:
                        piece.copy_(self._messages.receive(piece.numel(), holder, name))
                    yield
            if self._rank == receiver:
                self._received[share, name] = tensor
