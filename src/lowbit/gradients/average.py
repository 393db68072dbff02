"""Average stored gradients over ranks; their payloads are sent as they are stored."""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lowbit.codecs import Cast
from lowbit.codecs.base import Summable
from lowbit.collectives.calls import Pending
from lowbit.collectives.reduce import all_gather, average_coded, average_coded_bytes
from lowbit.gradients.stored import Stored
from lowbit.wire.checksum import sealed_bytes

Gradient = tuple[Stored, Tensor]
_UNCODED = Cast()

BUCKET = 4 << 20
"""Most elements of a call; its payloads take (3 + 1 / ranks) bytes per element. Larger parameters are cut."""


class StoredElements:
    """A range of elements of stored gradients on one device, one after the other, each padded to whole units."""

    def __init__(self, codec: Summable, gradients: Sequence[tuple[Stored, torch.Size]], start: int, stop: int) -> None:
        self.numel, self._first, self._codec = stop - start, start, codec
        self._gradients = gradients
        self._ends = list(itertools.accumulate(_padded(codec, (shape for _, shape in gradients))))
        payload = gradients[0][0].payload
        assert payload is not None
        self.device = payload.device

    def put(self, piece: slice, box: Tensor) -> None:
        box.zero_()  # for padding, and for gradients that this rank does not have
        size = piece.stop - piece.start
        for stored, shape, start, at, count in self._within(piece):
            if stored.held and stored.payload is not None:
                payload, numel = stored.payload, shape.numel()
                if self._codec.sized(shape)[1]:  # too few elements for the format: the payload is plain numbers
                    x = self._codec.decode(payload, shape=(numel,))
                    numel = self._codec.unit
                    payload = self._codec.encode(functional.pad(x, (0, numel - x.numel())))
                self._codec.copy_units(payload, start, box, at, count, numel=(numel, size))

    def take(self, piece: slice, payload: Tensor) -> None:
        size = piece.stop - piece.start
        for stored, shape, start, at, count in self._within(piece):
            assert stored.payload is not None
            if not self._codec.sized(shape)[1]:
                self._codec.copy_units(payload, at, stored.payload, start, count, numel=(size, shape.numel()))
                continue
            unit = self._codec.unit
            coded = torch.zeros(self._codec.nbytes((unit,)), dtype=torch.uint8, device=payload.device)
            self._codec.copy_units(payload, at, coded, 0, unit, numel=(size, unit))
            self._codec.encode(self._codec.decode(coded, shape=(unit,))[:count], out=stored.payload)

    def _within(self, piece: slice) -> Iterator[tuple[Stored, torch.Size, int, int, int]]:
        """Yield gradients in a piece, their shapes, first elements in it, positions in the piece, and counts."""
        start, stop = self._first + piece.start, self._first + piece.stop
        for index in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            stored, shape = self._gradients[index]
            begin = self._ends[index - 1] if index else 0
            if begin >= stop:
                return
            skipped = max(0, start - begin)
            count = min(shape.numel(), stop - begin) - skipped
            if count > 0:
                yield stored, shape, skipped, begin + skipped - start, count


def average(
    codec: Summable, gradients: Sequence[Gradient], group: dist.ProcessGroup, *, timeout: float, checksums: bool
) -> None:
    """Replace gradients, each with a tensor of its shape and device, by their means; those of no rank stay missing."""
    states = [(stored.held, stored.factor) for stored, _ in gradients]
    mine = torch.tensor(states, dtype=torch.float32, device=gradients[0][1].device)
    by_rank = mine.new_empty(group.size(), *mine.shape)
    all_gather(by_rank, mine, _UNCODED, group, timeout=timeout, checksums=checksums)
    means: list[tuple[Stored, Tensor, float]] = []
    for (stored, x), of_ranks in zip(gradients, by_rank.transpose(0, 1).tolist(), strict=True):
        if factors := [factor for held, factor in of_ranks if held]:
            means.append((stored, x, stored.prepare(codec, x.shape, x.device, factors)))
    pending: list[Pending] = []
    for _, together in itertools.groupby(means, key=lambda mean: mean[1].device):
        some = [(stored, x.shape) for stored, x, _ in together]
        for start, stop in _buckets(codec, [shape for _, shape in some]):
            elements = StoredElements(codec, some, start, stop)
            pending.append(
                average_coded(
                    elements.put, elements.take, codec, group, numel=elements.numel, device=elements.device,
                    timeout=timeout, checksums=checksums,
                )
            )  # fmt: skip
    for each in pending:
        each.wait()
    for stored, _, factor in means:
        stored.factor, stored.held = factor, True


def average_bytes(
    shapes: Sequence[torch.Size], codec: Summable, *, count: int, rank: int, ranks: int, checksums: bool
) -> int:
    """Return the bytes that a rank sends to average gradients of these shapes on one device, with `count` stored."""
    return (ranks - 1) * sealed_bytes(8 * count, checksums) + sum(
        average_coded_bytes(stop - start, codec, rank=rank, ranks=ranks, checksums=checksums)
        for start, stop in _buckets(codec, shapes)
    )


def _padded(codec: Summable, shapes: Iterable[torch.Size]) -> list[int]:
    return [-(-shape.numel() // codec.unit) * codec.unit for shape in shapes]


def _buckets(codec: Summable, shapes: Sequence[torch.Size]) -> Iterator[tuple[int, int]]:
    numel, step = sum(_padded(codec, shapes)), BUCKET // codec.unit * codec.unit
    for start in range(0, numel, step):
        yield start, min(start + step, numel)
