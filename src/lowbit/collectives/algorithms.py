"""Algorithms of sums in few bits: the order of coding, sending, adding and decoding, whatever carries the bytes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lowbit.codecs.sums import Summable
from lowbit.collectives.exchange import Exchange
from lowbit.collectives.shards import Shards

CHUNK = 1 << 20
"""Most elements of a chunk. Measured on 4 ranks, 64 MB, 1 Gbit/s and unlimited: smaller ones cost more processor time
than their overlap gives, larger ones leave the link idle."""
SMALL = 1 << 14
"""Elements below which PyTorch's own collective is used."""
ONE_SHOT_BYTES = 1 << 18
"""Bytes of a payload up to which "auto" sends everything to everybody among more than two ranks."""
AHEAD = 2
"""Chunks that are under way before the first one is added up, and again before the first sum is decoded."""


def choose(ranks: int, nbytes: int) -> Literal["one_shot", "two_shot"]:
    """The algorithm of "auto" for a payload of `nbytes`: the same on all ranks, since nothing else decides.

    Two ranks send the same bytes either way, and one_shot codes once. Among more, two_shot sends 2 / ranks of
    one_shot's bytes, but takes a second round trip, too slow for small messages (docs/results/tensor-parallel.md).
    """
    return "one_shot" if ranks <= 2 or nbytes <= ONE_SHOT_BYTES else "two_shot"


def two_shot(
    x: Tensor, codec: Summable, exchange: Exchange, *, chunk: int, divisor: int, errors: Tensor | None = None
) -> None:
    """Replace `x` by the sum over all ranks, divided by `divisor`: two quantizations, whatever the number of ranks.

    Every rank codes its share of each shard for the rank that owns the shard (all-to-all), which adds them up in
    float32 in the order of the ranks, and codes the sum for everybody (all-gather). The owner decodes its own sum and
    share, too: results are bit-identical on all ranks. Chunks follow each other, so that coding and summing overlap
    with sending.

    Args:
        x: flat, contiguous, float32, bfloat16 or float16.
        errors: float32 like `x`; filled with the quantization error of this rank's contribution and, in its own shard,
            of the sum: added to this rank's next contribution, it makes up for both. Zero where it is not finite.
    """
    rank, ranks = exchange.rank, exchange.ranks
    shards, whole = Shards(numel=x.numel(), ranks=ranks, chunk=chunk, grain=codec.grain), codec.whole()
    # All receives first: a sender begins only when it knows of the receive, and that notice would queue behind
    # everything that this rank sends to it.
    _open_scatter(codec, exchange, shards)
    for k in range(shards.chunks):
        sizes = [codec.nbytes((shards.size(r, k),)) for r in range(ranks)]
        exchange.open(shards.chunks + k, sizes, [sizes[rank]])
    total = _total(x, shards)
    for turn in range(shards.chunks + 2 * AHEAD):
        if turn < shards.chunks:
            _scatter(x, codec, exchange, shards, turn, errors)
        if 0 <= (k := turn - AHEAD) < shards.chunks:
            if size := shards.size(rank, k):
                part = _add_up(total[:size], codec, exchange, k, divisor)
                payload = whole.encode(part, out=exchange.box(shards.chunks + k))
                if errors is not None:
                    lost = _finite(part - whole.decode(payload, shape=part.shape))
                    errors[shards.piece(rank, k)].add_(lost, alpha=divisor)
            exchange.send(shards.chunks + k)
        if 0 <= (k := turn - 2 * AHEAD) < shards.chunks:
            for source in range(ranks):
                piece = shards.piece(source, k)
                if piece.stop > piece.start:
                    payload = exchange.take(shards.chunks + k, source)
                    whole.decode(payload, shape=x[piece].shape, out=x[piece])


def one_shot(
    x: Tensor, codec: Summable, exchange: Exchange, *, chunk: int, divisor: int, errors: Tensor | None = None
) -> None:
    """Replace `x` by the sum over all ranks, divided by `divisor`: one quantization, but everything goes to everybody.

    Every rank decodes all payloads, its own included, and adds them up in float32 in the order of the ranks.
    """
    shards = Shards(numel=x.numel(), ranks=1, chunk=chunk, grain=codec.grain)
    _gather(x, codec, exchange, shards, errors)
    total = _total(x, shards)
    for k in range(shards.chunks):
        _add_up(x[shards.piece(0, k)], codec, exchange, k, divisor, total)


