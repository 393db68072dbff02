"""Sums over ranks, in few bits if that is faster: on real ranks, and bit-identical in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs.base import Codec, Summable
from lowbit.codecs.checks import check_choice, check_int, check_timeout
from lowbit.collectives import all_reduce
from lowbit.collectives.algorithms import CHUNK, Shards, choose, one_shot, two_shot
from lowbit.collectives.calls import TIMEOUT
from lowbit.collectives.exchange import CollectiveExchange, Marks, Scratch
from lowbit.collectives.reduce import check_summable
from lowbit.tensor_parallel.thresholds import Choice, Thresholds, kind_of
from lowbit.wire import pytorch
from lowbit.wire.checksum import Checksums, check_checksums
from lowbit.wire.pytorch import rank_names

SMALL = 1 << 15
"""With emulated ranks, where no link can be measured, sums of fewer elements stay in the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class SumSettings:
    """How partial sums are added up; the same on all ranks.

    Args:
        algorithm: "one_shot" (each rank sends its partial sums to all others, one quantization), "two_shot" (each rank
            adds up a part and sends the sum, two quantizations), or "auto": the faster one if thresholds are measured,
            otherwise what `lowbit.collectives.all_reduce` chooses by ranks and bytes.
        small: which sums are left to the engine's own all-reduce; this depends on the shape alone. "auto": real ranks
            measure at the start, for each kind of sum, from how many rows on few bits are faster on their link, and
            take the same decision (a few seconds at most, logged); emulated ranks code from 32,768 elements (rows times
            features) on. A number: sums of fewer elements are not coded. `Thresholds`: measured earlier.
        timeout: seconds after which a missing or failed peer is an error.
        checksums: append 8 bytes to each payload, by which the receiver detects damage.
    """

    algorithm: Literal["auto", "one_shot", "two_shot"] = "auto"
    small: int | Literal["auto"] | Thresholds = "auto"
    timeout: float = TIMEOUT
    checksums: bool = True

    def __post_init__(self) -> None:
        check_choice("algorithm", self.algorithm, ("auto", "one_shot", "two_shot"))
        if isinstance(self.small, str):
            check_choice("small", self.small, ("auto",))
        elif not isinstance(self.small, Thresholds):
            check_int("small", self.small, 0, 1 << 60)
        check_checksums(self.checksums)
        check_timeout(self.timeout)

    def choice(self, partial: Tensor, ranks: int, codec: Codec | None) -> Choice:
        """Return how a sum over `ranks` ranks travels."""
        numel = partial.numel()
        if codec is None or ranks == 1 or not numel:
            return "plain"
        if isinstance(self.small, Thresholds):
            width = partial.shape[-1]
            rows = numel // width
            if not 0 < self.small.least <= rows:  # checked first, to keep the sum of a single token fast
                return "plain"
            return self.small.choice(kind_of(width, partial.dtype, codec), rows)
        if numel < (SMALL if self.small == "auto" else max(1, self.small)):
            return "plain"
        return choose(ranks, codec.nbytes((numel,))) if self.algorithm == "auto" else self.algorithm


@dataclass
class Traffic:
    """Counts of the values that one rank contributed to sums, and of their bytes; the same on all ranks.

    They are computed from shapes, which costs nothing. Of two_shot only the first step is counted; the second sends the
    sums in payloads of the same size. With one rank nothing is sent.

    Args:
        coded, plain: values sent in few bits, and in the model's dtype (below `SumSettings.small`, or without a codec).
        coded_bytes, plain_bytes: of their payloads, with codes, outlier features and scales, but without the 8 bytes of
            each message's checksum.
        other_bytes: of tensors that are gathered instead of added up, such as the logits of a cut output matrix; not in
            `bits_per_value`.
        algorithms: those by which coded values were all-reduced.
    """

    coded: int = 0
    plain: int = 0
    coded_bytes: int = 0
    plain_bytes: int = 0
    other_bytes: int = 0
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

    def take(self, partial: Tensor, ranks: int, codec: Codec | None, choice: Choice) -> None:
        """Count one sum over `ranks` ranks."""
        numel = partial.numel()
        if ranks == 1 or not numel:
            return
        if codec is None or choice == "plain":
            self.plain += numel
            self.plain_bytes += numel * partial.element_size()
            return
        self.coded += numel
        self.coded_bytes += codec.nbytes((numel,))
        self.algorithms.add(choice)

    def reset(self) -> None:
        """Count from zero again."""
        self.coded = self.plain = self.coded_bytes = self.plain_bytes = self.other_bytes = 0
        self.algorithms.clear()


