"""Measures, predicts and makes choices for every layer of a model within a memory limit.

Layers are alike, so a few are measured once with each choice, and the peak of any combination is computed. Of a mixture
only one order counts: layers whose backward takes the most beyond what they keep come first, where the least is held.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowbit.activations.layer_plan import KEEP, LayerChoice, LayerPlan, layers_of
from lowbit_run.plan.budget import SLOWER
from lowbit_run.plan.measure import ORDER_OF_SUMS, StepTrace, compressed, gradients, relative_error, trace_step
from lowbit_run.simulate.held import undominated

Step = Callable[[], Any]
Runs = tuple[tuple[LayerChoice, int], ...]
"""Choices for layers in order, run-length encoded: each choice with the number of successive layers that have it."""

_BYTE, _SIX = "GroupInt(bits=8, group=64)", "GroupInt(bits=6, group=64)"
CHOICES = (
    KEEP,
    LayerChoice(norm=8, mlp=4, linear=4),
    LayerChoice(norm=8, mlp=8, linear=8),
    LayerChoice(checkpoint=True),
    LayerChoice(checkpoint=True, input=_BYTE),
    LayerChoice(checkpoint=True, input=_SIX),
    LayerChoice(checkpoint=True, input=_BYTE, norm=8, mlp=4, linear=4),
    LayerChoice(checkpoint=True, input=_BYTE, norm=8, mlp=8, linear=8),
)
"""What a plan may choose for a layer."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of a choice in one layer: bytes kept from its forward to its backward, and the most during each.

    The latter are beyond those at the forward's start and at the backward's end. `seconds`: of both, minus those of
    `KEEP`. `error`: squared relative error of the gradient.
    """

    kept: int
    forward: int
    backward: int
    seconds: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersPrediction:
    """Predicted costs of a step with these choices (`runs`), and the relative error of its gradient.

    `peak`: bytes of activations and temporaries. `held`: of a micro-batch between its forward and its backward.
    """

    runs: Runs
    peak: int
    held: int
    seconds: float
    error: float

    @property
    def choices(self) -> tuple[LayerChoice, ...]:
        """The choice of each layer."""
        return tuple(choice for choice, count in self.runs for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of a step that do not depend on the choices, and costs of a layer for each choice.

    Args:
        layers: by choice. before, between, after: the most bytes before the first layer, from the last layer's forward
            to its backward, and after the first layer's backward. start, end: bytes when a layer's forward begins and
            when its backward has ended. None of these includes what layers keep.
        end_of_forward: bytes after the last layer's forward.
        seconds: of a step in which all measured layers keep everything. measured: number of these layers.
    """

    layers: Mapping[LayerChoice, LayerCost]
    before: int
    start: int
    between: int
    end: int
    after: int
    end_of_forward: int
    seconds: float
    measured: int

    def predict(self, runs: Runs, *, held: int = 1) -> LayersPrediction:
        """Predicted costs of a step with these choices, with `held` micro-batches in flight."""
        kept, layers, seconds, squares = 0, 0, 0.0, 0.0
        most = max(self.before, self.after)
        keep = self.seconds / max(self.measured, 1)
        for choice, count in runs:
            cost = self.layers[choice]
            kept += cost.kept * (count - 1)  # of equal layers the last runs while the others hold most
            most = max(most, self.start + kept + cost.forward, self.end + kept + cost.backward)
            kept += cost.kept
            layers += count
            seconds += (keep + cost.seconds) * count
            squares += cost.error * count
        between = self.end_of_forward + kept
        return LayersPrediction(
            runs=runs, peak=max(most, self.between + kept) + (held - 1) * between, held=between, seconds=seconds,
            error=math.sqrt(squares / max(layers, 1)),
        )  # fmt: skip


