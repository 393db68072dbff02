"""How sums travel over ranks: settings, measured thresholds, and the sums themselves, also in one process."""

import itertools
import statistics
import time
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import escape
from lowbit.codecs.base import Codec, Summable
from lowbit.codecs.checks import check_choice, check_int, check_timeout, check_written
from lowbit.collectives import all_reduce
from lowbit.collectives.algorithms import CHUNK, Shards, automatic_algorithm, one_shot, two_shot
from lowbit.collectives.calls import TIMEOUT
from lowbit.collectives.exchange import CollectiveExchange, Marks, Scratch
from lowbit.collectives.reduce import check_summable, show_overflow
from lowbit.wire import pytorch
from lowbit.wire.checksum import Checksums, check_checksums
from lowbit.wire.messages import gather_json
from lowbit.wire.pytorch import rank_names

_log = escape.logger("lowbit.tensor_parallel")

Choice = Literal["plain", "one_shot", "two_shot"]
"""How a sum is computed: by the engine's own all-reduce in the model's dtype, or coded by one of two algorithms."""
Steps = tuple[tuple[int, Choice], ...]
"""Numbers of rows, ascending, and the choice from each of them on. With fewer rows than the first: "plain"."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Measurements of one link, and the choices that follow from them; the same on all ranks.

    `low_bit_` measures them unless `SumSettings.small` is a number or earlier thresholds:

        installed = low_bit_(model, calibration)
        ...
        low_bit_(another, calibration, settings=SumSettings(small=installed.thresholds))

    Args:
        ranks: of the group. steps: by kind of sum (features, dtype, whole bits of the format).
        milliseconds: by kind, measured number of rows and choice: the slowest rank's median.
        mbit: rate of the engine's all-reduce at the largest size, in 10^6 bits per second. date: in UTC.
    """

    ranks: int
    steps: Mapping[str, Steps]
    milliseconds: Mapping[str, Mapping[str, Mapping[str, float]]]
    mbit: float
    date: str

    @cached_property
    def least(self) -> int:
        """The fewest rows from which on sums of any kind are coded; 0 if none is."""
        return min((steps[0][0] for steps in self.steps.values() if steps), default=0)

    def choice(self, kind: str, rows: int) -> Choice:
        """Return the choice for a sum of `rows` rows: "plain" for an unmeasured kind, which is logged once."""
        if kind not in self.steps:
            _warn_unmeasured(kind, ", ".join(self.steps))
            return "plain"
        steps = self.steps[kind]
        index = bisect_right([least for least, _ in steps], rows)
        return steps[index - 1][1] if index else "plain"

    def __str__(self) -> str:
        coded = {kind: [f"{name} from {rows} rows" for rows, name in steps] for kind, steps in self.steps.items()}
        parts = [f"{kind}: {', '.join(choices) or 'never coded'}" for kind, choices in coded.items()]
        return f"{'; '.join(parts)} ({self.ranks} ranks, {self.mbit:.0f} Mbit/s, {self.date})"


def kind_of(width: int, dtype: torch.dtype, codec: Codec) -> str:
    """Name the kind of a sum: everything but its rows on which its time depends."""
    bits = codec.bits_per_element((64, width))
    return f"{width} features, {str(dtype).removeprefix('torch.')}, {bits:.0f} bits"


@cache
def _warn_unmeasured(kind: str, measured: str) -> None:
    _log.warning(
        "sums of %s are not coded: thresholds were measured for %s; give the model its dtype before low_bit_, or a "
        "number as small", kind, measured,
    )  # fmt: skip


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
        if isinstance(self.small, Thresholds) and self.algorithm != "auto":
            measured_for = {name for steps in self.small.steps.values() for _, name in steps} - {"plain"}
            if others := measured_for - {self.algorithm}:
                raise ValueError(
                    f"algorithm is {self.algorithm!r} and small has thresholds for {', '.join(sorted(others))}; "
                    "allowed: 'auto', or thresholds that were measured for this algorithm"
                )

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
        return automatic_algorithm(ranks, codec.nbytes((numel,))) if self.algorithm == "auto" else self.algorithm


@dataclass
class SumTraffic:
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
        partial: (..., E), in the model's dtype.
        codec: None: not coded.
        choice: "plain": the engine's own all-reduce. With more than two ranks it may round after every addition.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1 or not partial.numel():
        return
    if not partial.is_contiguous():  # Gloo ignores strides
        check_written("partial", partial)
        packed = partial.contiguous()
        sum_over_ranks(packed, codec, group, choice, settings)
        partial.copy_(packed)
    elif codec is None or choice == "plain":
        pytorch.wait_within(pytorch.all_reduce_sum(partial, group), group, settings.timeout, partial.device)
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
    marks = Marks(checksums, "sum", rank_names(group))
    exchange = CollectiveExchange(group, flat.device, Scratch(), marks, settings.timeout)
    algorithm = one_shot if choice == "one_shot" else two_shot
    with torch.no_grad():
        algorithm(flat, codec, exchange, chunk=CHUNK, divisor=1)
        show_overflow(flat)
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
        total = torch.empty(shards.size(owner, chunk), dtype=torch.float32, device=out.device) if twice else out[piece]
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


ROWS = 1, 8, 32, 128, 512, 2048
"""Numbers of rows that are measured. Sums with another number of rows use the result of the next smaller one."""
_TURNS, _FEWER, _LONG = 5, 3, 0.5  # turns after an untimed one; fewer after sizes that took `_LONG` seconds
_GAIN = 0.97  # a coded sum must take at most this share of the engine's time in three of four turns
_SECONDS = 4.0  # limit for all kinds: larger sums are not measured once it is used up

