"""The actions of a schedule: PyTorch's own lists, and the same as arrays for a simulation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from lowbit.codecs.checks import check_int

ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
KINDS = "FBIW"
"""Forward; backward; the pass of a split backward for the inputs; its pass for the weights."""
F, B, I, W = range(4)  # noqa: E741
Order = Mapping[int, Sequence[Any]]
"""The actions of each rank in order, as PyTorch's schedules list them, or as text ("0F1"); None is idle."""


@dataclass(frozen=True, eq=False)
class Actions:
    """The actions of all ranks as arrays, in order; rank r has the entries from `first[r]` to `first[r + 1]`.

    Args:
        first: int64 (R + 1,). stage, micro_batch: int32 (A,). kind: uint8 (A,), indices into `KINDS`.
    """

    first: NDArray[np.int64]
    stage: NDArray[np.int32]
    kind: NDArray[np.uint8]
    micro_batch: NDArray[np.int32]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.first) - 1

    @property
    def rank(self) -> NDArray[np.int32]:
        """int32 (A,): the rank of each action."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.first))

    def name(self, action: int) -> str:
        """An action as PyTorch prints it, such as "0F1"."""
        return f"{self.stage[action]}{KINDS[self.kind[action]]}{self.micro_batch[action]}"

    def names(self, rank: int) -> list[str]:
        """The actions of a rank."""
        return [self.name(action) for action in range(self.first[rank], self.first[rank + 1])]


def actions(schedule: str, *, ranks: int, stages_per_rank: int = 1, microbatches: int) -> Actions:
    """Return the actions of one step of a schedule as arrays; see `order_of`."""
    return actions_from(order_of(schedule, ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches))


def actions_from(order: Order) -> Actions:
    """Read the actions of a schedule's list; communication and idle moments are left out.

    Actions that run together (OVERLAP_F_B) come one after the other, as PyTorch runs them. Micro-batches are counted
    from the lowest forward of a stage, because PyTorch's 1F1B lists those of the last stage one too high.
    """
    every: list[tuple[str, str, str]] = []
    first: list[int] = [0]
    lowest: dict[tuple[str, str], int] = {}
    for rank in sorted(order):
        for action in order[rank]:
            if action is not None:
                every += ACTION.findall(str(action))
        first.append(len(every))
    for stage, kind, number in every:
        if kind == "F":
            lowest[stage, kind] = min(lowest.get((stage, kind), int(number)), int(number))
    return Actions(
        first=np.array(first, dtype=np.int64),
        stage=np.array([int(stage) for stage, _, _ in every], dtype=np.int32),
        kind=np.array([KINDS.index(kind) for _, kind, _ in every], dtype=np.uint8),
        micro_batch=np.array([int(n) - lowest.get((stage, kind), 0) for stage, kind, n in every], dtype=np.int32),
    )


def order_of(schedule: str, *, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """Return each rank's actions in one step of a schedule of `torch.distributed.pipelining`; starts no process.

    Args:
        schedule: its name ("1F1B", "ZBVZeroBubble", ...) in upper or lower case.
        ranks, stages_per_rank: of the pipeline; GPipe and 1F1B have one stage a rank.
        microbatches: of a step.

    Raises:
        ValueError: an unknown schedule, or numbers that it does not support.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    for name, count in (("ranks", ranks), ("stages_per_rank", stages_per_rank), ("microbatches", microbatches)):
        check_int(name, count, 1, 1 << 16)
    kind: Any = get_schedule_class(schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    if not several and stages_per_rank != 1:
        raise ValueError(f"stages_per_rank is {stages_per_rank}; allowed with {schedule}: 1")
    stages = [_Stage(index * ranks, ranks, ranks * stages_per_rank) for index in range(stages_per_rank)]
    return actions_of(kind(stages if several else stages[0], microbatches, loss_fn=lambda *_: None))  # never run


def actions_of(schedule: Any) -> Order:
    """Return the actions of all ranks, which every rank's schedule object holds."""
    order = getattr(schedule, "pipeline_order", None)
    return order or schedule._get_pipeline_order()


class _Stage:
    """The attributes of a stage that a schedule reads when it lays out its actions."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = ranks, 0
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod, self.has_backward, self.device = nn.Identity(), True, "cpu"
