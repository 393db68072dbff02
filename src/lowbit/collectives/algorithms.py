"""Sums in few bits: what is coded, sent, summed and decoded, in which order. Nothing here knows how bytes travel."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.collectives.exchange import Wire
from lowbit.collectives.shards import Shards

AHEAD = 2
"""Chunks that are under way before the first one is added up, and again before the first sum is decoded."""
ONE_SHOT_BYTES = 1 << 18
"""Bytes of a payload up to which "auto" sends everything to everybody among more than two ranks."""


def choose(ranks: int, nbytes: int) -> Literal["one_shot", "two_shot"]:
    """What "auto" means for a payload of so many bytes: the same on all ranks, for nothing else is looked at.

    Two ranks send the same bytes either way, and one_shot codes once. Among more, two_shot sends 2 / ranks of
    one_shot's bytes, and takes a second round trip, which small messages do not earn
    (docs/results/tensor-parallel.md).
    """
    return "one_shot" if ranks <= 2 or nbytes <= ONE_SHOT_BYTES else "two_shot"


def two_shot(x: Tensor, codec: Codec, wire: Wire, *, chunk: int, divisor: int, errors: Tensor | None = None) -> None:
    """Replace `x` by the sum over all ranks, divided by `divisor`: two quantizations, whatever the number of ranks.

    Every rank codes its share of each shard for the rank that owns the shard (all-to-all), which adds them up in
    float32 in the order of the ranks, and codes the sum for everybody (all-gather). The owner decodes its own sum, and
    its own share, like everybody else's: results are bit-identical on all ranks. Pieces go through all of it one behind
    the other, so that coding and summing overlap the wire.

    Args:
        x: flat, contiguous, float32, bfloat16 or float16. errors: float32 like `x`; filled with what quantization took
            from this rank's contribution, and, in its own shard, from the sum: added to this rank's next contribution,
            it makes up for both. Zero where it is not finite.
    """
    shards = Shards(numel=x.numel(), ranks=wire.ranks, chunk=chunk, grain=codec.grain)
    whole = codec.whole()
    # All receives first: a sender can begin only when it knows of the receive, and what tells it so would queue behind
    # everything that this rank sends to it.
    open_scatter(codec, wire, shards)
    for k in range(shards.chunks):
        incoming = [codec.nbytes((shards.size(r, k),)) for r in range(wire.ranks)]
        wire.open(shards.chunks + k, incoming, [incoming[wire.rank]])
    total = torch.empty(min(shards.chunk, shards.length), device=x.device)
    for turn in range(shards.chunks + 2 * AHEAD):
        if turn < shards.chunks:
            scatter(x, codec, wire, shards, turn, errors)
        if 0 <= (k := turn - AHEAD) < shards.chunks:
            _spread(total, codec, wire, shards, k, divisor, errors)
        if 0 <= (k := turn - 2 * AHEAD) < shards.chunks:
            for source in range(wire.ranks):
                piece = shards.piece(source, k)
                if piece.stop > piece.start:
                    payload = wire.take(shards.chunks + k, source)
                    whole.decode(payload, shape=x[piece].shape, out=x[piece])


def _spread(
    total: Tensor,
    codec: Codec,
    wire: Wire,
    shards: Shards,
    k: int,
    divisor: int,
    errors: Tensor | None,
) -> None:
    """Add up a chunk of this rank's shard, code the sum and send it to everybody."""
    if size := shards.size(wire.rank, k):
        part, whole = add_up(total[:size], codec, wire, k, divisor), codec.whole()
        payload = whole.encode(part, out=wire.box(shards.chunks + k))
        if errors is not None:
            mine = errors[shards.piece(wire.rank, k)]
            lost = part - whole.decode(payload, shape=part.shape)
            mine.add_(_finite(lost), alpha=divisor)
    wire.send(shards.chunks + k)


def one_shot(x: Tensor, codec: Codec, wire: Wire, *, chunk: int, divisor: int, errors: Tensor | None = None) -> None:
    """Replace `x` by the sum over all ranks, divided by `divisor`: one quantization, but everything goes to everybody.

    Every rank decodes all payloads, its own included, and adds them up in float32 in the order of the ranks.
    """
    shards = Shards(numel=x.numel(), ranks=1, chunk=chunk, grain=codec.grain)
    gather(x, codec, wire, shards, errors)
    total = torch.empty(min(shards.chunk, shards.length), device=x.device)
    for k in range(shards.chunks):
        add_up(x[shards.piece(0, k)], codec, wire, k, divisor, total)


