"""`lowbit plan memory --by layer`: what is kept of each layer of each stage, with checkpointing among the choices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowbit.activations.layer_plan import LayerChoice, LayerPlan, layers_of
from lowbit.plan.budget import StageCost, beside_autograd
from lowbit.plan.layers import (
    CHOICES,
    SLOWER,
    StepCosts,
    choice_errors,
    combinations,
    layer_settings,
    measure_layers,
    with_errors,
)
from lowbit.report import Row
from lowbit.train.activations import planned_settings
from lowbit.train.model import next_token_loss

if TYPE_CHECKING:
    from lowbit.plan.memory import MemorySettings

LOW_BIT = LayerChoice(norm=8, mlp=4, linear=4)
_MOST = 40_000  # combinations of the stages of a rank


@dataclass(frozen=True, kw_only=True)
class _Option:
    """A choice for all layers of a stage.

    Args:
        held: bytes of a micro-batch from its forward to its backward. extra: the most beyond that while it runs.
    """

    choices: tuple[LayerChoice, ...]
    held: int
    extra: int
    seconds: float
    error: float


def rows_by_layer(settings: MemorySettings, budget: int | None) -> tuple[LayerPlan, list[Row]]:
    """Measure, and choose for every layer; the plan and a row for each stage, as `lowbit.plan.memory.measure` has them.

    Raises:
        ValueError: a budget or an error that nothing meets, with the least that would do.
    """
    from lowbit.plan.stages import StageMeter, sample_model

    held, layout, meter = settings.held, settings.layout, StageMeter(settings)
    # Between a backward's two passes a checkpointed layer holds what it has computed again.
    choices = [choice for choice in CHOICES if not (held.splits and choice.checkpoint)]
    model, loss = sample_model(settings)
    errors = choice_errors(model, loss, choices, group=settings.group)
    del model
    kinds: dict[tuple[bool, bool], StepCosts] = {}
    pipeline: list[StageCost] = []
    costs: list[StepCosts] = []
    made_for: dict[str, object] = {}
    for stage in range(layout.stages):
        kind = (stage == 0, stage == layout.stages - 1)
        if kind not in kinds:
            module = meter.module(2, *kind)
            made_for = layer_settings(next(iter(layers_of(module).values())))
            ids, inputs = meter.batch(module)

            def step(module=module, ids=ids, inputs=inputs, last=kind[1]) -> None:
                output = module(inputs)
                if last:
                    next_token_loss(output, ids).backward()
                else:
                    output.backward(torch.ones_like(output))

            measured = measure_layers(module, step, choices=choices, group=settings.group, repeats=settings.repeats)
            kinds[kind] = with_errors(measured, errors)
        costs.append(kinds[kind])
        pipeline.append(meter.stage(layout, stage).cost)
    options = [_options(costs[s], len(layout.layers_of(s)), settings.max_error) for s in range(layout.stages)]
    low = [_option(costs[s], (LOW_BIT,) * len(layout.layers_of(s))) for s in range(layout.stages)]
    ranks = {rank: sorted(moments[0].held) for rank, moments in held.moments.items()}

    def device_bytes(rank: int, chosen: Sequence[_Option]) -> int:
        fixed = sum(pipeline[stage].fixed for stage in ranks[rank])
        most = 0
        for moment in held.moments[rank]:
            kept = sum(moment.held[s] * option.held for s, option in zip(ranks[rank], chosen, strict=True))
            most = max(most, kept + beside_autograd(held, moment, pipeline))
        return fixed + most + max(option.extra for option in chosen)

    limit = budget or max(device_bytes(rank, [low[s] for s in stages]) for rank, stages in ranks.items())
    best: dict[int, _Option] = {}
    used: dict[int, int] = {}
    least: dict[int, int] = {}
    for rank, stages in ranks.items():
        each = int(_MOST ** (1 / len(stages)))
        every = [
            (device_bytes(rank, chosen), chosen)
            for chosen in itertools.product(*(_thinned(options[s], each) for s in stages))
        ]
        least[rank] = min(size for size, _ in every)
        fit = [one for one in every if one[0] <= limit]
        if fit:
            fastest = min(_total(chosen) for _, chosen in fit)
            fast = [one for one in fit if _total(one[1]) <= fastest + SLOWER * abs(fastest)]
            used[rank], chosen = min(fast, key=lambda one: (round(max(o.error for o in one[1]), 6), one[0]))
            best |= dict(zip(stages, chosen, strict=True))
    if max(least.values()) > limit:
        worst = max(least, key=lambda rank: least[rank])
        raise ValueError(
            f"budget is {limit:,} bytes; allowed: at least {least[worst]:,}, which rank {worst} needs with max_error "
            f"{settings.max_error}, or a larger max_error"
        )
    made_for |= planned_settings(settings.recipe, layout, settings.vocab)
    made_for |= {"weights": settings.weights, "optimizer": settings.optimizer}
    plan = LayerPlan(
        stages=tuple(best[stage].choices for stage in range(layout.stages)), group=settings.group, made_for=made_for
    )
    return plan, [
        {
            "stage": stage,
            "rank": held.rank_of(stage),
            "layers": len(best[stage].choices),
            "held": held.peak(stage),
            "choices": _described(best[stage].choices),
            "kept_bytes": best[stage].held * held.peak(stage),
            "extra_bytes": best[stage].extra,
            "fixed_bytes": pipeline[stage].fixed,
            "device_bytes": used[held.rank_of(stage)],
            "seconds": best[stage].seconds,
            "low_bit_seconds": low[stage].seconds,
            "error": best[stage].error,
            "budget": limit,
            "least": max(least.values()),
        }
        for stage in range(layout.stages)
    ]


def _option(costs: StepCosts, choices: tuple[LayerChoice, ...]) -> _Option:
    kept = costs.held(choices)
    return _Option(
        choices=choices, held=kept, extra=costs.peak(choices) - kept, seconds=costs.step_seconds(choices),
        error=costs.error(choices),
    )  # fmt: skip


def _options(costs: StepCosts, layers: int, max_error: float) -> list[_Option]:
    """Choices for a stage that err little enough, fewest bytes first."""
    every = [_option(costs, choices) for choices in combinations(costs, layers)]
    exact = [option for option in every if option.error <= max_error]
    if not exact:
        raise ValueError(
            f"max_error is {max_error}; allowed: at least {min(option.error for option in every):.4f} with these choices"
        )
    return sorted(exact, key=lambda option: (option.held + option.extra, option.seconds))


def _thinned(options: list[_Option], most: int) -> list[_Option]:
    """At most so many, those that others beat in bytes, seconds and error left out."""
    front: list[_Option] = []
    for one in options:
        if not any(
            o.held <= one.held and o.extra <= one.extra and o.seconds <= one.seconds and o.error <= one.error
            for o in front
        ):
            front.append(one)
    if len(front) <= most:
        return front
    return [front[round(i * (len(front) - 1) / max(most - 1, 1))] for i in range(most)]


def _total(chosen: Sequence[_Option]) -> float:
    return sum(option.seconds for option in chosen)


def _described(choices: Sequence[LayerChoice]) -> str:
    return "; ".join(f"{count} x {choice}" for choice, count in Counter(choices).items())
