"""Metrics of a run: one line of JSON per step, curves for TensorBoard, and the summary at the end."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from lowbit import escape, files
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.layout import PipelineLayout
from lowbit_run.train.trackers import Trackers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


log = escape.logger(__name__)

EVALUATIONS = "evaluations.jsonl"
BOUNDARIES, TIED, GRADIENTS, COORDINATION = "boundaries", "tied embedding", "gradients", "coordination"
EVALUATION = "evaluation"
"""Names of parts of the traffic, which are also purposes of messages."""
_LAST = 10  # steps over which the final training loss is averaged


@dataclass
class Work:
    """Time and traffic of one step on this rank.

    Seconds of codecs include those of checksums. Bytes and elements count activations and their gradients, gradients
    sent to other pipelines (an all-reduce over W of them sends 2 (W - 1) / W elements for each element of the tensor),
    and a tied embedding's rows. Other bytes are for coordination, such as loss and counts.
    """

    forward_bytes: int = 0
    forward_elements: int = 0
    backward_bytes: int = 0
    backward_elements: int = 0
    compute_seconds: float = 0.0
    codec_seconds: float = 0.0
    checksum_seconds: float = 0.0
    wait_seconds: float = 0.0
    gradient_bytes: float = 0.0
    gradient_elements: float = 0.0
    tied_bytes: float = 0.0
    tied_elements: float = 0.0
    other_bytes: float = 0.0

    def add_traffic(self, other: Work) -> None:
        """Add the bytes and elements of another step."""
        for name, value in vars(other).items():
            if name.endswith(("_bytes", "_elements")):
                setattr(self, name, getattr(self, name) + value)

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of each part of the traffic that has any."""
        parts = {
            BOUNDARIES: self.forward_bytes + self.backward_bytes, TIED: self.tied_bytes, GRADIENTS: self.gradient_bytes,
            COORDINATION: self.other_bytes,
        }  # fmt: skip
        return {name: round(nbytes) for name, nbytes in parts.items() if nbytes}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, over all ranks.

    Attributes:
        step: number of optimizer steps done, including this one. Progress, `metrics.jsonl`, TensorBoard, evaluations,
            checkpoints, summaries and errors all count like this: "step 100" is the 100th.
        loss: mean over the batch, in nats. lr: learning rate. grad_norm: before clipping.
        tokens: of the whole batch.
        tokens_per_second: of the whole batch, over the whole step.
        bits_forward, bits_backward: bits sent for each element that crossed a boundary; None if nothing did.
        bits_gradients: the same for gradients between pipelines.
        bytes_sent: by all ranks to others, with checksums but without headers of Gloo and TCP. bytes_saved: by formats,
            compared with float32.
        parts: of `bytes_sent`: "boundaries" (both ways), "tied embedding" (its rows and their
            gradients, between both ends of a pipeline), "gradients" (between pipelines) and "coordination"
            (announcements, loss, counts).
        bytes_activations: peak of the saved activations, on the rank with most; None if none are compressed. Counted
            in the first step; all others have the same.
        seconds: of the step; compute_seconds, codec_seconds, wait_seconds: its parts, mean over the ranks.
        checksum_seconds: part of codec_seconds.
        links: bytes sent from one machine to another, by name ("0 to 2"). Machines are named by their first ranks.
        waiting: seconds of waiting by machine, mean over its ranks.
        rates: Mbit/s of links by name, as last measured before the step: at the start, and whenever `pipeline.forward =
            "auto"` or `run.connections` looks at them.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    bits_forward: float | None
    bits_backward: float | None
    bits_gradients: float | None
    bytes_sent: int
    bytes_saved: int
    bytes_activations: int | None = None
    seconds: float
    compute_seconds: float
    codec_seconds: float
    checksum_seconds: float = 0.0
    wait_seconds: float
    links: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


def bits(nbytes: float, elements: float) -> float | None:
    """Return the bits per element; None without elements."""
    return 8 * nbytes / elements if elements else None