def reduce_scatter(x: Tensor, out: Tensor, codec: Codec, wire: Wire, *, chunk: int, divisor: int) -> None:
    """Write the sum of everybody's `x[rank * n : (rank + 1) * n]`, divided by `divisor`, to `out` (n elements)."""
    shards = Shards(numel=x.numel(), ranks=wire.ranks, chunk=chunk, length=out.numel(), grain=codec.grain)
    open_scatter(codec, wire, shards)
    for k in range(shards.chunks):
        scatter(x, codec, wire, shards, k, None)
    total = torch.empty(min(shards.chunk, shards.length), device=x.device)
    for k in range(shards.chunks):
        piece = shards.piece(wire.rank, k)
        part = add_up(total[: shards.size(wire.rank, k)], codec, wire, k, divisor)
        out[piece.start - wire.rank * shards.length :][: part.numel()].copy_(part)


def all_gather(x: Tensor, out: Tensor, codec: Codec, wire: Wire, *, chunk: int) -> None:
    """Write what every rank's `x` (n elements) decodes to, one after the other, to `out` (ranks * n elements)."""
    shards = Shards(numel=x.numel(), ranks=1, chunk=chunk, grain=codec.grain)
    gather(x, codec, wire, shards, None)
    for k in range(shards.chunks):
        for source in range(wire.ranks):
            target = out[source * x.numel() :][: x.numel()][shards.piece(0, k)]
            codec.part(source).decode(wire.take(k, source), shape=target.shape, out=target)


def open_scatter(codec: Codec, wire: Wire, shards: Shards) -> None:
    """Prepare lanes 0, 1, ... for `scatter`."""
    for k in range(shards.chunks):
        sizes = [codec.nbytes((shards.size(r, k),)) for r in range(wire.ranks)]
        wire.open(k, [sizes[wire.rank]] * wire.ranks, sizes)


def scatter(x: Tensor, codec: Codec, wire: Wire, shards: Shards, k: int, errors: Tensor | None) -> None:
    """Code chunk k of every rank's shard of `x` and send it there, on lane k."""
    mine = codec.part(wire.rank)
    for step in range(1, wire.ranks + 1):  # each rank begins with another, and itself comes last
        to = (wire.rank + step) % wire.ranks
        piece = shards.piece(to, k)
        if piece.stop > piece.start:
            _encode(x[piece], mine, wire.box(k, to), None if errors is None else errors[piece])
        wire.send(k, to)


def gather(x: Tensor, codec: Codec, wire: Wire, shards: Shards, errors: Tensor | None) -> None:
    """Code `x` (a single shard) and send it to everybody, on lanes 0, 1, ... for the chunks."""
    for k in range(shards.chunks):
        size = codec.nbytes((shards.size(0, k),))
        wire.open(k, [size] * wire.ranks, [size])
    mine = codec.part(wire.rank)
    for k in range(shards.chunks):
        piece = shards.piece(0, k)
        _encode(x[piece], mine, wire.box(k), None if errors is None else errors[piece])
        wire.send(k)


def add_up(out: Tensor, codec: Codec, wire: Wire, lane: int, divisor: int, scratch: Tensor | None = None) -> Tensor:
    """Decode what all ranks sent on a lane and write its sum to `out`, in the order of the ranks.

    `scratch`: at least as many float32 elements, where `out` is not float32.
    """
    if out.numel():
        payloads = (wire.take(lane, source) for source in range(wire.ranks))
        room = None if scratch is None else scratch[: out.numel()]
        codec.sum(payloads, out=out, divisor=divisor, scratch=room)
    return out


def _encode(x: Tensor, codec: Codec, box: Tensor, errors: Tensor | None) -> None:
    codec.encode(x, out=box)
    if errors is not None:
        errors.copy_(_finite(x.float() - codec.decode(box, shape=x.shape)))


def _finite(x: Tensor) -> Tensor:
    """A step that met NaN or infinity must not spoil the ones after it."""
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
