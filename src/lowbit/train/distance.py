"""Detect schedules that cross between ranks more often than needed."""

from __future__ import annotations

from collections.abc import Mapping

from lowbit.train.layout import PipelineLayout

_NOTICEABLE = 0.05  # seconds of a step
Pair = tuple[int, int]


def needless(
    plan: PipelineLayout, schedule: str, trips: Mapping[Pair, float], least: float = _NOTICEABLE
) -> str | None:
    """Describe the time that a schedule loses by extra crossings between ranks; None if it loses little.

    A micro-batch passes all stages forward and back, so each step takes at least a round trip for each boundary between
    two ranks. One stage on each rank has the fewest such boundaries.

    Args:
        plan: the pipeline; schedule: its name. least: seconds of a step that are worth a line.
        trips: seconds of a round trip between two ranks, the lower one first.
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
