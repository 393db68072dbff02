"""Round trips between the ranks of a pipeline, and schedules that cross between ranks more often than needed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from lowbit.train.layout import Layout
from lowbit.wire.messages import Expected, Messages

_PINGS = 5
_BYTES = 8
_NOTICEABLE = 0.05  # seconds of a step
Pair = tuple[int, int]


def round_trips(messages: Messages) -> dict[int, float]:
    """Measure seconds of a round trip to the next rank (from the last one to rank 0; of two ranks only the first).

    Returns the median of 5 messages of 8 bytes there and back, by the neighbour's rank. All ranks call this; pairs
    without a rank in common measure at the same time.

    Raises:
        DamagedError, PeerError: as `Messages`.
    """
    ranks = messages.ranks
    pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks if ranks > 2 else ranks - 1)]
    trips: dict[int, float] = {}
    for first, second in sorted(pairs, key=lambda pair: pair[0] % 2):
        if messages.rank in (first, second):
            other = second if messages.rank == first else first
            # One more, which does not count: the peer may not be ready, or not have posted its receive.
            arriving = [messages.expect(_BYTES, other, "ping") for _ in range(_PINGS + 1)]
            times = _exchange(messages, arriving, other, starts=messages.rank == first)
            if messages.rank == first:
                trips[other] = statistics.median(times[1:])
    return trips


def needless(plan: Layout, schedule: str, trips: Mapping[Pair, float], least: float = _NOTICEABLE) -> str | None:
    """Describe the time that a schedule loses on the way between ranks; None where it loses little.

    A micro-batch passes all stages forward and back, so each step takes at least a round trip for each boundary between
    two ranks. With one stage on each rank there are the fewest.

    Args:
        plan: the pipeline; schedule: its name.
        trips: seconds of a round trip between two ranks, the lower one first.
        least: seconds of a step that are worth a line.
    """
    ends = [(plan.rank_of(i), plan.rank_of(i + 1)) for i in range(plan.stages - 1) if plan.crosses(i)]
    crossed = [(min(pair), max(pair)) for pair in ends]
    needed = [(rank, rank + 1) for rank in range(plan.ranks - 1)]
    lost, fewest = (sum(trips[pair] for pair in pairs) for pairs in (crossed, needed))
    if lost - fewest <= least:
        return None
    return (
        f"neighbours are up to {1000 * max(trips[pair] for pair in crossed):.0f} ms apart, there and back, and "
        f"{schedule} with {plan.stages_per_rank} stages on each of {plan.ranks} ranks crosses between them "
        f"{2 * len(crossed)} times in a row ({lost:.2f} s of each step); 1 stage on each rank crosses "
        f"{2 * len(needed)} times ({fewest:.2f} s): set pipeline.stages_per_rank to 1, with pipeline.schedule 1F1B"
    )


def _exchange(messages: Messages, arriving: list[Expected], other: int, *, starts: bool) -> list[float]:
    times, sent = [], []
    for message in arriving:
        begin = time.perf_counter()
        if starts:
            sent.append(messages.send(torch.zeros(_BYTES, dtype=torch.uint8), other))
        message.wait()
        if not starts:
            sent.append(messages.send(torch.zeros(_BYTES, dtype=torch.uint8), other))
        times.append(time.perf_counter() - begin)
    for each in sent:
        each.wait()
    return times
