"""Sums over ranks, in few bits where that pays: on real ranks, and bit-identical in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.codecs.checks import check_choice, check_int
from lowbit.collectives import all_reduce
from lowbit.collectives.algorithms import choose
from lowbit.collectives.checks import check_summable
from lowbit.collectives.reduce import CHUNK, TIMEOUT, Algorithm
from lowbit.collectives.shards import Shards
from lowbit.ranks import pytorch
from lowbit.ranks.checksum import check_checksums

SMALL = 1 << 15
"""Sums of fewer elements stay in the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class SumSettings:
    """How partial sums are added up; the same on all ranks.

    Args:
        algorithm: "one_shot" (each rank sends its partial sums to all others, one quantization), "two_shot" (each rank
            adds up a part and sends the sum, two quantizations), or "auto": as `lowbit.collectives.all_reduce` decides
            from ranks and bytes.
        small: sums of fewer elements (rows times features) are not coded; decided by the shape alone.
        timeout: seconds after which a missing or failed peer is an error.
        checksums: append 8 bytes to each payload, by which the receiver detects damage.
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
        """Whether a sum of `numel` elements is coded."""
        return numel >= max(1, self.small)

    def algorithm_for(self, ranks: int, nbytes: int) -> Algorithm:
        """Return the algorithm for this number of ranks and size of a payload."""
        return choose(ranks, nbytes) if self.algorithm == "auto" else self.algorithm


@dataclass
class Traffic:
    """Counts of the values that one rank contributed to sums, and of their bytes; the same on all ranks.

    Counted from shapes, which costs nothing. Of two_shot, whose second step sends the sums in payloads of the same
    size, only the first step is counted. With one rank nothing is sent.

    Args:
        coded, plain: values sent in few bits, and in the model's dtype (below `SumSettings.small`, or without a codec).
        coded_bytes, plain_bytes: of their payloads, with codes, outlier features and scales, but without the 8 bytes of
            each message's checksum.
        algorithms: of the all-reduces of the coded values.
    """

    coded: int = 0
    plain: int = 0
    coded_bytes: int = 0
    plain_bytes: int = 0
    algorithms: set[str] = field(default_factory=set)

    @property
    def share_coded(self) -> float:
        """Share of the values that was coded; NaN if nothing was sent."""
        values = self.coded + self.plain
        return self.coded / values if values else float("nan")

    @property
    def bits_per_value(self) -> float:
        """Bits per value of everything sent; NaN if nothing was."""
        values = self.coded + self.plain
        return 8 * (self.coded_bytes + self.plain_bytes) / values if values else float("nan")

    def take(self, partial: Tensor, ranks: int, codec: Codec | None, settings: SumSettings) -> bool:
        """Count one sum over `ranks` ranks; return whether it is coded."""
        numel = partial.numel()
        if ranks == 1 or not numel:
            return False
        if codec is None or not settings.codes(numel):
            self.plain += numel
            self.plain_bytes += numel * partial.element_size()
            return False
        nbytes = codec.nbytes((numel,))
        self.coded += numel
        self.coded_bytes += nbytes
        self.algorithms.add(settings.algorithm_for(ranks, nbytes))
        return True

    def reset(self) -> None:
        """Count from zero again."""
        self.coded = self.plain = self.coded_bytes = self.plain_bytes = 0
        self.algorithms.clear()


def sum_over_ranks(partial: Tensor, codec: Codec | None, group: dist.ProcessGroup, settings: SumSettings) -> Tensor:
    """Return the sum of all ranks' partial sums, bit-identical on all of them.

    Args:
        partial: (..., E), contiguous, in the model's dtype; may be changed in place.
        codec: None: not coded. Sums that are not coded are gathered in the model's dtype, added up in float32 in the
            order of the ranks, and rounded once. One process can repeat that bit by bit, unlike the backend's own
            all-reduce, whose order of additions depends on its ring.

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


def sum_in_process(partials: Sequence[Tensor], codec: Codec | None, settings: SumSettings) -> Tensor:
    """Return the result of `sum_over_ranks` on ranks with these partial sums."""
    ranks, first = len(partials), partials[0]
    if ranks == 1 or not first.numel():
        return first
    if codec is None or not settings.codes(first.numel()):
        return plain_sum(partials)
    codec = check_summable(codec)
    flats = [partial.reshape(-1) for partial in partials]
    out = torch.empty_like(flats[0])
    two_shot = settings.algorithm_for(ranks, codec.nbytes(flats[0].shape)) == "two_shot"
    shards = Shards(numel=out.numel(), ranks=ranks if two_shot else 1, chunk=CHUNK, grain=codec.grain)
    for owner, chunk in itertools.product(range(shards.ranks), range(shards.chunks)):
        piece = shards.piece(owner, chunk)
        if piece.start == piece.stop:
            continue
        total = torch.empty(shards.size(owner, chunk), device=out.device) if two_shot else out[piece]
        codec.sum([codec.part(rank).encode(flat[piece]) for rank, flat in enumerate(flats)], out=total)
        if two_shot:
            whole = codec.whole()
            whole.decode(whole.encode(total), shape=total.shape, out=out[piece])
    return out.view(first.shape)


def plain_sum(partials: Sequence[Tensor]) -> Tensor:
    """Add up in float32, in the order of the ranks, and round once to the dtype of the partial sums."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return total.to(partials[0].dtype)


def check_codec(name: str, codec: object, width: int | None = None, ranks: int | None = None) -> None:
    """Raise unless a codec can add up partial sums of `width` features from `ranks` ranks.

    Raises:
        TypeError: not a codec, or one whose payloads cannot be summed.
        ValueError: a `FeatureInt` for another number of features or ranks.
    """
    codec = check_summable(codec)
    ranks, width = ranks or codec.ranks, width or codec.grain
    if codec.ranks is not None and (ranks, width) != (codec.ranks, codec.grain):
        raise ValueError(
            f"codec is for {codec.ranks} ranks and {codec.grain} features; {name} has {ranks} ranks and "
            f"{width} features"
        )


def check_inference(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise RuntimeError if autograd expects a gradient of the input or the weight: low-bit sums have none."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise RuntimeError(
            f"{name} sums in few bits, for inference only, and gradients are on; allowed: calls under "
            "torch.no_grad() or torch.inference_mode()"
        )
