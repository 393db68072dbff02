"""Choose the rates of a run for a wanted error or cost in loss, and check the cost.

`TransformQuant(bits='auto', nats=...)` is a goal. The rates are chosen in the last step of the warm-up, by a forecast.
So after some steps of training with them, a few batches are evaluated with and without codecs. If the loss is higher by
more than the goal and the standard error of the difference, all ranks raise the rates together: half a bit for each
factor of 2, since the cost is proportional to the square of the error.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lowbit.codecs import Codec, TransformQuant
from lowbit.codecs.transform_quant.rates import raised
from lowbit.pipeline import choose_rate
from lowbit.wire.messages import gather_json
from lowbit_run.train.boundaries import Codecs
from lowbit_run.train.evaluate import evaluated

if TYPE_CHECKING:
    from lowbit_run.train.evaluate import HeldOutEvaluation
    from lowbit_run.train.members import Members
    from lowbit_run.train.stages import Pipeline
    from lowbit_run.train.tied import TiedWeights

AFTER = (16, 32, 64)
"""Steps after the warm-up at which the cost is measured."""
BATCHES = 16
"""Most batches to evaluate. Each has the windows of a micro-batch, so that messages are as long as in training."""


def wanted_nats(codecs: Codecs) -> float | None:
    """Return the strictest goal in loss of activations; None without one."""
    goals = (goal.nats for (way, _), goal in codecs.goals.items() if way == "forward")
    return min((nats for nats in goals if nats is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The cost of the formats after `step` steps: mean difference in loss and its standard error, in nats.

    Attributes:
        bits: how much to raise the rates; 0: the goal is met, or the measurement is inconclusive.
        reached: False if the goal is missed even with the most bits.
    """

    step: int
    goal: float
    cost: float
    error: float
    bits: float
    reached: bool = True

    def __str__(self) -> str:
        cost = f"goal of {self.goal:g} nats: the codecs cost {self.cost:.2g} ± {self.error:.1g} after step {self.step}"
        if not math.isfinite(self.cost):
            return f"{cost}, which is inconclusive"
        if not self.bits:
            return f"{cost}, which meets it"
        if self.reached:
            return f"{cost}; rates raised by {self.bits:.2f} bits"
        return f"{cost} at the most bits: it cannot be met; training continues with these"


def judged(step: int, goal: float, differences: list[tuple[float, float]]) -> Check:
    """Make a check from the loss differences of batches, each with its number of tokens."""
    tokens = sum(count for _, count in differences)
    cost = sum(difference * count for difference, count in differences) / tokens if tokens else math.nan
    values = [difference for difference, _ in differences]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 and math.isfinite(cost) else 0.0
    missed = math.isfinite(cost) and cost - error > goal
    return Check(step=step, goal=goal, cost=cost, error=error, bits=math.log2(cost / goal) / 2 if missed else 0.0)


