"""Metrics of a run: a line of JSON for each step, curves for TensorBoard, and progress on the terminal."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class Work:
    """Time and traffic of one step on this rank.

    Seconds of codecs include those of checksums. Bytes and elements are those sent over boundaries, and of gradients to
    other pipelines: an all-reduce over W of them sends 2 (W - 1) / W elements for each element of the tensor.
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


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, over all ranks.

    Attributes:
        step: counted from 0. loss: mean over the batch, in nats. lr: learning rate. grad_norm: before clipping.
        tokens_per_second: of the whole batch, over the whole step.
        bits_forward, bits_backward: bits sent for each element that crossed a boundary; None if nothing did.
        bits_gradients: the same for gradients between pipelines.
        bytes_sent: over all boundaries, both ways, and between pipelines. bytes_saved: compared with float32.
        bytes_activations: peak of the saved activations, on the rank with most; None if none are compressed. Counted
            in the first step, and the same in all others.
        seconds: of the step; compute_seconds, codec_seconds, wait_seconds: its parts, mean over the ranks.
        checksum_seconds: part of codec_seconds.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    bits_forward: float | None
    bits_backward: float | None
    bits_gradients: float | None
    bytes_sent: int
    bytes_saved: int
    bytes_activations: int | None
    seconds: float
    compute_seconds: float
    codec_seconds: float
    checksum_seconds: float = 0.0
    wait_seconds: float


def bits(nbytes: float, elements: float) -> float | None:
    """Bits for each element; None without elements."""
    return 8 * nbytes / elements if elements else None


def step_metrics(
    *,
    step: int,
    loss: float,
    lr: float,
    grad_norm: float,
    tokens: int,
    seconds: float,
    ranks: int,
    work: Work,
    bytes_activations: int | None = None,
) -> StepMetrics:
    """Metrics from the sums over all ranks."""
    sent = work.forward_bytes + work.backward_bytes + work.gradient_bytes
    elements = work.forward_elements + work.backward_elements + work.gradient_elements
    shares = {name: value / ranks for name, value in vars(work).items() if name.endswith("_seconds")}
    return StepMetrics(
        step=step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_second=tokens / seconds,
        bits_forward=bits(work.forward_bytes, work.forward_elements),
        bits_backward=bits(work.backward_bytes, work.backward_elements),
        bits_gradients=bits(work.gradient_bytes, work.gradient_elements),
        bytes_sent=round(sent), bytes_saved=round(4 * elements - sent), bytes_activations=bytes_activations,
        seconds=seconds, **shares,
    )  # fmt: skip


class Recorder:
    """Writes metrics of a run; on rank 0 only.

    Args:
        folder: of the run. start: step that it begins with; lines that an earlier attempt wrote for this step or later
            ones are dropped. steps: of the whole run. tensorboard, progress: whether to write curves, show progress.
    """

    def __init__(self, folder: Path, *, start: int, steps: int, tensorboard: bool, progress: bool) -> None:
        path = folder / "metrics.jsonl"
        before = [line for line in read_metrics(path) if line["step"] < start]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in before), encoding="utf-8")
        part.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = _open_board(folder / "tensorboard", start) if tensorboard else None
        self._display = _Display(start, steps) if progress else None

    def record(self, metrics: StepMetrics) -> None:
        """Write and show one step."""
        values = dataclasses.asdict(metrics)
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(f"train/{name}", value, metrics.step)
        if self._display is not None:
            self._display.show(metrics)

    def record_evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Write and show held-out losses after `step` steps."""
        if self._board is not None:
            for name, value in losses.items():
                self._board.add_scalar(f"evaluation/{name}", value, step)
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in losses.items())
        self.say(f"step {step}: {shown}")

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        if self._display is not None:
            self._display.say(text)

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._display is not None:
            self._display.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` but for an unfinished last one; damaged lines are left out with a warning."""
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
        logging.getLogger(__name__).warning(
            "%s: line%s %s cannot be read and %s left out",
            path, "s" * (len(bad) > 1), ", ".join(bad), "are" if len(bad) > 1 else "is",
        )  # fmt: skip
    return lines


def _open_board(folder: Path, start: int) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logging.getLogger(__name__).warning("no TensorBoard curves: the package is not installed")
        return None
    return SummaryWriter(str(folder), purge_step=start)


class _Display:
    """Progress on standard error: one live line on a terminal, elsewhere ten lines in a run."""

    def __init__(self, start: int, steps: int) -> None:
        self._steps, self._every = steps, max(1, steps // 10)
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(stderr=True)
            columns = [MofNCompleteColumn(), TextColumn("{task.description}", markup=False)]
            if console.width >= 110:  # a narrow terminal shows the metrics without a bar
                columns.append(BarColumn(24))
            self._progress = Progress(*columns, TimeRemainingColumn(compact=True), console=console)
            self._progress.add_task("", total=steps, completed=start)
            self._progress.start()

    def show(self, metrics: StepMetrics) -> None:
        text = describe(metrics)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=metrics.step + 1, description=text)
        elif (metrics.step + 1) % self._every == 0 or metrics.step + 1 == self._steps:
            self.say(f"step {metrics.step + 1}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False)
        else:
            sys.stderr.write(f"{text}\n")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def describe(metrics: StepMetrics) -> str:
    """A step in one line: loss, speed, bits per element and bytes saved."""
    text = f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tok/s"
    if metrics.bits_forward is not None and metrics.bits_backward is not None:
        text += f"  bits {metrics.bits_forward:.2f} fwd {metrics.bits_backward:.2f} bwd"
    if metrics.bits_gradients is not None:
        text += f"  gradients {metrics.bits_gradients:.2f}"
    if metrics.bytes_activations is not None:
        text += f"  activations {metrics.bytes_activations / 1e6:.1f} MB"
    if metrics.bytes_saved:
        text += f"  {metrics.bytes_saved / 1e6:.1f} MB/step saved"
    return text