def reduce_scatter(x: Tensor, out: Tensor, codec: Summable, exchange: Exchange, *, chunk: int, divisor: int) -> None:
    """Write the sum of everybody's `x[rank * n : (rank + 1) * n]`, divided by `divisor`, to `out` (n elements)."""
    rank, length = exchange.rank, out.numel()
    shards = Shards(numel=x.numel(), ranks=exchange.ranks, chunk=chunk, length=length, grain=codec.grain)
    _open_scatter(codec, exchange, shards)
    for k in range(shards.chunks):
        _scatter(x, codec, exchange, shards, k, None)
    total = _total(x, shards)
    for k in range(shards.chunks):
        part = _add_up(total[: shards.size(rank, k)], codec, exchange, k, divisor)
        out[shards.piece(rank, k).start - rank * length :][: part.numel()].copy_(part)


def all_gather(x: Tensor, out: Tensor, codec: Summable, exchange: Exchange, *, chunk: int) -> None:
    """Write every rank's `x` (n elements), coded and decoded, one after the other to `out` (ranks * n elements)."""
    shards = Shards(numel=x.numel(), ranks=1, chunk=chunk, grain=codec.grain)
    _gather(x, codec, exchange, shards, None)
    for k in range(shards.chunks):
        for source in range(exchange.ranks):
            target = out[source * x.numel() :][: x.numel()][shards.piece(0, k)]
            codec.part(source).decode(exchange.take(k, source), shape=target.shape, out=target)


def _open_scatter(codec: Summable, exchange: Exchange, shards: Shards) -> None:
    """Prepare lanes 0, 1, ... for `_scatter`."""
    for k in range(shards.chunks):
        sizes = [codec.nbytes((shards.size(r, k),)) for r in range(exchange.ranks)]
        exchange.open(k, [sizes[exchange.rank]] * exchange.ranks, sizes)


def _scatter(x: Tensor, codec: Summable, exchange: Exchange, shards: Shards, k: int, errors: Tensor | None) -> None:
    """Code chunk k of every rank's shard of `x` and send it there, on lane k."""
    mine = codec.part(exchange.rank)
    for step in range(1, exchange.ranks + 1):  # each rank begins with its successor and ends with itself
        to = (exchange.rank + step) % exchange.ranks
        piece = shards.piece(to, k)
        if piece.stop > piece.start:
            _encode(x, piece, mine, exchange.box(k, to), errors)
        exchange.send(k, to)


def _gather(x: Tensor, codec: Summable, exchange: Exchange, shards: Shards, errors: Tensor | None) -> None:
    """Code `x` (a single shard) and send it to everybody, on lanes 0, 1, ... for the chunks."""
    for k in range(shards.chunks):
        size = codec.nbytes((shards.size(0, k),))
        exchange.open(k, [size] * exchange.ranks, [size])
    mine = codec.part(exchange.rank)
    for k in range(shards.chunks):
        _encode(x, shards.piece(0, k), mine, exchange.box(k), errors)
        exchange.send(k)


def _total(x: Tensor, shards: Shards) -> Tensor:
    """Room for the float32 sum of a chunk."""
    return torch.empty(min(shards.chunk, shards.length), device=x.device)


def _add_up(
    out: Tensor, codec: Summable, exchange: Exchange, lane: int, divisor: int, scratch: Tensor | None = None
) -> Tensor:
    """Decode the payloads of a lane and write their sum to `out`, in the order of the ranks.

    `scratch`: at least as many float32 elements, where `out` is not float32.
    """
    if out.numel():
        payloads = (exchange.take(lane, source) for source in range(exchange.ranks))
        codec.sum(payloads, out=out, divisor=divisor, scratch=None if scratch is None else scratch[: out.numel()])
    return out


def _encode(x: Tensor, piece: slice, codec: Summable, box: Tensor, errors: Tensor | None) -> None:
    part = x[piece]
    codec.encode(part, out=box)
    if errors is not None:
        errors[piece].copy_(_finite(part.float() - codec.decode(box, shape=part.shape)))


def _finite(x: Tensor) -> Tensor:
    """Set NaN and infinity to zero: they must not spoil later steps."""
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