Times = dict[int, dict[Choice, list[float]]]
"""Seconds of the slowest rank in each turn, by rows and choice."""


@dataclass(frozen=True)
class SumSample:
    """A kind of sum to measure; `codec` is that of any layer with these sizes."""

    width: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec


_measured: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str, bool], tuple[Times, str]]]
_measured = weakref.WeakKeyDictionary()


def measured(
    samples: Sequence[SumSample], group: dist.ProcessGroup, settings: SumSettings, *, anew: bool = False
) -> SumSettings:
    """Return settings with thresholds instead of `small="auto"`; all ranks must call this.

    Earlier measurements on this group are used again, unless `anew`.
    """
    kinds = {kind_of(sample.width, sample.dtype, sample.codec): sample for sample in samples}
    if isinstance(given := settings.small, Thresholds):
        missing = [kind for kind in kinds if kind not in given.steps]
        if missing or given.ranks != dist.get_world_size(group):
            raise ValueError(
                f"thresholds are for {given.ranks} ranks and {', '.join(given.steps)}; allowed: for "
                f"{dist.get_world_size(group)} ranks and {', '.join(kinds)}"
            )
        return settings
    if settings.small != "auto" or dist.get_world_size(group) == 1 or not kinds:
        return settings
    cache = _measured.setdefault(group, {})
    for kind, sample in kinds.items():
        key = kind, settings.algorithm, settings.checksums
        if anew or key not in cache:
            cache[key] = _times(sample, group, settings, _SECONDS / len(kinds))
    results = {kind: cache[kind, settings.algorithm, settings.checksums] for kind in kinds}
    times = {kind: times for kind, (times, _) in results.items()}
    milliseconds = {
        kind: {
            str(rows): {name: round(1e3 * statistics.median(turns), 3) for name, turns in by_choice.items()}
            for rows, by_choice in by_rows.items()
        }
        for kind, by_rows in times.items()
    }
    ranks, (kind, sample) = dist.get_world_size(group), next(iter(kinds.items()))
    rows = max(times[kind])
    nbytes = 2 * (ranks - 1) / ranks * rows * sample.width * sample.dtype.itemsize
    thresholds = Thresholds(
        ranks=ranks, steps={kind: steps_of(by_rows) for kind, by_rows in times.items()}, milliseconds=milliseconds,
        mbit=round(8e-6 * nbytes / statistics.median(times[kind][rows]["plain"]), 1),
        date=max(date for _, date in results.values()),
    )  # fmt: skip
    if dist.get_rank(group) == 0:
        _log.info("all-reduces of partial sums: %s", thresholds)
    return replace(settings, small=thresholds)


def _times(sample: SumSample, group: dist.ProcessGroup, settings: SumSettings, seconds: float) -> tuple[Times, str]:
    """Time all choices in turn on sums of more and more rows; return times and the date, the same on all ranks."""
    # On two ranks two_shot sends the same bytes as one_shot and codes twice.
    several: tuple[Choice, ...] = ("one_shot",) if dist.get_world_size(group) == 2 else ("one_shot", "two_shot")
    competing: tuple[Choice, ...] = ("plain", *(several if settings.algorithm == "auto" else (settings.algorithm,)))
    times = Times()
    spent = last = 0.0
    date: str = gather_json(datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), group, timeout=settings.timeout)[0]
    for rows in ROWS:
        turns = _FEWER if last > _LONG else _TURNS
        x = torch.zeros(rows, sample.width, dtype=sample.dtype, device=sample.device)
        mine = [[_turn(x, sample.codec, c, group, settings) for c in competing] for _ in range(1 + turns)]
        by_rank: list[list[list[float]]] = gather_json(mine, group, timeout=settings.timeout)
        slowest = [[max(one) for one in zip(*turn, strict=True)] for turn in zip(*by_rank, strict=True)]
        times[rows] = {c: [turn[i] for turn in slowest[1:]] for i, c in enumerate(competing)}
        last = sum(map(sum, slowest[1:]))  # the first calls of a process take seconds
        spent += last
        if spent + 3 * last > seconds:
            break
    return times, date


@torch.no_grad()
def _turn(x: torch.Tensor, codec: Codec, choice: Choice, group: dist.ProcessGroup, settings: SumSettings) -> float:
    """Return the seconds of one sum, which all ranks begin together."""
    pytorch.wait_within(pytorch.all_reduce_sum(x.new_zeros(1), group), group, settings.timeout, x.device)
    wait = torch.cuda.synchronize if x.device.type == "cuda" else lambda device: None
    wait(x.device)
    start = time.perf_counter()
    sum_over_ranks(x, codec, group, choice, settings)
    wait(x.device)
    return time.perf_counter() - start


def steps_of(times: Times) -> Steps:
    """Return the numbers of rows from which on each choice is used.

    A sum is coded from the first number of rows at which few bits are faster beyond the noise, there and at every
    larger measured size.
    """
    steps: list[tuple[int, Choice]] = []
    for rows in sorted(times, reverse=True):
        medians: dict[float, Choice] = {
            statistics.median(turns): choice for choice, turns in times[rows].items() if choice != "plain"
        }
        best = medians[min(medians)]
        ratios = sorted(a / b for a, b in zip(times[rows][best], times[rows]["plain"], strict=True))
        if ratios[3 * (len(ratios) - 1) // 4] > _GAIN:
            break
        if steps and steps[-1][1] == best:
            steps.pop()
        steps.append((rows, best))
    return tuple(reversed(steps))
