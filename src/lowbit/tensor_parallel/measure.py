"""Measures on the ranks' own link from how many rows on sums are faster in few bits; all ranks agree on the result."""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from lowbit.codecs.base import Codec
from lowbit.tensor_parallel.reduce import SumSettings, sum_over_ranks
from lowbit.tensor_parallel.thresholds import Choice, Steps, Thresholds, kind_of
from lowbit.wire import pytorch
from lowbit.wire.messages import gather_json

ROWS = 1, 8, 32, 128, 512, 2048
"""Numbers of rows that are measured. Sums with another number of rows use the result of the next smaller one."""
_TURNS, _FEWER, _LONG = 5, 3, 0.5  # turns after an untimed one; fewer after sizes that took `_LONG` seconds
_GAIN = 0.97  # a coded sum must take at most this share of the engine's time in three of four turns
_SECONDS = 4.0  # limit for all kinds: larger sums are not measured once it is used up

_log = logging.getLogger("lowbit.tensor_parallel")

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
    date = max(date for _, date in results.values())
    thresholds = _thresholds(kinds, times, dist.get_world_size(group), date)
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
    pytorch.finish(pytorch.total(x.new_zeros(1), group), group, settings.timeout)
    wait = torch.cuda.synchronize if x.device.type == "cuda" else lambda device: None
    wait(x.device)
    start = time.perf_counter()
    sum_over_ranks(x, codec, group, choice, settings)
    wait(x.device)
    return time.perf_counter() - start


def _thresholds(kinds: Mapping[str, SumSample], times: Mapping[str, Times], ranks: int, date: str) -> Thresholds:
    milliseconds = {
        kind: {
            str(rows): {name: round(1e3 * statistics.median(turns), 3) for name, turns in by_choice.items()}
            for rows, by_choice in by_rows.items()
        }
        for kind, by_rows in times.items()
    }
    kind, sample = next(iter(kinds.items()))
    rows = max(times[kind])
    nbytes = 2 * (ranks - 1) / ranks * rows * sample.width * sample.dtype.itemsize
    return Thresholds(
        ranks=ranks, steps={kind: steps_of(by_rows) for kind, by_rows in times.items()}, milliseconds=milliseconds,
        mbit=round(8e-6 * nbytes / statistics.median(times[kind][rows]["plain"]), 1),
        date=date,
    )  # fmt: skip


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