def measure_layers(
    model: nn.Module, step: Step, *, choices: Sequence[LayerChoice] = CHOICES, group: int = 64,
    repeats: int = 3, device: torch.device | None = None,
) -> StepCosts:  # fmt: skip
    """Measure each choice in all layers of a model: bytes and seconds; `with_errors` adds errors of the gradient.

    Runs `repeats` + 2 steps for each choice; the fastest time counts.

    Args:
        model: in training mode, not compressed; unchanged afterwards, without gradients.
        step: runs forward and backward of one micro-batch.
        choices: to measure; `KEEP` is always among them.
    """
    layers = list(layers_of(model).values())
    choices = list(dict.fromkeys((KEEP, *choices)))
    plans = {choice: LayerPlan(stages=((choice,) * len(layers),), group=group) for choice in choices}
    traces: dict[LayerChoice, StepTrace] = {}
    times: dict[LayerChoice, list[float]] = {choice: [] for choice in choices}
    for choice in choices:
        with compressed(model, plans[choice]):
            step()  # gradients exist from now on, and kernels are compiled
            traces[choice] = trace_step(layers, step, device)
        model.zero_grad(set_to_none=True)
    for _, choice in itertools.product(range(repeats), choices):
        with compressed(model, plans[choice]):
            times[choice].append(seconds(step, device))
    model.zero_grad(set_to_none=True)
    extra = {choice: min(times[choice]) - min(times[KEEP]) for choice in choices}  # other programs only add time
    inner = len(layers) - 1  # the last layer, because the first may differ from the rest
    costs = {}
    for choice, trace in traces.items():
        there, back = trace.forward[inner], trace.backward[inner]
        costs[choice] = LayerCost(
            kept=back.start - back.end, forward=there.peak - there.start, backward=back.peak - back.end,
            seconds=extra[choice] / len(layers),
        )  # fmt: skip
    least = min(choices, key=lambda choice: traces[choice].peak)
    lean, kept = traces[least], costs[least].kept
    return StepCosts(
        layers=costs, before=lean.before.peak, start=lean.forward[inner].start - inner * kept,
        end=lean.backward[inner].end - inner * kept, between=lean.between.peak - len(layers) * kept,
        after=lean.after.peak, end_of_forward=lean.between.start - len(layers) * kept, seconds=min(times[KEEP]),
        measured=len(layers),
    )  # fmt: skip


def choose_layers(
    costs: StepCosts, layers: int, *, limit: int, max_error: float = 0.02, held: int = 1, made_for: Any = None,
    group: int = 64,
) -> LayerPlan:  # fmt: skip
    """Choose for each layer: the fastest plan whose peak fits and whose gradient errs at most `max_error`.

    Among plans whose seconds differ by less than 1 % of a step, the one with the least error is taken, and among equals
    the one with the lowest peak. Plans mix up to three choices.

    Args:
        costs: of one layer with each choice. layers: their number. held: micro-batches in flight at the peak.
        limit: bytes for activations and temporaries. max_error: relative error of the gradient.

    Raises:
        ValueError: nothing fits; the text names the smallest limit, or the smallest error, that would suffice.
    """
    every = predictions(costs, layers, held=held, max_error=max_error)
    if (least := min(one.peak for one in every)) > limit:
        raise ValueError(f"limit is {limit:,} bytes; allowed: at least {least:,} with max_error {max_error}")
    return LayerPlan(stages=(fastest(every, limit).choices,), group=group, made_for=made_for or {})


def fastest(every: Sequence[LayersPrediction], limit: int) -> LayersPrediction:
    """The fastest prediction whose peak is at most `limit`; at least one must be.

    Among those that differ by less than `SLOWER` it is the one with the least error, then the one with the lowest peak.
    """
    fit = [one for one in every if one.peak <= limit]
    most = min(one.seconds for one in fit)
    fast = [one for one in fit if one.seconds <= most + SLOWER * abs(most)]
    return min(fast, key=lambda one: (round(one.error, 6), one.peak))


