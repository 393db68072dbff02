"""Tensors of a checkpoint on their way to the ranks that resume from it, from whichever disk has them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.train.checkpoints.manifest import step_name
from lowbit.train.checkpoints.save import TransientError, raise_everywhere, together
from lowbit.train.checkpoints.search import SavedStep
from lowbit.train.checkpoints.share import DTYPES, Reader, crc32
from lowbit.wire.messages import Messages
from lowbit.wire.objects import gather_json

Item = tuple[int, str]
"""A tensor in a checkpoint: the rank that wrote the share, and the name there."""

_PIECE_BYTES = 8 << 20  # of a tensor that is sent
_OVER = object()


class Exchange:
    """Reads tensors from this rank's disk, or receives them from a rank that has the share on its disk.

    All ranks go through all transfers in the same order, a piece to each receiver in turn: so there is no deadlock, and
    no wait is longer than one piece for every rank takes. All together may exceed the time limit.

    Args:
        folder: of checkpoints on this rank's disk.
        timeout: seconds after which a rank that does not answer is an error.
    """

    def __init__(
        self, saved: SavedStep, folder: Path, rank: int, group: dist.ProcessGroup | None, timeout: float = 120.0
    ) -> None:
        self._saved, self._rank, self._group = saved, rank, group
        # Without checksums: each tensor has its own, in the manifest.
        self._messages = Messages(group, "checkpoints", timeout=timeout, checksums=False)
        self._step = folder / step_name(saved.step)
        own = [share for share, holder in saved.holders.items() if holder == rank]
        self._readers = {share: Reader(self._step / f"rank-{share}") for share in own}
        self._received: dict[Item, Tensor] = {}
        self._problem = ""

    def run(self, wanted: list[Item]) -> dict[Item, Tensor]:
        """The tensors that this rank wants, on the CPU; to be called on every rank.

        Raises:
            TransientError: a tensor arrived damaged; the same on every rank.
        """
        wanted_by_rank = gather_json(wanted, self._group)
        together(partial(self._transfer, wanted_by_rank), self._group)
        raise_everywhere(self._problem, self._group, TransientError)
        return self._received

    def _transfer(self, wanted_by_rank: list[list[Item]]) -> None:
        under_way = [self._pieces(receiver, items) for receiver, items in enumerate(wanted_by_rank)]
        while under_way:
            under_way = [pieces for pieces in under_way if next(pieces, _OVER) is not _OVER]

    def _pieces(self, receiver: int, items: list[Item]) -> Iterator[None]:
        """This rank's part in sending `items` to a receiver; yields after each piece."""
        for share, name in items:
            holder, entry = self._saved.holders[share], self._saved.shares[share].tensors[name]
            dtype, here = DTYPES[entry["dtype"]], self._rank in (receiver, holder)
            tensor = torch.empty(entry["shape"] if here else 0, dtype=dtype)
            if self._rank == holder:
                tensor = self._readers[share](name)
            if holder != receiver:
                size = math.prod(entry["shape"]) * dtype.itemsize
                for start in range(0, size, _PIECE_BYTES):
                    self._pass_on(tensor, start, holder, receiver)
                    yield
            if self._rank == receiver:
                self._received[share, name] = tensor
                if holder != receiver and crc32(tensor) != entry["crc32"]:
                    where = f"{name} of {self._step.name}/rank-{share}"
                    self._problem = f"{where} arrived from rank {holder} with other bytes"

    def _pass_on(self, tensor: Tensor, start: int, holder: int, receiver: int) -> None:
        piece = tensor.view(-1).view(torch.uint8)[start : start + _PIECE_BYTES]
        if self._rank == holder:
            self._messages.send(piece, receiver).wait()
        elif self._rank == receiver:
            piece.copy_(self._messages.receive(piece.numel(), holder, "tensors"))
