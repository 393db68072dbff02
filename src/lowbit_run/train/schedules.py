"""The schedules of `torch.distributed.pipelining` that a run may have, and what is known of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """What differs between schedules.

    Attributes:
        stages_per_rank: the only number that is allowed; 0: any.
        v_shaped: stages go down the ranks and back up, so that rank 0 has the first and the last.
        splits: backward passes run in two, for the inputs and for the weights.
        fills: there must be at least as many micro-batches as stages.
        in_rounds: micro-batches are divided into equal rounds.
        laps: with one stage on a rank it is no better than 1F1B or GPipe.
    """

    stages_per_rank: int = 0
    v_shaped: bool = False
    splits: bool = False
    fills: bool = False
    in_rounds: bool = False
    laps: bool = False


SCHEDULES: Mapping[Schedule, ScheduleFacts] = {
    "GPipe": ScheduleFacts(stages_per_rank=1),
    "1F1B": ScheduleFacts(stages_per_rank=1, fills=True),
    "Interleaved1F1B": ScheduleFacts(in_rounds=True, laps=True),
    "LoopedBFS": ScheduleFacts(laps=True),
    "InterleavedZeroBubble": ScheduleFacts(in_rounds=True, splits=True),
    "ZBVZeroBubble": ScheduleFacts(stages_per_rank=2, v_shaped=True, splits=True),
    "DualPipeV": ScheduleFacts(stages_per_rank=2, v_shaped=True, fills=True, splits=True),
}


def schedule_named(name: Any) -> Any:
    """Return the schedule of this name in upper or lower case; another value as it is."""
    return {schedule.lower(): schedule for schedule in SCHEDULES}.get(str(name).lower(), name)
