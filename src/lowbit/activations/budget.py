"""Bits of saved activations by pipeline stage and layer type: those that lose least within the bytes of each device.

Under most schedules late stages hold fewer micro-batches than early ones, and so can afford more bits (AGoQ, arXiv
2605.00539). The paper gives the idea and neither its search nor its measure of loss; ours are below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from lowbit.activations.in_flight import InFlight, Moment
from lowbit.activations.policy import LayerAware
from lowbit.codecs.checks import check_int

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16)
CHOSEN = ("norm", "mlp", "linear")
"""The layer types whose bits are chosen: attention stays as it is."""
MOST_STAGES = 18
MOST_COMBINATIONS = 1 << MOST_STAGES

Bits = Mapping[str, int]
Sensitivities = Mapping[str, Mapping[int, float]]
"""Relative error of the gradient by layer type and bits: |g' - g| / |g| with this type alone in so many bits."""


_NUMBERS = ("layers", "other", "output", "gradients", "early", "inputs", "received", "fixed")


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What a stage of a pipeline keeps, in bytes: autograd, and the stage itself.

    Args:
        layers: decoder layers of the stage: its share of the model's loss of precision.
        saved: of one micro-batch, by layer type and bits (16: as it is).
        other: of one micro-batch, whatever the bits: attention, embedding, the loss.
        output: of one micro-batch: what the stage hands on, held from its forward until its backward.
        gradients: of one micro-batch between backward's passes for the inputs and for the weights (zero-bubble
            schedules): those of the layers' outputs, never quantized.
        early: of one micro-batch: the part of `other` and `output` that goes with the pass for the inputs already.
        inputs: of one micro-batch between the same passes: gradients of the inputs.
        received: of one micro-batch from its forward to its backward: what the stage is given.
        fixed: at all times: weights, gradients, optimizer.
    """

    layers: int
    saved: Mapping[str, Mapping[int, int]]
    other: int = 0
    output: int = 0
    gradients: int = 0
    early: int = 0
    inputs: int = 0
    received: int = 0
    fixed: int = 0

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            check_int(name, getattr(self, name), 0, 1 << 62)
        if self.early > self.other + self.output:
            raise ValueError(
                f"early is {self.early}; allowed: at most other and output together ({self.other + self.output})"
            )
        if set(self.saved) != set(CHOSEN) or not all(self.saved.values()):
            raise ValueError(f"saved has {', '.join(self.saved)}; allowed: bytes by bits for {', '.join(CHOSEN)}")

    def per_microbatch(self, bits: Bits) -> int:
        """Bytes that autograd keeps of one micro-batch with these bits."""
        return self.other + sum(self.saved[kind][bits[kind]] for kind in CHOSEN)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What was chosen for a stage.

    Args:
        stage, rank: which, and who has it.
        bits: by layer type.
        held: micro-batches that it holds at its peak.
        saved_bytes: that autograd keeps for them at that moment.
        error: its part of the gradient's relative error; the squares of all stages add up to the plan's.
    """

    stage: int
    rank: int
    bits: Bits
    held: int
    saved_bytes: int
    error: float


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bits for every stage of a pipeline, with what they cost.

    Args:
        stages: in order.
        device_bytes: by rank, predicted: what is there at all times, and what autograd and the pipeline keep at the
            rank's worst moment.
        limit: bytes that every device has for them.
        least: bytes a device that would just do, with the fewest bits everywhere.
        group: elements that share a scale.
    """

    stages: tuple[StagePlan, ...]
    device_bytes: Mapping[int, int]
    limit: int
    least: int
    group: int = 64

    @property
    def error(self) -> float:
        """Predicted relative error of the gradient of the whole model."""
        return math.sqrt(sum(stage.error**2 for stage in self.stages))

    def policy(self, stage: int) -> LayerAware:
        """What `compress_saved_` takes for the module of a stage.

        Raises:
            ValueError: no such stage.
        """
        check_int("stage", stage, 0, len(self.stages) - 1)
        bits = self.stages[stage].bits
        return LayerAware(norm=bits["norm"], mlp=bits["mlp"], linear=bits["linear"], group=self.group)


def plan_bits(
    held: InFlight,
    costs: Sequence[StageCost],
    sensitivities: Sensitivities,
    *,
    device_bytes: int,
    group: int = 64,
) -> MemoryPlan:
    """Choose the bits of each stage and layer type that lose least of the gradient within each device's bytes.

    The loss of a choice is the sum over stages and layer types of squared relative gradient errors, each type's
    measured on the whole model and divided among the stages by their layers: errors of separate roundings are
    independent. Of each stage's combinations those count that no other beats in bytes and error; of the products of
    these over a rank's stages (thinned evenly where they are more than 2^18) the one with least error fits, ties going
    to fewer bytes. Candidates do not depend on the budget, so more bytes never mean more error, and the same input
    always gives the same plan.

    Args:
        held: micro-batches in flight, from `in_flight`.
        costs: of every stage, in order.
        sensitivities: relative gradient error by type and bits; at 16 bits it is 0 and may be left out.
        device_bytes: that one device has for all that `StageCost` names. Leave room for what it does not: what is in
            use only for a moment, such as a layer's decoded activations; payloads on their way; and the last stage's
            outputs, if the schedule's `step` shall return them.
        group: elements that share a scale, for the policies.

    Raises:
        ValueError: numbers of stages that differ, more than 18 stages on a rank, a width without sensitivity, or a
            budget below the least that would do; the text names it.
    """
    check_int("device_bytes", device_bytes, 1, 1 << 62)
    if len(costs) != len(held.stages):
        raise ValueError(f"costs has {len(costs)} stages; allowed: {len(held.stages)}, as held")
    layers = sum(cost.layers for cost in costs)
    fronts = [_front(cost, _errors(cost, sensitivities), layers) for cost in costs]
    choices = {rank: _Rank(rank, held, costs, fronts) for rank in held.moments}
    least = max(choice.least for choice in choices.values())
    if least > device_bytes:
        worst = max(choices, key=lambda rank: choices[rank].least)
        raise ValueError(
            f"device_bytes is {device_bytes:,}; allowed: at least {least:,}, which rank {worst} needs "
            f"with the fewest bits everywhere ({choices[worst].fixed:,} of them for what is there at all times)"
        )
    stages: dict[int, StagePlan] = {}
    used: dict[int, int] = {}
    for rank, choice in choices.items():
        points, used[rank] = choice.best(device_bytes)
        for stage, point in points.items():
            count = held.peak(stage)
            stages[stage] = StagePlan(
                stage=stage, rank=rank, bits=point.bits, held=count, saved_bytes=count * point.size,
                error=math.sqrt(point.loss),
            )  # fmt: skip
    return MemoryPlan(
        stages=tuple(stages[stage] for stage in sorted(stages)),
        device_bytes=MappingProxyType(used),
        limit=device_bytes,
        least=least,
        group=group,
    )


@dataclass(frozen=True, slots=True)
class _Point:
    """A combination of bits for a stage: bytes of a micro-batch, and squared error."""

    bits: Bits
    size: int
    loss: float


class _Rank:
    """The combinations of a rank's stages."""

    def __init__(
        self,
        rank: int,
        held: InFlight,
        costs: Sequence[StageCost],
        fronts: Sequence[Sequence[_Point]],
    ) -> None:
        moments = held.moments[rank]
        self.stages = sorted(moments[0].held)
        if len(self.stages) > MOST_STAGES:
            raise ValueError(f"held has {len(self.stages)} stages on a rank; allowed: up to {MOST_STAGES}")
        most = int(MOST_COMBINATIONS ** (1 / len(self.stages)) + 1e-9)
        self.fronts = [_thinned(fronts[stage], most) for stage in self.stages]
        self.fixed = sum(costs[stage].fixed for stage in self.stages)
        counts = torch.tensor([[moment.held[stage] for stage in self.stages] for moment in moments])
        beside = torch.tensor([beside_autograd(held, moment, costs) for moment in moments])
        every = [torch.arange(len(front)) for front in self.fronts]
        self.picked = torch.cartesian_prod(*every).view(-1, len(every))
        sizes = self._table([[point.size for point in front] for front in self.fronts], torch.int64)
        losses = self._table([[point.loss for point in front] for front in self.fronts], torch.float64)
        self.loss = losses.sum(1)
        # A rank's memory is highest at one of its moments; integers are exact up to 2^63.
        at_moments = (sizes[:, None, :] * counts[None]).sum(2) + beside
        self.bytes = at_moments.amax(1) + self.fixed
        self.least = int(self.bytes.min())

    def best(self, limit: int) -> tuple[dict[int, _Point], int]:
        """The points that lose least within so many bytes, by stage, and their bytes."""
        left = self.bytes <= limit
        for values in (self.loss, self.bytes):  # ties in the first are settled by the second
            left &= values == values[left].min()
        index = int(left.nonzero()[0, 0])
        picked = self.picked[index].tolist()
        points = {s: front[i] for s, front, i in zip(self.stages, self.fronts, picked, strict=True)}
        return points, int(self.bytes[index])

    def _table(self, values: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        columns = [torch.tensor(v, dtype=dtype)[self.picked[:, i]] for i, v in enumerate(values)]
        return torch.stack(columns, dim=1)


def beside_autograd(held: InFlight, moment: Moment, costs: Sequence[StageCost], stages: Sequence[int] = ()) -> int:
    """Bytes that the pipeline holds for the micro-batches of a moment, less what autograd frees early.

    What a stage hands to the next one of its own rank is what that one is given.

    Args:
        held: of the pipeline; moment: of one of its ranks.
        costs: of every stage; stages: those that count, all of the rank's if none are given.
    """
    total = 0
    for s in stages or moment.held:
        cost, last = costs[s], s == len(costs) - 1
        output = 0 if held.stays(s) else cost.output
        # What came for the outputs, and what goes out for the inputs, stays until the pass for the weights.
        between = cost.gradients - cost.early + cost.inputs + (0 if last else cost.output)
        total += moment.held[s] * (output + cost.received) + moment.halfway[s] * between
    return total


def _errors(cost: StageCost, sensitivities: Sensitivities) -> dict[str, dict[int, float]]:
    """Relative errors of the widths that a stage can have."""
    found: dict[str, dict[int, float]] = {}
    for kind in CHOSEN:
        known = {16: 0.0, **sensitivities.get(kind, {})}
        missing = [bits for bits in cost.saved[kind] if bits not in known]
        if missing:
            raise ValueError(
                f"sensitivities has nothing for {kind!r} at {', '.join(map(str, missing))} bits; "
                f"allowed: an error for every width in saved ({', '.join(map(str, cost.saved[kind]))})"
            )
        found[kind] = {bits: known[bits] for bits in cost.saved[kind]}
        bad = [bits for bits, error in found[kind].items() if not 0 <= error < math.inf]
        if bad:
            raise ValueError(
                f"sensitivities is {found[kind][bad[0]]} for {kind!r} at {bad[0]} bits; allowed: finite, at least 0"
            )
    return found


def _front(cost: StageCost, errors: Mapping[str, Mapping[int, float]], layers: int) -> list[_Point]:
    """Combinations that no other beats in both bytes and error, fewest bytes first."""
    share = cost.layers / layers if layers else 0.0
    found: list[_Point] = []
    every = _combinations(cost, errors, share)
    # Where bits make no difference, such as for a layer type that a stage does not have, more of them are said.
    for point in sorted(every, key=lambda p: (p.size, p.loss, -sum(p.bits.values()))):
        if not found or point.loss < found[-1].loss:
            found.append(point)
    return found


def _combinations(cost: StageCost, errors: Mapping[str, Mapping[int, float]], share: float) -> Iterator[_Point]:
    widths = [sorted(cost.saved[kind]) for kind in CHOSEN]
    for chosen in itertools.product(*widths):
        bits: dict[str, int] = dict(zip(CHOSEN, chosen, strict=True))
        loss = share * sum(errors[kind][bits[kind]] ** 2 for kind in CHOSEN)
        yield _Point(MappingProxyType(bits), cost.per_microbatch(bits), loss)


def _thinned(front: Sequence[_Point], most: int) -> Sequence[_Point]:
    """At most so many points of a front, evenly, its ends among them."""
    if len(front) <= max(2, most):
        return front
    last, parts = len(front) - 1, max(2, most) - 1
    return [front[round(i * last / parts)] for i in range(parts + 1)]