class Rates:
    """Chooses, checks and raises the rates of a run with goals; every rank makes one and calls the same methods."""

    def __init__(
        self, members: "Members", pipeline: "Pipeline", tied: "TiedWeights", evaluation: "HeldOutEvaluation"
    ) -> None:
        self._members, self._pipeline, self._tied, self._evaluation = members, pipeline, tied, evaluation
        self._warmup, self._chosen = members.config.codec_warmup_steps, False
        codecs, layout = pipeline.codecs, members.layout
        self._goals = {place: goal for place, goal in codecs.goals.items() if layout.crosses(place[1])}
        self._nats = wanted_nats(codecs)
        after = () if self._nats is None else AFTER
        self._checks = [step for steps in after if (step := self._warmup + steps) < members.config.run.steps]

    @contextmanager
    def choosing(self, step: int) -> Iterator[None]:
        """Choose the rates by the training step that runs within the block, if it is the last of the warm-up."""
        if self._chosen or not self._goals or step != self._warmup:
            yield
            return
        pipeline, boundaries, samples = self._pipeline, self._members.layout.stages - 1, {}
        modules = {stage: module for stage, module in pipeline.modules.items() if stage < boundaries}
        hooks = [module.register_forward_hook(partial(_note, samples, stage)) for stage, module in modules.items()]
        pipeline.look_ahead(False)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        timeout = self._members.config.run.timeout_seconds
        choose = partial(choose_rate, part=1 / boundaries, group=self._members.side, timeout=timeout)
        goals = self._goals.items()
        self._use({(way, i): choose(goal, *samples.get(i, ()), backward=way == "backward") for (way, i), goal in goals})
        pipeline.look_ahead(True)

    def chosen(self) -> dict[str, str]:
        """Return the formats with chosen rates, by boundary and direction; equal on all ranks."""
        return {f"boundary {i} {way}": repr(self._codec(way, i)) for way, i in sorted(self._goals) if self._chosen}

    def record(self) -> list[Any]:
        """Return the chosen rates for a checkpoint: direction, layer before the boundary, goal, and bits."""
        goals = self._goals.items() if self._chosen else ()
        return [[way, self._layer(i), str(goal), self._codec(way, i).bits] for (way, i), goal in goals]

    def restore(self, done: int, recorded: Any) -> str:
        """Take over the rates of a checkpoint after `done` steps; return an error message if some are missing.

        A boundary at another place takes the rate of the nearest one.
        """
        changed: dict[tuple[str, int], Codec] = {}
        for (way, i), goal in self._goals.items():
            layer = self._layer(i)
            try:
                same = [(layer - place, bits) for to, place, name, bits in recorded if (to, name) == (way, str(goal))]
                _, bits = min(same, key=lambda near: (abs(near[0]), near[0]))
                changed[way, i] = TransformQuant(bits=bits, step=goal.step)
            except (TypeError, ValueError):  # of what is missing, too
                missing = f"it does not record the rate of {goal} for boundary {i} {way} (after layer {layer})"
                allowed = f"allowed: a format with a rate, with --allow-change pipeline.{way}"
                return f"{missing}; {allowed}" if done >= self._warmup else ""
        if changed:
            self._use(changed)
        return ""

    def due(self, done: int) -> bool:
        """Return whether to measure the cost after `done` steps; the same on all ranks.

        A check is announced one step ahead: the step before it must not post receives, whose sizes may change.
        """
        if done + 1 in self._checks:
            self._pipeline.look_ahead(False)
        return done in self._checks

    def check(self, done: int) -> Check:
        """Measure the cost, and raise the rates of all ranks if it is too high."""
        pipeline = self._pipeline
        assert self._nats is not None
        check = judged(done, self._nats, self._differences())
        # Each pipeline has its own samples and so its own cost; the worst counts for all.
        costs = gather_json([check.cost, check.error, check.bits], self._members.side)
        cost, error, bits = max(costs, key=lambda stated: (stated[2], stated[0]))
        reached = True
        if bits:
            before = pipeline.codecs
            self._use({(way, i): raised(self._codec(way, i), bits) for way, i in self._goals})
            reached = pipeline.codecs != before
        pipeline.look_ahead(True)
        return Check(step=done, goal=self._nats, cost=cost, error=error, bits=bits, reached=reached)

    def _use(self, changed: Mapping[tuple[str, int], Codec]) -> None:
        """Use other codecs at some boundaries, by direction and boundary."""
        pipeline, self._chosen = self._pipeline, True
        forward, backward = (
            tuple(changed.get((way, i), codec) for i, codec in enumerate(getattr(pipeline.codecs, way)))
            for way in ("forward", "backward")
        )
        pipeline.use_codecs(Codecs(forward=forward, backward=backward), keep_state=True)

    def _codec(self, way: str, boundary: int) -> TransformQuant:
        return getattr(self._pipeline.codecs, way)[boundary]

    def _layer(self, boundary: int) -> int:
        return self._members.layout.layers_of(boundary)[-1]

    def _differences(self) -> list[tuple[float, float]]:
        """Return each batch's loss increase by codecs, in nats, and its tokens; the same on all ranks of a pipeline."""
        data, rows = self._members.prepared.data, self._members.config.rows
        windows = data.held_out if len(data.held_out) >= rows else data.train
        if not (batches := min(BATCHES, len(windows) // rows)):
            return []
        with self._tied.exact(windows.batch(evaluated(windows, batch=rows, batches=batches))[0]):
            exact, coded = (
                self._evaluation.sums(windows, batch=rows, batches=batches, codecs=codecs)
                for codecs in (None, self._pipeline.codecs.forward)
            )
        pairs = [(float(a[0]), float(b[0]), float(a[1])) for a, b in zip(exact, coded, strict=True)]
        return [((b - a) / count, count) for a, b, count in pairs if count]


def _note(samples: dict[int, list[Tensor]], stage: int, module: nn.Module, args: Any, x: Tensor) -> None:
    """Keep a stage's activations of the first micro-batch and, once it has come, their gradient."""
    if stage not in samples:
        samples[stage] = kept = [x.detach().clone()]
        if x.requires_grad:
            x.register_hook(lambda gradient: kept.append(gradient.detach().clone()) if len(kept) == 1 else None)
