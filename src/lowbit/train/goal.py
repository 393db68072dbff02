"""Check a goal in loss after the warm-up, and raise the rates of formats that cost more.

`TransformQuant(bits="auto", nats=...)` chooses its rates by a forecast. So after some steps of training with them, a
few batches are evaluated with and without codecs. If the loss is higher by more than the goal and the standard error
of the difference, all ranks raise the rates together: half a bit for each factor of 2, since the cost is proportional
to the square of the error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.codecs import Codec, StatefulCodec
from lowbit.train.evaluate import evaluated
from lowbit.wire.messages import gather_json

if TYPE_CHECKING:
    from lowbit.train.trainer import Trainer

AFTER = (16, 32, 64)
"""Steps after the warm-up at which the cost is measured."""
BATCHES = 16
"""Most batches to evaluate. Each has the windows of a micro-batch, so that messages are as long as in training."""


def wanted_nats(codecs: Iterable[Codec]) -> float | None:
    """Return the strictest goal in loss among codecs; None without a goal."""
    goals = (codec.wanted_nats for codec in codecs if isinstance(codec, StatefulCodec) and not codec.settled)
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


class Goal:
    """Checks the goal of a run; every rank makes one and calls the same methods."""

    def __init__(self, trainer: Trainer, nats: float) -> None:
        self._trainer, self._nats = trainer, nats
        warmup, steps = trainer.config.codec_warmup_steps, trainer.config.run.steps
        self._steps = [warmup + after for after in AFTER if warmup + after < steps]

    def due(self, done: int) -> bool:
        """Return whether to measure the cost after `done` steps; the same on all ranks.

        A check is announced one step ahead: the step before it must not post receives, whose sizes may change.
        """
        if done + 1 in self._steps:
            self._trainer.pipeline.look_ahead(False)
        return done in self._steps

    def check(self, done: int) -> Check:
        """Measure the cost, and raise the rates of all ranks if it is too high."""
        trainer = self._trainer
        own = judged(done, self._nats, self._differences())
        # Each pipeline has its own codecs and so its own cost; the worst counts for all.
        costs = gather_json([own.cost, own.error, own.bits], trainer.side)
        cost, error, bits = max(costs, key=lambda each: (each[2], each[0]))
        reached = True
        if bits:
            before = trainer.chosen()
            trainer.pipeline.raise_rates(bits)
            reached = trainer.chosen() != before
        trainer.pipeline.look_ahead(True)
        return Check(step=done, goal=self._nats, cost=cost, error=error, bits=bits, reached=reached)

    def _differences(self) -> list[tuple[float, float]]:
        """Return each batch's loss increase by codecs, in nats, and its tokens; the same on all ranks of a pipeline."""
        trainer, data, rows = self._trainer, self._trainer.prepared.data, self._trainer.config.rows
        windows = data.held_out if len(data.held_out) >= rows else data.train
        if not (batches := min(BATCHES, len(windows) // rows)):
            return []
        with trainer.tied.exact(windows.batch(evaluated(windows, batch=rows, batches=batches))[0]):
            exact, coded = (
                trainer.evaluation.sums(windows, batch=rows, batches=batches, codecs=codecs)
                for codecs in (None, trainer.pipeline.codecs.forward)
            )
        pairs = [(float(a[0]), float(b[0]), float(a[1])) for a, b in zip(exact, coded, strict=True)]
        return [((b - a) / count, count) for a, b, count in pairs if count]
