"""Counts the micro-batches that the stages of a pipeline hold at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from lowbit_run.simulate.step import ACTION, Order

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Micro-batches that a rank's stages hold at one time: by stage, those whose activations it holds.

    `halfway`: how many of these are between backward's pass for the inputs and the one for the weights. PyTorch then
    holds gradients of the layers' outputs, of the stage's outputs and of its inputs as well.
    """

    held: Mapping[int, int]
    halfway: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Micro-batches that the stages of a pipeline hold.

    `moments`: by rank, those that no other exceeds at every stage, in whole and in halfway micro-batches. However many
    bytes a micro-batch takes, the rank's memory is highest at one of these.
    """

    moments: Mapping[int, tuple[Moment, ...]]

    @property
    def stages(self) -> list[int]:
        """All stages, in order."""
        return sorted(stage for moments in self.moments.values() for stage in moments[0].held)

    @property
    def splits(self) -> bool:
        """Whether any stage holds gradients between two passes of its backward."""
        return any(any(moment.halfway.values()) for moments in self.moments.values() for moment in moments)

    def peak(self, stage: int) -> int:
        """The most micro-batches that a stage holds at a time."""
        return max(moment.held[stage] for moment in self.moments[self.rank_of(stage)])

    def stays(self, stage: int) -> bool:
        """Whether the next stage is on the same rank, as in the middle of V-shaped schedules."""
        return stage + 1 in self.stages and self.rank_of(stage) == self.rank_of(stage + 1)

    def rank_of(self, stage: int) -> int:
        """The rank of a stage; ValueError for an unknown stage."""
        for rank, moments in self.moments.items():
            if stage in moments[0].held:
                return rank
        raise ValueError(f"stage is {stage}; allowed: {', '.join(map(str, self.stages))}")


def in_flight(order: Order) -> InFlight:
    """Count the micro-batches that each stage holds, by following every rank's actions.

    A micro-batch is held from its forward (F) until its backward has ended: B, or the pass for the weights (W) if a
    zero-bubble schedule splits backward into a pass for the inputs (I) and one for the weights. PyTorch's I keeps the
    graph with all its saved tensors (`retain_graph`), because W starts again from its middle, and the gradients that W
    starts with; on the first stage I does nothing. I frees only what follows the last layer with weights: the loss
    (`StageCost.early`).

    Args:
        order: actions of each rank (`order_of`, `actions_of`). Communication is skipped; actions that run together
            (OVERLAP_F_B) count one after the other, as PyTorch runs them.

    Raises:
        ValueError: a stage on several ranks, or one whose backwards do not match its forwards.
    """
    every = {rank: tuple(undominated(_walk(rank, actions), _counts)) for rank, actions in order.items()}
    every = {rank: moments for rank, moments in every.items() if moments}
    stages = [stage for moments in every.values() for stage in moments[0].held]
    if not stages or len(set(stages)) < len(stages):
        raise ValueError(f"order has stages {sorted(stages)}; allowed: each on one rank, at least one")
    return InFlight(moments=MappingProxyType(every))


def _walk(rank: int, actions: Sequence[Any]) -> Iterator[Moment]:
    """Yield the moments after each forward and after each pass for the inputs.

    Indices of micro-batches are ignored, because PyTorch's 1F1B lists the last stage's forwards one too high.
    """
    texts = (str(action) for action in actions if action is not None)
    steps = [(int(stage), kind) for text in texts for stage, kind, _ in ACTION.findall(text)]
    held = {stage: 0 for stage, _ in sorted(steps)}
    halfway = held.copy()
    for stage, kind in steps:
        if kind in "IW" and stage != 0:
            halfway[stage] += 1 if kind == "I" else -1
        if kind in "FBW":
            held[stage] += 1 if kind == "F" else -1
        if min(held[stage], halfway[stage]) < 0:
            raise ValueError(f"order of rank {rank} ends more micro-batches of stage {stage} than it has begun")
        if kind in "FI":
            yield Moment(held=MappingProxyType(held.copy()), halfway=MappingProxyType(halfway.copy()))
    for stage, count in held.items():
        if count:
            raise ValueError(f"order of rank {rank} leaves {count} micro-batches of stage {stage} without backward")


def _counts(moment: Moment) -> tuple[int, ...]:
    """For each stage, micro-batches before their backward, and halfway ones; negative, because the most count."""
    held, halfway = moment.held, moment.halfway
    return (*(halfway[stage] - held[stage] for stage in held), *(-count for count in halfway.values()))


def undominated(items: Iterable[_Item], numbers: Callable[[_Item], tuple[float, ...]]) -> list[_Item]:
    """The items that no other one matches or undercuts in all numbers, ordered by these; of equal ones the first."""
    kept: list[tuple[tuple[float, ...], _Item]] = []
    for item in sorted(items, key=numbers):  # whatever undercuts an item comes before it
        values = numbers(item)
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
            kept.append((values, item))
    return [item for _, item in kept]
