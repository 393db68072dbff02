"""Algorithms of low-bit sums: the order of encoding, sending, adding and decoding, independent of the transport."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lowbit.codecs.base import Summable
from lowbit.collectives.exchange import PayloadExchange

Put = Callable[[slice, Tensor], None]
"""Writes the payload of a piece of a tensor to memory of its size."""
Take = Callable[[slice, Tensor], None]
"""Replaces a piece of a tensor by the elements of a payload."""

_ALIGN = 16  # elements: shards start at multiples of it, for vector registers
_MOST_CHUNKS = 1 << 13  # so that two messages for each chunk have distinct tags


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A flat tensor of `numel` elements, cut into a shard for each rank, and each shard into chunks of at most `chunk`.

    `length`: of a shard (the last may be shorter or empty); 0: as even as possible. `grain`: elements that stay
    together: shards and chunks are multiples of it; so must be `numel` and `length`.
    """

    numel: int
    ranks: int
    chunk: int
    length: int = 0
    grain: int = 1

    def __post_init__(self) -> None:
        unit = _ALIGN if self.grain == 1 else self.grain
        if not self.length:
            even = -(-self.numel // self.ranks)
            object.__setattr__(self, "length", -(-even // unit) * unit)
        chunk = self.chunk // self.grain * self.grain
        least = -(-self.length // _MOST_CHUNKS)
        object.__setattr__(self, "chunk", max(chunk, self.grain, -(-least // unit) * unit))

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk) if self.length else 0

    def piece(self, rank: int, index: int) -> slice:
        """Slice of the elements of a chunk of a rank's shard; empty behind the shard's end."""
        start = rank * self.length + index * self.chunk
        stop = min(start + self.chunk, (rank + 1) * self.length)
        return slice(min(start, self.numel), min(stop, self.numel))

    def size(self, rank: int, index: int) -> int:
        piece = self.piece(rank, index)
        return piece.stop - piece.start


CHUNK = 1 << 20
"""Most elements of a chunk. Measured on 4 ranks, 64 MB, 1 Gbit/s and unlimited: smaller chunks cost more processor time
than their overlap saves, larger ones leave the link idle."""
SMALL = 1 << 14
"""Elements below which PyTorch's own collective is used."""
ONE_SHOT_BYTES = 1 << 18
"""Bytes of a payload up to which "auto" sends everything to everybody among more than two ranks."""
AHEAD = 2
"""Chunks that are sent before the first one is added up, and again before the first sum is decoded."""


def automatic_algorithm(ranks: int, nbytes: int) -> Literal["one_shot", "two_shot"]:
    """Choose the algorithm for "auto" from the size of a payload, so that all ranks choose the same.

    Two ranks send the same bytes either way, and one_shot encodes once. Among more, two_shot sends 2 / ranks of
    one_shot's bytes, but takes a second round trip, too slow for small messages (docs/results/tensor-parallel.md).
    """
    return "one_shot" if ranks <= 2 or nbytes <= ONE_SHOT_BYTES else "two_shot"


def two_shot(
    x: Tensor, codec: Summable, exchange: PayloadExchange, *, chunk: int, divisor: int, errors: Tensor | None = None
) -> None:
    """Replace `x` by the sum over all ranks, divided by `divisor`, with two quantizations for any number of ranks.

    Every rank encodes its part of each shard for the rank that owns the shard (all-to-all). The owner adds the parts up
    in float32 in the order of the ranks, and encodes the sum for all ranks (all-gather). It also decodes its own part
    and sum, so that results are bit-identical on all ranks. Chunks are pipelined, so that encoding and summing overlap
    with sending.

    Args:
        x: flat, contiguous, float32, bfloat16 or float16.
        errors: float32 like `x`; filled with the quantization error of this rank's contribution and, in its own shard,
            of the sum: added to this rank's next contribution, it compensates both. Zero where it is not finite.
    """
    rank, mine, whole = exchange.rank, codec.part(exchange.rank), codec.whole()
    shards = Shards(numel=x.numel(), ranks=exchange.ranks, chunk=chunk, grain=codec.grain)

    def take(piece: slice, payload: Tensor) -> None:
        whole.decode(payload, shape=x[piece].shape, out=x[piece])

    def note_loss(k: int, part: Tensor, payload: Tensor) -> None:
        if errors is not None:
            lost = _finite(part - whole.decode(payload, shape=part.shape))
            errors[shards.piece(rank, k)].add_(lost, alpha=divisor)

    put = partial(_encode, x, codec=mine, errors=errors)
    _two_shot(put, take, codec, exchange, shards, _total(x.device, shards), divisor, note_loss)


def two_shot_coded(
    put: Put, take: Take, codec: Summable, exchange: PayloadExchange, *, numel: int, chunk: int, divisor: int,
    device: torch.device,
) -> None:  # fmt: skip
    """`two_shot` for an encoded tensor: its payloads are sent unchanged, and those of the sum are stored unchanged.

    Only the sum is encoded here, and only one chunk of it exists in float32 at a time. Pieces begin at multiples of the
    codec's `unit`. `device`: of the payloads.
    """
    shards = Shards(numel=numel, ranks=exchange.ranks, chunk=chunk, grain=codec.unit)
    _two_shot(put, take, codec, exchange, shards, _total(device, shards), divisor)


def _two_shot(
    put: Put,
    take: Take,
    codec: Summable,
    exchange: PayloadExchange,
    shards: Shards,
    total: Tensor,
    divisor: int,
    note_loss: Callable[[int, Tensor, Tensor], None] = lambda *_: None,
) -> None:
    rank, ranks, whole = exchange.rank, exchange.ranks, codec.whole()
    # Post all receives first: a sender starts only once it knows of the receive, and that notice would queue behind
    # everything that this rank sends to it.
    _open_scatter(codec, exchange, shards)
    for k in range(shards.chunks):
        sizes = [codec.nbytes((shards.size(r, k),)) for r in range(ranks)]
        exchange.open(shards.chunks + k, sizes, [sizes[rank]])
    for turn in range(shards.chunks + 2 * AHEAD):
        if turn < shards.chunks:
            _scatter(put, exchange, shards, turn)
        if 0 <= (k := turn - AHEAD) < shards.chunks:
            if size := shards.size(rank, k):
                part = _add_up(total[:size], codec, exchange, k, divisor)
                note_loss(k, part, whole.encode(part, out=exchange.box(shards.chunks + k)))
            exchange.send(shards.chunks + k)
        if 0 <= (k := turn - 2 * AHEAD) < shards.chunks:
            for source in range(ranks):
                take(shards.piece(source, k), exchange.take(shards.chunks + k, source))


def one_shot(
    x: Tensor, codec: Summable, exchange: PayloadExchange, *, chunk: int, divisor: int, errors: Tensor | None = None
) -> None:
    """Replace `x` by the sum over all ranks, divided by `divisor`: one quantization, but all data go to all ranks."""
    shards = Shards(numel=x.numel(), ranks=1, chunk=chunk, grain=codec.grain)
    _gather(x, codec, exchange, shards, errors)
    total = _total(x.device, shards)
    for k in range(shards.chunks):
        _add_up(x[shards.piece(0, k)], codec, exchange, k, divisor, total)


def reduce_scatter(
    x: Tensor, out: Tensor, codec: Summable, exchange: PayloadExchange, *, chunk: int, divisor: int
) -> None:
    """Write the sum of all ranks' `x[rank * n : (rank + 1) * n]`, divided by `divisor`, to `out` (n elements)."""
    rank, length = exchange.rank, out.numel()
    shards = Shards(numel=x.numel(), ranks=exchange.ranks, chunk=chunk, length=length, grain=codec.grain)
    _open_scatter(codec, exchange, shards)
    put = partial(_encode, x, codec=codec.part(rank), errors=None)
    for k in range(shards.chunks):
        _scatter(put, exchange, shards, k)
    total = _total(x.device, shards)
    for k in range(shards.chunks):
        part = _add_up(total[: shards.size(rank, k)], codec, exchange, k, divisor)
        out[shards.piece(rank, k).start - rank * length :][: part.numel()].copy_(part)


def all_gather(x: Tensor, out: Tensor, codec: Summable, exchange: PayloadExchange, *, chunk: int) -> None:
    """Write the `x` (n elements) of all ranks, in order, encoded and decoded, to `out` (ranks * n elements)."""
    shards = Shards(numel=x.numel(), ranks=1, chunk=chunk, grain=codec.grain)
    _gather(x, codec, exchange, shards, None)
    for k in range(shards.chunks):
        for source in range(exchange.ranks):
            target = out[source * x.numel() :][: x.numel()][shards.piece(0, k)]
            codec.part(source).decode(exchange.take(k, source), shape=target.shape, out=target)


def _open_scatter(codec: Summable, exchange: PayloadExchange, shards: Shards) -> None:
    for k in range(shards.chunks):
        sizes = [codec.nbytes((shards.size(r, k),)) for r in range(exchange.ranks)]
        exchange.open(k, [sizes[exchange.rank]] * exchange.ranks, sizes)


def _scatter(put: Put, exchange: PayloadExchange, shards: Shards, k: int) -> None:
    for step in range(1, exchange.ranks + 1):  # each rank begins with its successor and ends with itself
        to = (exchange.rank + step) % exchange.ranks
        put(shards.piece(to, k), exchange.box(k, to))
        exchange.send(k, to)


def _gather(x: Tensor, codec: Summable, exchange: PayloadExchange, shards: Shards, errors: Tensor | None) -> None:
    for k in range(shards.chunks):
        size = codec.nbytes((shards.size(0, k),))
        exchange.open(k, [size] * exchange.ranks, [size])
    mine = codec.part(exchange.rank)
    for k in range(shards.chunks):
        _encode(x, shards.piece(0, k), exchange.box(k), mine, errors)
        exchange.send(k)


def _total(device: torch.device, shards: Shards) -> Tensor:
    return torch.empty(min(shards.chunk, shards.length), dtype=torch.float32, device=device)


def _add_up(
    out: Tensor, codec: Summable, exchange: PayloadExchange, lane: int, divisor: int, scratch: Tensor | None = None
) -> Tensor:
    """Decode the payloads of a lane and write their sum to `out`, in the order of the ranks."""
    if out.numel():
        payloads = (exchange.take(lane, source) for source in range(exchange.ranks))
        codec.sum(payloads, out=out, divisor=divisor, scratch=None if scratch is None else scratch[: out.numel()])
    return out


def _encode(x: Tensor, piece: slice, box: Tensor, codec: Summable, errors: Tensor | None) -> None:
    part = x[piece]
    codec.encode(part, out=box)
    if errors is not None:
        errors[piece].copy_(_finite(part.float() - codec.decode(box, shape=part.shape)))


def _finite(x: Tensor) -> Tensor:
    """Set NaN and infinity to zero, so that they do not spoil later steps."""
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