def predictions(costs: StepCosts, layers: int, *, max_error: float, held: int = 1) -> list[LayersPrediction]:
    """All mixtures of up to three choices over the layers, each in its best order, with an error up to `max_error`.

    With many layers, not every number of them is tried. ValueError: all errors are larger; it names the smallest.
    """
    tried: dict[Runs, None] = {}
    cost = costs.layers
    numbers = {c: (k.kept, k.forward, k.backward, k.seconds, k.error) for c, k in cost.items()}
    useful = undominated(cost, numbers.__getitem__)
    step = max(1, layers // 16)
    for three in itertools.combinations(useful, min(3, len(useful))):
        ordered = sorted(three, key=lambda c: cost[c].kept - cost[c].backward)
        for cut in itertools.combinations_with_replacement([*range(0, layers, step), layers], len(ordered) - 1):
            ends = (0, *cut, layers)
            counts = [end - start for start, end in itertools.pairwise(ends)]
            tried[tuple((c, n) for c, n in zip(ordered, counts, strict=True) if n)] = None
    every = [costs.predict(runs, held=held) for runs in tried]
    exact = [one for one in every if one.error <= max_error]
    if not exact:
        least = min(one.error for one in every)
        raise ValueError(f"max_error is {max_error}; allowed: at least {least:.4f} with these choices")
    return exact


def plan_layers(
    model: nn.Module, step: Step, *, limit: int, max_error: float = 0.02, loss: Step | None = None,
    choices: Sequence[LayerChoice] = CHOICES, repeats: int = 3, device: torch.device | None = None,
) -> LayerPlan:  # fmt: skip
    """Measure a model and choose what each of its layers keeps, for `compress_saved_(model, plan)`.

    Args:
        model: in training mode, not compressed; unchanged afterwards, and without gradients.
        step: runs a micro-batch forward and returns its loss, the same at every call.
        limit: bytes for activations and temporaries, beyond weights, gradients and optimizer.
        max_error: largest relative error of the gradient.
        loss: a loss for that error, if `step` has dropout. choices, repeats, device: as in `measure_layers`.

    Raises:
        ValueError: no plan meets the limit or the error; the text names the smallest that would suffice.
    """
    if not model.training:
        raise ValueError("model is in evaluation mode, in which nothing is kept; allowed: model.train() first")
    layers = layers_of(model)
    costs = measure_layers(model, lambda: step().backward(), choices=choices, repeats=repeats, device=device)
    costs = with_errors(costs, choice_errors(model, loss or step, list(costs.layers)))
    made_for = layer_settings(next(iter(layers.values())))
    return choose_layers(costs, len(layers), limit=limit, max_error=max_error, made_for=made_for)


def layer_settings(layer: nn.Module) -> dict[str, Any]:
    """The facts about a layer that a plan records."""
    return {"layer": type(layer).__name__, "layer parameters": sum(p.numel() for p in layer.parameters())}


def choice_errors(
    model: nn.Module, loss: Step, choices: Sequence[LayerChoice], *, group: int = 64
) -> dict[LayerChoice, float]:
    """Relative error of the gradient with each choice in all layers; arguments as for `sensitivities`."""
    layers = len(layers_of(model))
    exact, errors = gradients(model, loss), {}
    for choice in choices:
        with compressed(model, LayerPlan(stages=((choice,) * layers,), group=group)):
            error = relative_error(gradients(model, loss), exact)
        errors[choice] = error if error > ORDER_OF_SUMS else 0.0
    return errors


def with_errors(costs: StepCosts, errors: Mapping[LayerChoice, float]) -> StepCosts:
    """Return the costs with these errors of the gradient, each for one choice in all layers."""
    layers = {choice: replace(cost, error=errors[choice] ** 2) for choice, cost in costs.layers.items()}
    return replace(costs, layers=layers)


def described(choices: Sequence[LayerChoice]) -> str:
    """The choices in words."""
    return "; ".join(f"{count} x {choice}" for choice, count in Counter(choices).items())


def seconds(step: Step, device: torch.device | None = None) -> float:
    """Seconds of a step. On a CPU these are CPU seconds of this process, so that other processes do not count."""
    on_gpu = device is not None and device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    step()
    if on_gpu:
        torch.cuda.synchronize(device)
    return clock() - start
