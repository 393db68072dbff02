"""`lowbit plan memory --by layer`: what is kept of each layer of each stage, with checkpointing among the choices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lowbit.activations.layer_plan import LayerChoice, LayerPlan, layers_of
from lowbit.plan.budget import beside_autograd
from lowbit.plan.layers import (
    CHOICES,
    SLOWER,
    Prediction,
    StepCosts,
    choice_errors,
    layer_settings,
    measure_layers,
    predictions,
    with_errors,
)
from lowbit.report import Row
from lowbit.train.activations import planned_settings
from lowbit.train.model import next_token_loss

if TYPE_CHECKING:
    from lowbit.plan.memory import MemorySettings
    from lowbit.plan.stages import StageMeter

LOW_BIT = LayerChoice(norm=8, mlp=4, linear=4)
_MOST = 20_000  # combinations of the stages of a rank


def rows_by_layer(settings: MemorySettings, budget: int | None) -> tuple[LayerPlan, list[Row]]:
    """Measure, and choose for every layer; the plan and a row for each stage, as `lowbit.plan.memory.measure` has them.

    Raises:
        ValueError: a budget or an error that nothing meets, with the least that would do.
    """
    stages = _Stages(settings)
    ranks = {rank: sorted(moments[0].held) for rank, moments in settings.held.moments.items()}
    low = {s: stages.predict(s, LOW_BIT) for s in stages.numbers}
    limit = budget or max(stages.device_bytes([low[s] for s in mine], rank) for rank, mine in ranks.items())
    best: dict[int, Prediction] = {}
    used: dict[int, int] = {}
    least: dict[int, int] = {}
    for rank, mine in ranks.items():
        each = int(_MOST ** (1 / len(mine)))
        fronts = (_thinned(stages.predictions(s), each) for s in mine)
        every = [(stages.device_bytes(chosen, rank), chosen) for chosen in itertools.product(*fronts)]
        least[rank] = min(size for size, _ in every)
        fit = [one for one in every if one[0] <= limit]
        if fit:
            most = min(_seconds(chosen) for _, chosen in fit)
            fast = [one for one in fit if _seconds(one[1]) <= most + SLOWER * abs(most)]
            used[rank], chosen = min(fast, key=lambda one: (round(max(o.error for o in one[1]), 6), one[0]))
            best |= dict(zip(mine, chosen, strict=True))
    if (most := max(least.values())) > limit:
        raise ValueError(
            f"budget is {limit:,} bytes; allowed: at least {most:,}, which rank {max(least, key=least.__getitem__)} "
            f"needs with max_error {settings.max_error}"
        )
    chosen = tuple(best[stage].choices for stage in stages.numbers)
    plan = LayerPlan(stages=chosen, group=settings.group, made_for=stages.made_for)
    held = settings.held
    return plan, [
        {
            "stage": stage,
            "rank": held.rank_of(stage),
            "layers": len(best[stage].choices),
            "held": held.peak(stage),
            "choices": described(best[stage].choices),
            "kept_bytes": best[stage].held * held.peak(stage),
            "extra_bytes": best[stage].peak - best[stage].held,
            "fixed_bytes": stages.pipeline[stage].fixed,
            "device_bytes": used[held.rank_of(stage)],
            "seconds": best[stage].seconds,
            "low_bit_seconds": low[stage].seconds,
            "error": best[stage].error,
            "budget": limit,
            "least": most,
        }
        for stage in stages.numbers
    ]


class _Stages:
    """The stages of a pipeline, measured on two layers each.

    Attributes:
        numbers: of the stages. pipeline: their fixed bytes, and those that the pipeline holds. made_for: what a plan
            records.
    """

    def __init__(self, settings: MemorySettings) -> None:
        from lowbit.plan.stages import StageMeter, sample_model

        self.settings, self.held, self.layout = settings, settings.held, settings.layout
        self.numbers = range(self.layout.stages)
        # Between a backward's two passes a checkpointed layer holds what it has computed again.
        self._choices = [choice for choice in CHOICES if not (self.held.splits and choice.checkpoint)]
        self._errors = choice_errors(*sample_model(settings), self._choices, group=settings.group)
        meter = StageMeter(settings)
        self._costs: dict[tuple[bool, bool], StepCosts] = {}
        for kind in dict.fromkeys(map(self._kind, self.numbers)):
            self._costs[kind] = self._measured(meter, kind)
        self.pipeline = [meter.stage(self.layout, stage).cost for stage in self.numbers]
        layer = next(iter(layers_of(meter.module(2, True, True)).values()))
        self.made_for = layer_settings(layer) | planned_settings(settings.recipe, self.layout, settings.vocab)
        self.made_for |= {"weights": settings.weights}

    def predictions(self, stage: int) -> list[Prediction]:
        """What can be chosen for a stage."""
        layers = len(self.layout.layers_of(stage))
        return predictions(self._costs[self._kind(stage)], layers, max_error=self.settings.max_error)

    def predict(self, stage: int, choice: LayerChoice) -> Prediction:
        """One choice for all layers of a stage."""
        return self._costs[self._kind(stage)].predict(((choice, len(self.layout.layers_of(stage))),))

    def device_bytes(self, chosen: Sequence[Prediction], rank: int) -> int:
        """Bytes of a rank at its worst moment: fixed, held, of the pipeline, and what a stage takes while it runs."""
        moments = self.held.moments[rank]
        stages = sorted(moments[0].held)
        most = max(
            sum(moment.held[s] * one.held for s, one in zip(stages, chosen, strict=True))
            + beside_autograd(self.held, moment, self.pipeline)
            for moment in moments
        )
        return sum(self.pipeline[s].fixed for s in stages) + most + max(one.peak - one.held for one in chosen)

    def _kind(self, stage: int) -> tuple[bool, bool]:
        return stage == 0, stage == self.layout.stages - 1

    def _measured(self, meter: StageMeter, kind: tuple[bool, bool]) -> StepCosts:
        module = meter.module(2, *kind)
        ids, inputs = meter.batch(module)

        def step() -> None:
            output = module(inputs)
            if kind[1]:
                next_token_loss(output, ids).backward()
            else:
                output.backward(torch.ones_like(output))

        settings = self.settings
        costs = measure_layers(module, step, choices=self._choices, group=settings.group, repeats=settings.repeats)
        return with_errors(costs, self._errors)


def described(choices: Sequence[LayerChoice]) -> str:
    """The choices in words."""
    return "; ".join(f"{count} x {choice}" for choice, count in Counter(choices).items())


def _thinned(options: list[Prediction], most: int) -> list[Prediction]:
    """At most so many, without those that others beat in every respect, fewest bytes first."""
    front: list[Prediction] = []
    for one in sorted(options, key=lambda option: (option.peak, option.seconds)):
        mine = (one.held, one.peak - one.held, one.seconds, one.error)
        if not any(
            all(a <= b for a, b in zip((o.held, o.peak - o.held, o.seconds, o.error), mine, strict=True)) for o in front
        ):
            front.append(one)
    if len(front) <= most:
        return front
    return [front[round(i * (len(front) - 1) / max(most - 1, 1))] for i in range(most)]


def _seconds(chosen: Sequence[Prediction]) -> float:
    return sum(one.seconds for one in chosen)