def step_metrics(*, work: Work, ranks: int, tokens: int, seconds: float, **others: Any) -> StepMetrics:
    """Make metrics from the sums over all ranks; `others`: further fields of `StepMetrics`."""
    coded = work.forward_bytes + work.backward_bytes + work.gradient_bytes + work.tied_bytes
    elements = work.forward_elements + work.backward_elements + work.gradient_elements + work.tied_elements
    shares = {name: value / ranks for name, value in vars(work).items() if name.endswith("_seconds")}
    return StepMetrics(
        tokens=tokens, seconds=seconds, tokens_per_second=tokens / seconds,
        bits_forward=bits(work.forward_bytes, work.forward_elements),
        bits_backward=bits(work.backward_bytes, work.backward_elements),
        bits_gradients=bits(work.gradient_bytes, work.gradient_elements),
        bytes_sent=sum(work.parts.values()), bytes_saved=round(4 * elements - coded), parts=work.parts,
        **others, **shares,
    )  # fmt: skip


class Recorder:
    """Writes the metrics of a run; on rank 0 only.

    Args:
        folder: of the run. start: steps done before; later lines, which an earlier attempt wrote, are dropped.
        tensorboard: whether to write curves. trackers: that get the same curves.

    Attributes:
        history: all steps of the run, including earlier attempts.
        evaluations: lines of `evaluations.jsonl` by step, including earlier attempts.
    """

    def __init__(self, folder: Path, *, start: int, tensorboard: bool, trackers: Trackers | None = None) -> None:
        path, self._evaluations = folder / "metrics.jsonl", folder / EVALUATIONS
        before, kept = ([line for line in read_metrics(p) if line["step"] <= start] for p in (path, self._evaluations))
        for file, lines in ((path, before), (self._evaluations, kept)):
            files.write(file, "".join(json.dumps(line) + "\n" for line in lines))
        self.history = list(filter(None, map(_restored, before)))
        if (missing := start - len(self.history)) > 0:
            log.warning(
                "%s has no line of %d of the %d steps before: the summary leaves them out", path, missing, start
            )
        self._file = path.open("a", encoding="utf-8")
        self.evaluations = {line["step"]: {k: v for k, v in line.items() if type(v) in (int, float)} for line in kept}
        self._board: SummaryWriter | None = None
        self._trackers = trackers
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
            except ImportError:
                log.warning("no TensorBoard curves: the package is not installed")

    def record(self, metrics: StepMetrics) -> None:
        """Write one step."""
        values = dataclasses.asdict(metrics)
        self.history.append(metrics)
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        self._curves({f"train/{name}": value for name, value in _scalars(values)}, metrics.step)

    def record_evaluation(self, step: int, losses: dict[str, float], nbytes: int = 0) -> None:
        """Write held-out losses after `step` steps, and the bytes that all ranks sent for them."""
        self.evaluations[step] = {"step": step, **losses, "bytes_sent": nbytes}
        with self._evaluations.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.evaluations[step]) + "\n")
        self._curves({f"evaluation/{name}": value for name, value in losses.items()}, step)

    def _curves(self, values: dict[str, float], step: int) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._trackers is not None:
            self._trackers.log(values, step)

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._trackers is not None:
            self._trackers.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl` without an unfinished last line; damaged lines are left out with a warning."""
    if not path.exists():
        return []
    lines, bad = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
        else:
            bad.append(str(number))
    if bad:
        log.warning("%s: left out lines that cannot be read: %s", path, ", ".join(bad))
    return lines


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield names and values of the curves; values by link or machine make one curve each."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key.replace(' ', '_')}", number) for key, number in value.items())
        elif name not in ("step", "tokens") and value is not None:
            yield name, value


_STEP_LINES = functools.cache(lambda: TypeAdapter(StepMetrics))  # making it takes longer than checking a line


def _restored(values: dict[str, Any]) -> StepMetrics | None:
    """Make metrics from a line; None if its fields or their types differ, as in a line of another version."""
    try:
        return _STEP_LINES().validate_python(values)
    except ValidationError:
        return None


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
        formats: choices of `pipeline.forward = "auto"`, each as `lowbit_run.train.auto.FormatChoice`.
        round_trip_seconds: longest between neighbours of a pipeline, measured at the start; None on one rank.
        words: the "prompt" of `run.prompt`, and what the model writes after it "before training" (unless the run was
            resumed) and "after training", quoted; {} without a prompt.
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
    words: dict[str, str] = field(default_factory=dict)


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
    words: Mapping[str, str] | None = None,
) -> Summary:
    """Summarize a run with these steps and held-out scores, at the end and `before` the first step.

    Args:
        here: steps of this call; None: all. outside: bytes sent outside of steps, by part.
    """
    # Imported here: it loads PyTorch, which reading a summary does not need.
    from lowbit_run.train.boundaries import backward_formats

    settled, before = _settled(config, history, formats[-1]["step"] if formats else 0), before or {}
    seconds = statistics.median(m.seconds for m in settled) if settled else None
    means: dict[str, Any] = {name: _mean(settled, name) for name in ("bits_forward", "bits_backward", "bits_gradients")}
    means |= {name: _mean(settled, name) or 0.0 for name in ("compute_seconds", "codec_seconds", "wait_seconds")}
    totals: dict[str, Any] = {name: sum(getattr(m, name) for m in history) for name in ("bytes_saved", "seconds")}
    parts = Counter[str]()
    for sent in (*(m.parts for m in history), *outside):
        parts.update(sent)
    return Summary(
        steps=history[-1].step if history else config.run.steps, steps_here=len(history) if here is None else here,
        bytes_sent=sum(parts.values()), parts={name: nbytes for name, nbytes in parts.items() if nbytes},
        loss=statistics.fmean(m.loss for m in history[-_LAST:]) if history else None,
        held_out_loss=losses.get("held_out_loss"), held_out_loss_codecs=losses.get("held_out_loss_codecs"),
        tokens_per_second=statistics.median(m.tokens_per_second for m in settled) if settled else None,
        seconds_per_step=seconds, bytes_per_step=_mean(settled, "bytes_sent") or 0.0,
        bytes_activations=history[-1].bytes_activations if history else None,
        forward=config.pipeline.forward, backward=backward_formats(config.pipeline),
        ranks=layout.ranks, stages=layout.stages, schedule=config.pipeline.schedule,
        model=None if model is None else str(model), chosen=chosen, changes=list(changes),
        round_trip_seconds=round_trip,
        exact_match=losses.get("exact_match"), exact_match_codecs=losses.get("exact_match_codecs"),
        exact_match_before=before.get("exact_match"), held_out_loss_before=before.get("held_out_loss"),
        formats=list(formats), words=dict(words or {}), **means, **totals,
    )  # fmt: skip


def read_summary(path: Path) -> Summary:
    """Read the summary that a run wrote."""
    return from_json(json.loads(path.read_text(encoding="utf-8")))


def from_json(values: Mapping[str, Any]) -> Summary:
    """Make a summary from JSON values that `dataclasses.asdict` produced, maybe in a version with other fields."""
    known: dict[str, Any] = {field.name: values[field.name] for field in fields(Summary) if field.name in values}
    known |= {key: tuple(values[key]) for key in ("forward", "backward")}
    return Summary(**known)


def _settled(config: TrainConfig, history: Sequence[StepMetrics], chosen: int) -> Sequence[StepMetrics]:
    """Return the steps after the warm-up, the last choice of formats and the step that sets them up, or else all."""
    after = [m for m in history if m.step > max(config.codec_warmup_steps, chosen)]
    return after[1:] or after or history


def _mean(history: Sequence[StepMetrics], name: str) -> float | None:
    values = [getattr(m, name) for m in history]
    return None if not values or None in values else statistics.fmean(values)
