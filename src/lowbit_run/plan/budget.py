"""Chooses what the stages of a pipeline save within the memory of each device.

Late stages mostly hold fewer micro-batches, and can afford more bits (AGoQ, arXiv 2605.00539, which describes neither
its search nor its measure of loss; ours are below).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

from lowbit.activations.layer_plan import PLANNED, LayerPlan
from lowbit.codecs.checks import check_int
from lowbit_run.simulate.held import InFlight, Moment, undominated

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16)
SLOWER = 0.01
"""Plans whose seconds differ by less count as equally fast, because measured times are not more exact."""
_MOST_STAGES = 18  # of a rank; combinations of its stages' options: at most 2^18

Bits = Mapping[str, int]
Sensitivities = Mapping[str, Mapping[int, float]]
"""Relative error of the gradient by layer type and bits: |g' - g| / |g| if only this type has these bits."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Bytes of a pipeline stage: those that autograd saves, and those that the stage itself holds.

    Args:
        layers: decoder layers of the stage, which determine its share of the gradient's error.
        saved: of one micro-batch, by layer type and bits (16: unchanged).
        other: of one micro-batch, independent of the bits: attention, embedding, the loss.
        output: of one micro-batch: the stage's output, held from its forward until its backward.
        gradients: of one micro-batch between backward's passes for the inputs and for the weights (zero-bubble
            schedules): gradients of the layers' outputs, never quantized.
        early: of one micro-batch: the part of `other` and `output` that the pass for the inputs already frees.
        inputs: of one micro-batch between the same passes: gradients of the inputs.
        received: of one micro-batch from its forward to its backward: the stage's input.
        fixed: at all times: weights, gradients, optimizer.

    Raises:
        TypeError, ValueError: negative numbers, `early` larger than `other` and `output`, unknown layer types.
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
        for field in fields(self):
            if field.name != "saved":
                check_int(field.name, getattr(self, field.name), 0, 1 << 62)
        if self.early > self.other + self.output:
            raise ValueError(
                f"early is {self.early}; allowed: at most other and output together ({self.other + self.output})"
            )
        if set(self.saved) != set(PLANNED) or not all(self.saved.values()):
            raise ValueError(f"saved has {', '.join(self.saved)}; allowed: bytes by bits for {', '.join(PLANNED)}")

    def per_microbatch(self, bits: Bits) -> int:
        """Bytes that autograd saves of one micro-batch with these bits."""
        return self.other + sum(self.saved[kind][bits[kind]] for kind in PLANNED)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The choice for a stage.

    Args:
        stage, rank: its number, and that of its rank. layers: number of its layers. bits: by layer type.
        held: micro-batches that it holds at its peak.
        saved_bytes: bytes that autograd has saved for them at that time.
        error: its part of the gradient's relative error; the squares over all stages add up to that of the plan.
    """

    stage: int
    rank: int
    layers: int
    bits: Bits
    held: int
    saved_bytes: int
    error: float


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bits for every stage of a pipeline, with their costs.

    Args:
        stages: in order.
        device_bytes: by rank, predicted: `StageCost.fixed`, and what autograd and the pipeline hold at the rank's worst
            moment.
        limit: bytes that every device has for them.
        least: the smallest limit that suffices, with the fewest bits everywhere.
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

    @property
    def bits(self) -> LayerPlan:
        """The bits as a `LayerPlan`, which has policies for `compress_saved_` and can be written to a file."""
        layers = [stage.layers for stage in self.stages]
        return LayerPlan.by_stage([stage.bits for stage in self.stages], layers=layers, group=self.group)


def plan_bits(
    held: InFlight, costs: Sequence[StageCost], sensitivities: Sensitivities, *, device_bytes: int, group: int = 64
) -> MemoryPlan:
    """Choose bits for each stage and layer type: the least error of the gradient within each device's memory.

    The loss of a choice is the sum over stages and layer types of squared relative gradient errors. Each type's error
    is measured on the whole model and divided among the stages by their layers: errors of separate roundings are
    independent. For each stage only combinations that no other beats in bytes and error are kept. Of their products
    over a rank's stages (thinned evenly above 2^18) the one with the least error that fits is chosen, and among equals
    the one with the fewest bytes. Candidates do not depend on the budget, so more bytes never mean more error, and the
    same input always gives the same plan.

    Args:
        held: micro-batches in flight, from `in_flight`.
        costs: of every stage, in order.
        sensitivities: relative gradient error by type and bits; at 16 bits it is 0 and may be left out.
        device_bytes: of one device, for all that `StageCost` names. Leave room for the rest: short-lived tensors, such
            as a layer's decoded activations; payloads on their way; and the last stage's outputs, if the schedule's
            `step` returns them.
        group: elements that share a scale, for the policies.

    Raises:
        ValueError: numbers of stages that differ, more than 18 stages on a rank, a width without sensitivity, or a
            budget below the smallest that suffices, which the text names.
    """
    check_int("device_bytes", device_bytes, 1, 1 << 62)
    if len(costs) != len(held.stages):
        raise ValueError(f"costs has {len(costs)} stages; allowed: {len(held.stages)}, as held")
    layers = sum(cost.layers for cost in costs)
    options = [_options(cost, _errors(cost, sensitivities), layers) for cost in costs]
    chosen = fastest_fitting(
        held, costs, options, device_bytes=device_bytes, least_with="with the fewest bits everywhere"
    )
    stages = tuple(
        StagePlan(
            stage=stage, rank=held.rank_of(stage), layers=costs[stage].layers, bits=option.what, held=held.peak(stage),
            saved_bytes=held.peak(stage) * option.held, error=math.sqrt(option.loss),
        )
        for stage, option in enumerate(chosen.options)
    )  # fmt: skip
    return MemoryPlan(
        stages=stages, device_bytes=chosen.device_bytes, limit=device_bytes, least=chosen.least, group=group
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One of the choices for a stage: bits, or choices for its layers (`what`), and what they cost for a micro-batch.

    `held`: bytes between forward and backward. `extra`: further bytes while it runs. `seconds`: of both passes. `loss`:
    squared error of the gradient, the stage's share of the model's.
    """

    what: Any
    held: int
    loss: float
    extra: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The option of each stage, bytes by rank, and the smallest number of bytes that suffices."""

    options: tuple[Option, ...]
    device_bytes: Mapping[int, int]
    least: int


def fastest_fitting(
    held: InFlight, costs: Sequence[StageCost], options: Sequence[Sequence[Option]], *, device_bytes: int,
    least_with: str,
) -> Chosen:  # fmt: skip
    """Choose an option for each stage: the fastest that fit into memory, and of equally fast ones the most exact.

    Args:
        options: of each stage; of equal ones the first counts. least_with: names the smallest option in the error.

    Raises:
        ValueError: more than 18 stages on a rank, or a budget below the smallest that suffices, which the text names.
    """
    ranks = {rank: _Rank(rank, held, costs, options) for rank in held.moments}
    worst = max(ranks, key=lambda rank: ranks[rank].least)
    if (least := ranks[worst].least) > device_bytes:
        raise ValueError(
            f"device_bytes is {device_bytes:,}; allowed: at least {least:,}, which rank {worst} needs "
            f"{least_with} ({ranks[worst].fixed:,} of them for weights, gradients and optimizer)"
        )
    best: dict[int, Option] = {}
    used: dict[int, int] = {}
    for rank, combinations in ranks.items():
        chosen, used[rank] = combinations.best(device_bytes)
        best |= chosen
    return Chosen(
        options=tuple(best[stage] for stage in sorted(best)), device_bytes=MappingProxyType(used), least=least
    )


def outside_autograd(held: InFlight, moment: Moment, costs: Sequence[StageCost], stages: Sequence[int] = ()) -> int:
    """Bytes that the pipeline holds for the micro-batches of a moment, minus those that autograd frees early.

    An output for the next stage of the same rank counts once, as its input. `stages`: to count; by default the rank's.
    """
    total = 0
    for s in stages or moment.held:
        cost, last = costs[s], s == len(costs) - 1
        output = 0 if held.stays(s) else cost.output
        # PyTorch keeps the gradients of outputs and inputs until the pass for the weights.
        between = cost.gradients - cost.early + cost.inputs + (0 if last else cost.output)
        total += moment.held[s] * (output + cost.received) + moment.halfway[s] * between
    return total


class _Rank:
    def __init__(
        self, rank: int, held: InFlight, costs: Sequence[StageCost], options: Sequence[Sequence[Option]]
    ) -> None:
        moments = held.moments[rank]
        self.stages = sorted(moments[0].held)
        if len(self.stages) > _MOST_STAGES:
            raise ValueError(f"held has {len(self.stages)} stages on a rank; allowed: up to {_MOST_STAGES}")
        most = int(2 ** (_MOST_STAGES / len(self.stages)) + 1e-9)
        self.fronts = [_front(options[stage], most) for stage in self.stages]
        self.fixed = sum(costs[stage].fixed for stage in self.stages)
        counts = torch.tensor([[moment.held[stage] for stage in self.stages] for moment in moments])
        outside = torch.tensor([outside_autograd(held, moment, costs) for moment in moments])
        places = (torch.arange(len(front)) for front in self.fronts)
        self.picked = torch.cartesian_prod(*places).view(-1, len(self.fronts))
        self.loss, self.seconds = self._each("loss").sum(1), self._each("seconds").sum(1)
        # A rank's memory is highest at one of its moments; integers are exact up to 2^63.
        self.bytes = ((self._each("held")[:, None, :] * counts[None]).sum(2) + outside).amax(1) + self.fixed
        self.bytes += self._each("extra").amax(1)
        self.least = int(self.bytes.min())

    def best(self, limit: int) -> tuple[dict[int, Option], int]:
        best = self.bytes <= limit
        fastest = float(self.seconds[best].min())
        best &= self.seconds <= fastest + SLOWER * abs(fastest)
        for values in (self.loss, self.bytes):  # ties in the first are settled by the second
            best &= values == values[best].min()
        index = int(best.nonzero()[0, 0])
        picked = self.picked[index].tolist()
        options = {s: front[i] for s, front, i in zip(self.stages, self.fronts, picked, strict=True)}
        return options, int(self.bytes[index])

    def _each(self, name: str) -> torch.Tensor:
        """The value of an attribute for every option, by combination and stage."""
        dtype = torch.int64 if name in ("held", "extra") else torch.float64
        values = [torch.tensor([getattr(option, name) for option in front], dtype=dtype) for front in self.fronts]
        return torch.stack([each[self.picked[:, i]] for i, each in enumerate(values)], dim=1)


def _errors(cost: StageCost, sensitivities: Sensitivities) -> Sensitivities:
    errors: dict[str, dict[int, float]] = {}
    for kind in PLANNED:
        known, widths = {16: 0.0, **sensitivities.get(kind, {})}, cost.saved[kind]
        if missing := [bits for bits in widths if bits not in known]:
            raise ValueError(
                f"sensitivities has no error for {kind!r} at {', '.join(map(str, missing))} bits; "
                f"allowed: an error for every width in saved ({', '.join(map(str, widths))})"
            )
        errors[kind] = {bits: known[bits] for bits in widths}
        for bits, error in errors[kind].items():
            if not 0 <= error < math.inf:
                raise ValueError(f"sensitivities is {error} for {kind!r} at {bits} bits; allowed: finite, at least 0")
    return errors


def _options(cost: StageCost, errors: Sensitivities, layers: int) -> list[Option]:
    share = cost.layers / layers if layers else 0.0
    options = []
    for chosen in itertools.product(*(sorted(cost.saved[kind]) for kind in PLANNED)):
        bits: dict[str, int] = dict(zip(PLANNED, chosen, strict=True))
        loss = share * sum(errors[kind][bits[kind]] ** 2 for kind in PLANNED)
        options.append(Option(what=MappingProxyType(bits), held=cost.per_microbatch(bits), loss=loss))
    # If bits make no difference, for example because a stage lacks the layer type, take the most.
    return sorted(options, key=lambda option: -sum(option.what.values()))


def _front(options: Sequence[Option], most: int) -> list[Option]:
    """The options that no other beats in every respect, fewest bytes first; at most `most`, evenly spaced."""
    front = undominated(options, lambda one: (one.held + one.extra, one.seconds, one.loss, one.held, one.extra))
    if len(front) <= max(2, most):
        return front
    last, parts = len(front) - 1, max(2, most) - 1
    return [front[round(i * last / parts)] for i in range(parts + 1)]