def sum_over_ranks(
    partial: Tensor, codec: Codec | None, group: dist.ProcessGroup, choice: Choice, settings: SumSettings
) -> None:
    """Replace this rank's partial sum by the sum of all ranks', bit-identical on all of them.

    With n elements of b bits, each of W ranks sends 2 (W - 1) / W n b / 8 bytes, or (W - 1) n b / 8 by one_shot. Coded
    sums take 8 more bytes for each message's checksum.

    On CPUs a coded sum is a call of `lowbit.collectives.all_reduce`. On a GPU it is queued on the current stream with
    PyTorch's collectives, in memory of PyTorch's allocator: no other thread, no wait of the host, so that a CUDA graph
    may capture it. No error can be raised there: a damaged payload makes the sum NaN.

    Args:
        partial: (..., E), contiguous, in the model's dtype.
        codec: None: not coded.
        choice: "plain": the engine's own all-reduce. With more than two ranks it may round after every addition.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1 or not partial.numel():
        return
    if codec is None or choice == "plain":
        pytorch.finish(pytorch.total(partial, group), group, settings.timeout)
    elif partial.device.type == "cpu":
        all_reduce(
            partial, codec, group, algorithm=choice, small=0, timeout=settings.timeout, checksums=settings.checksums
        )
    else:
        sum_on_stream(partial.view(-1), check_summable(codec), group, choice, settings)


def sum_on_stream(
    flat: Tensor, codec: Summable, group: dist.ProcessGroup, choice: Choice, settings: SumSettings
) -> None:
    """Compute `sum_over_ranks` of coded values in the caller's thread and stream."""
    checksums = Checksums(f"tensor parallel/{codec.layer()}/{flat.numel()}", enabled=settings.checksums)
    exchange = CollectiveExchange(group, flat.device, Scratch(), Marks(checksums, "sum", rank_names(group)))
    algorithm = one_shot if choice == "one_shot" else two_shot
    with torch.no_grad():
        algorithm(flat, codec, exchange, chunk=CHUNK, divisor=1)
        if (damaged := exchange.damaged()) is not None:
            flat.masked_fill_(damaged, torch.nan)


def sum_in_process(partials: Sequence[Tensor], codec: Codec | None, choice: Choice) -> Tensor:
    """Return the result of `sum_over_ranks` on ranks with these partial sums.

    Sums that are not coded are added up in float32 in the order of the ranks and rounded once. The engine's own
    all-reduce does the same for two ranks; with more its result may differ in the last bits.
    """
    ranks, first = len(partials), partials[0]
    if ranks == 1 or not first.numel():
        return first
    if codec is None or choice == "plain":
        return plain_sum(partials)
    codec = check_summable(codec)
    flats = [partial.reshape(-1) for partial in partials]
    out = torch.empty_like(flats[0])
    twice = choice == "two_shot"
    shards = Shards(numel=out.numel(), ranks=ranks if twice else 1, chunk=CHUNK, grain=codec.grain)
    for owner, chunk in itertools.product(range(shards.ranks), range(shards.chunks)):
        piece = shards.piece(owner, chunk)
        if piece.start == piece.stop:
            continue
        total = torch.empty(shards.size(owner, chunk), device=out.device) if twice else out[piece]
        codec.sum([codec.part(rank).encode(flat[piece]) for rank, flat in enumerate(flats)], out=total)
        if twice:
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
    """Raise unless a codec can add up partial sums of `width` features from `ranks` ranks."""
    codec = check_summable(codec)
    ranks, width = ranks or codec.ranks, width or codec.grain
    if codec.ranks is not None and (ranks, width) != (codec.ranks, codec.grain):
        raise ValueError(
            f"codec is for {codec.ranks} ranks and {codec.grain} features; {name} has {ranks} ranks and "
            f"{width} features"
        )


def check_inference(name: str, x: Tensor, weight: Tensor | None = None) -> None:
    """Raise RuntimeError if autograd expects a gradient of the input or the weight: low-bit sums have none."""
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        raise RuntimeError(
            f"{name} is cut over ranks for inference only, and gradients are on; allowed: calls under "
            "torch.no_grad() or torch.inference_mode()"
        )
