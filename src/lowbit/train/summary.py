"""The summary of a run."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.train.config import TrainConfig
from lowbit.train.layout import PipelineLayout
from lowbit.train.metrics import StepMetrics

_LAST = 10  # steps over which the final training loss is averaged


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run, as `summary.json` holds it.

    All values but `steps_here` and `round_trip_seconds` describe the whole run, as if it had never stopped: a resumed
    run takes earlier steps and evaluations from its folder, and a repeated step counts once.

    Attributes:
        steps: of the whole run; steps_here: those of this call (fewer after a resume).
        loss: mean training loss of the last 10 steps, in nats; None without steps.
        held_out_loss: with float32 at the boundaries; None without held-out text.
        held_out_loss_codecs: with the configured codecs at the boundaries; None also with a single stage.
        exact_match, exact_match_codecs: share of the held-out samples that are answered right, in the same two ways;
            None without samples. exact_match_before, held_out_loss_before: the same before training.
        tokens_per_second, seconds_per_step: of the median step, leaving out the warm-up and the step after it if others
            remain.
        bits_forward, bits_backward, bits_gradients, bytes_per_step, compute_seconds, codec_seconds, wait_seconds: means
            over the same steps, as in `StepMetrics`.
        bytes_activations: as in `StepMetrics`.
        bytes_sent: by all ranks, in all steps and evaluations, and otherwise by this call.
        bytes_saved, seconds: of all steps.
        parts: of `bytes_sent`: those of `StepMetrics`, "evaluation", "saving the model", "link probes", "checkpoints"
            (read to resume), "weights for replicas". Only steps and evaluations include earlier calls.
        boundary, forward, backward: kind and formats of the boundaries; ranks, stages, schedule: the pipeline.
        model: folder of the trained model; None if it was not saved.
        chosen: formats that the warm-up chose, in full, by boundary, direction and tensor, such as "boundary 0
            forward, tensor 0, width 256".
        changes: settings that a resume changed: step, key, before and after, oldest first.
        formats: choices of `pipeline.forward = "auto"`, each as `lowbit.train.auto.FormatChoice`.
        round_trip_seconds: longest between neighbours of a pipeline, measured at the start; None on one rank.
    """

    steps: int
    steps_here: int
    loss: float | None
    held_out_loss: float | None
    held_out_loss_codecs: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    bits_forward: float | None
    bits_backward: float | None
    bits_gradients: float | None
    bytes_per_step: float
    compute_seconds: float
    codec_seconds: float
    wait_seconds: float
    bytes_activations: int | None
    bytes_sent: int
    bytes_saved: int
    seconds: float
    boundary: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    ranks: int
    stages: int
    schedule: str
    model: str | None
    chosen: dict[str, str] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)
    round_trip_seconds: float | None = None
    exact_match: float | None = None
    exact_match_codecs: float | None = None
    exact_match_before: float | None = None
    held_out_loss_before: float | None = None
    formats: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)


def summarize(
    config: TrainConfig,
    layout: PipelineLayout,
    history: Sequence[StepMetrics],
    losses: dict[str, float],
    *,
    model: Path | None,
    chosen: dict[str, str],
    here: int | None = None,
    outside: Sequence[Mapping[str, int]] = (),
    changes: Sequence[dict[str, Any]] = (),
    round_trip: float | None = None,
    before: Mapping[str, float] | None = None,
    formats: Sequence[dict[str, Any]] = (),
) -> Summary:
    """Summarize a run with these steps and held-out scores, at the end and `before` the first step.

    Args:
        here: steps of this call; None: all. outside: bytes sent outside of steps, by part.
    """
    # Imported here: it loads PyTorch, which reading a summary does not need.
    from lowbit.train.boundaries import backward_formats

    settled, before = _settled(config, history, formats[-1]["step"] if formats else 0), before or {}
    seconds = statistics.median(m.seconds for m in settled) if settled else None
    means: dict[str, Any] = {name: _mean(settled, name) for name in ("bits_forward", "bits_backward", "bits_gradients")}
    means |= {name: _mean(settled, name) or 0.0 for name in ("compute_seconds", "codec_seconds", "wait_seconds")}
    totals: dict[str, Any] = {name: sum(getattr(m, name) for m in history) for name in ("bytes_saved", "seconds")}
    parts = Counter[str]()
    for each in (*(m.parts for m in history), *outside):
        parts.update(each)
    return Summary(
        steps=history[-1].step if history else config.run.steps, steps_here=len(history) if here is None else here,
        bytes_sent=sum(parts.values()), parts={name: nbytes for name, nbytes in parts.items() if nbytes},
        loss=statistics.fmean(m.loss for m in history[-_LAST:]) if history else None,
        held_out_loss=losses.get("held_out_loss"), held_out_loss_codecs=losses.get("held_out_loss_codecs"),
        tokens_per_second=config.data.batch * config.data.sequence / seconds if seconds else None,
        seconds_per_step=seconds, bytes_per_step=_mean(settled, "bytes_sent") or 0.0,
        bytes_activations=history[-1].bytes_activations if history else None,
        boundary=config.pipeline.boundary, forward=config.pipeline.forward, backward=backward_formats(config.pipeline),
        ranks=layout.ranks, stages=layout.stages, schedule=config.pipeline.schedule,
        model=None if model is None else str(model), chosen=chosen, changes=list(changes),
        round_trip_seconds=round_trip,
        exact_match=losses.get("exact_match"), exact_match_codecs=losses.get("exact_match_codecs"),
        exact_match_before=before.get("exact_match"), held_out_loss_before=before.get("held_out_loss"),
        formats=list(formats), **means, **totals,
    )  # fmt: skip


def read_summary(path: Path) -> Summary:
    """Read the summary that a run wrote."""
    return from_json(json.loads(path.read_text(encoding="utf-8")))


def from_json(values: Mapping[str, Any]) -> Summary:
    """Make a summary from JSON values that `dataclasses.asdict` produced."""
    return Summary(**{**values, **{key: tuple(values[key]) for key in ("forward", "backward")}})


def _settled(config: TrainConfig, history: Sequence[StepMetrics], chosen: int) -> Sequence[StepMetrics]:
    """Return the steps after the warm-up, the last choice of formats and the step that sets them up, or else all."""
    warmup = config.codec_warmup_steps if config.pipeline.boundary == "lowbit" else 0
    after = [m for m in history if m.step > max(warmup, chosen)]
    return after[1:] or after or history


def _mean(history: Sequence[StepMetrics], name: str) -> float | None:
    values = [getattr(m, name) for m in history]
    return None if not values or None in values else statistics.fmean(values)
