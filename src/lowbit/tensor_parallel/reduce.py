"""The sum of partial sums over the ranks: in few bits where it pays, exactly alike on real ranks and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import FeatureInt4
from lowbit.codecs.base import Codec, check_choice, check_int
from lowbit.collectives import all_reduce
from lowbit.collectives.algorithms import choose
from lowbit.collectives.checks import check_summable
from lowbit.collectives.reduce import CHUNK, TIMEOUT, Algorithm
from lowbit.collectives.shards import Shards
from lowbit.ranks import pytorch
from lowbit.ranks.checksum import check_checksums

SMALL = 1 << 15
"""Elements below which a sum travels in the model's own dtype."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How sums travel; the same on all ranks.

    Args:
        algorithm: "one_shot" (everything to everybody, one quantization), "two_shot" (each rank sums a part and sends
            the sum, two quantizations), or "auto": as `lowbit.collectives.all_reduce` decides from ranks and bytes.
        small: sums of fewer elements (rows times features) are not coded. Decided from the shape alone.
        timeout: seconds in which a missing or failed peer is an error.
        checksums: whether 8 bytes behind each payload tell if it arrived as it was sent.
    """

    algorithm: Literal["auto", "one_shot", "two_shot"] = "auto"
    small: int = SMALL
    timeout: float = TIMEOUT
    checksums: bool = True

    def __post_init__(self) -> None:
        check_choice("algorithm", self.algorithm, ("auto", "one_shot", "two_shot"))
        check_int("small", self.small, 0, 1 << 60)
        check_checksums(self.checksums)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float):
            raise TypeError(f"timeout is {self.timeout!r}; allowed: a number of seconds above 0")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; allowed: a number of seconds above 0")

    def codes(self, numel: int) -> bool:
        """Whether a sum of so many elements is worth coding."""
        return numel >= max(1, self.small)

    def chosen(self, ranks: int, nbytes: int) -> Algorithm:
        """The algorithm for so many ranks and a payload of so many bytes."""
        return choose(ranks, nbytes) if self.algorithm == "auto" else self.algorithm

    def totals(self, numel: int, ranks: int, codec: Codec) -> int:
        """About how many values of the sum each rank codes for the others."""
        two = self.chosen(ranks, codec.nbytes((numel,))) == "two_shot"
        return -(-numel // ranks) if two else 0


def sum_over_ranks(partial: Tensor, codec: Codec | None, group: dist.ProcessGroup, settings: Settings) -> Tensor:
    """The sum of every rank's partial sums, bit-identical on all ranks.

    Args:
        partial: (..., E), contiguous, the model's dtype; may be changed in place.
        codec: None: not coded. Sums that are not coded are gathered by the engine in the model's dtype, added up in
            float32 in the order of the ranks, and rounded once: unlike the engine's own all-reduce, whose order of
            additions depends on its ring, one process can repeat that bit by bit.

    Returns:
        (..., E) in the dtype of `partial`.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1 or not partial.numel():
        return partial
    if codec is None or not settings.codes(partial.numel()):
        parts = partial.new_empty((ranks, *partial.shape))
        work = pytorch.gather(parts.view(-1), partial.view(-1), group, async_op=True)
        pytorch.finish(work, group, settings.timeout)
        return plain_sum(list(parts))
    all_reduce(
        partial, codec, group,
        algorithm=settings.algorithm, small=0, timeout=settings.timeout, checksums=settings.checksums,
    )  # fmt: skip
    return partial


def sum_in_process(partials: Sequence[Tensor], codec: Codec | None, settings: Settings) -> Tensor:
    """What `sum_over_ranks` returns on each of the ranks whose partial sums these are."""
    ranks, first = len(partials), partials[0]
    if ranks == 1 or not first.numel():
        return first
    if codec is None or not settings.codes(first.numel()):
        return plain_sum(partials)
    flats = [partial.reshape(-1) for partial in partials]
    out = torch.empty_like(flats[0])
    if settings.chosen(ranks, codec.nbytes(flats[0].shape)) == "one_shot":
        shards = Shards(numel=out.numel(), ranks=1, chunk=CHUNK, grain=codec.grain)
        for k in range(shards.chunks):
            piece = shards.piece(0, k)
            _add_up(flats, piece, codec, out[piece])
        return out.view(first.shape)
    shards = Shards(numel=out.numel(), ranks=ranks, chunk=CHUNK, grain=codec.grain)
    for owner in range(ranks):
        for k in range(shards.chunks):
            piece = shards.piece(owner, k)
            if piece.stop > piece.start:
                total = torch.empty(shards.size(owner, k), device=out.device)
                _add_up(flats, piece, codec, total)
                whole = codec.whole()
                whole.decode(whole.encode(total), shape=total.shape, out=out[piece])
    return out.view(first.shape)


def plain_sum(partials: Sequence[Tensor]) -> Tensor:
    """The sum in the order of the ranks, in float32, rounded once to the dtype of the parts."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return total.to(partials[0].dtype)


def _add_up(flats: Sequence[Tensor], piece: slice, codec: Codec, out: Tensor) -> None:
    """Write what the ranks' parts of a piece decode to and add up to."""
    payloads = [codec.part(rank).encode(flat[piece]) for rank, flat in enumerate(flats)]
    codec.sum(payloads, out=out)


def check_codec(name: str, codec: Codec, width: int | None = None, ranks: int | None = None) -> None:
    """Raise unless a codec can sum a boundary of so many features and ranks.

    Raises:
        TypeError: no codec, or one that cannot be summed.
        ValueError: a `FeatureInt4` for another number of features or ranks.
    """
    check_summable(codec)
    if isinstance(codec, FeatureInt4):
        found = tuple(codec.ranges.shape)
        if (ranks or found[0], width or found[1]) != found:
            raise ValueError(
                f"codec is for {found[0]} ranks and {found[1]} features; {name} has {ranks or found[0]} ranks and "
                f"{width or found[1]} features"
            )


def check_inference(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise where a gradient would be lost.

    Raises:
        RuntimeError: gradients are on, and the input or the weight asks for one.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise RuntimeError(
            f"{name} sums in few bits, for inference only, and gradients are on; allowed: calls under "
            "torch.no_grad() or torch.inference_mode()"
        )
