"""`lowbit calibrate`: measure what partial sums of a model look like, once, and write it to one file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowbit.bench.report import Report, Row, machine
from lowbit.evaluate import loading, text
from lowbit.evaluate.settings import CalibrateSettings
from lowbit.tensor_parallel import Calibration, calibrate, tensor_parallel_
from lowbit.train import ConfigError
from lowbit.train.process_group import joined, world

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TIMEOUT = 300.0


def run(settings: CalibrateSettings) -> Report:
    """Draw sequences, watch the sums, choose features, write the file.

    Under torchrun the model is cut over the ranks and each watches its own partial sums; the file is that of the
    emulation. A run that was ended goes on from what lies beside its output, with the same outcome.

    Returns:
        A report whose rows have `boundary`, `features` (chosen), `k`, `width`, `bits_per_value`, `range_median`,
        `range_largest` (of the ranks' root mean square by feature) and `aggregated` (those of all features).

    Raises:
        ConfigError: a model, text or output that can not be used.
        CalibrationError: with `continue_`, an output that is missing or made for something else.
    """
    rank, ranks = world()
    settings = _for_job(settings, ranks)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = loading.find_device(settings.device, ranks)
    loading.check_length(settings.model, settings.length)
    start = Calibration.load(settings.path) if settings.continue_ else None
    sequences = draw(settings)
    with parallel_model(settings.model, settings.dtype, device) as model:
        found = make(model, sequences, settings, start=start)
    if rank == 0:
        found.save(settings.path)
        _state_file(settings.path).unlink(missing_ok=True)
    return Report(
        command="calibrate", settings=settings, machine=machine(), rows=list(rows_of(found))
    )


@contextlib.contextmanager
def parallel_model(folder: str, dtype: str, device: torch.device) -> Iterator[PreTrainedModel]:
    """The model: cut over the ranks where this process is one of a job, else whole, to play ranks with."""
    kind = loading.choose_dtype(dtype, device)
    if world()[1] == 1:
        yield loading.load_model(folder, dtype=kind, device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined(TIMEOUT, backend="nccl" if device.type == "cuda" else "gloo"):
        model = loading.load_model(folder, dtype=kind, device=device)
        tensor_parallel_(model)
        yield model


def draw(settings: CalibrateSettings) -> text.Sequences:
    """The text that sequences are drawn from.

    Raises:
        ConfigError: it is missing or shorter than one sequence.
    """
    tokenizer, begin = text.find_tokenizer(settings.tokenizer, settings.model)
    found = text.read(
        settings.text, tokenizer, length=settings.length, begin=begin, max_bytes=settings.max_bytes
    )
    found.draw(1, settings.seed)
    return found


def make(
    model: PreTrainedModel,
    sequences: text.Sequences,
    settings: CalibrateSettings,
    *,
    start: Calibration | None = None,
    keep_state: bool = True,
) -> Calibration:
    """Calibrate a loaded model, with a progress bar on the first rank.

    Args:
        model: whole, or on real ranks. start: go on from this one.
        keep_state: write what was seen beside the output now and then, and go on from it.
    """
    drawn = sequences.draw(settings.sequences, settings.seed)
    config = model.config.get_text_config()
    k, layout = settings.selection(config.hidden_size)
    described = (
        f"{len(drawn)} of {settings.length} tokens from {sequences.source}, seed {settings.seed}, "
    )
    with progress_bar("calibrating", len(drawn)) as advance:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            advance(count - done)
            done = count

        return calibrate(
            model,
            (sequence.to(model.device) for sequence in drawn),
            ranks=None if world()[1] > 1 else settings.ranks,
            k=k,
            features=layout,
            momentum=settings.momentum,
            text=described + f"tokens {sequences.fingerprint()}",
            start=start,
            state=_state_file(settings.path) if keep_state else None,
            progress=progress,
        )


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal of the first rank; gives a function that moves it on."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    shown = os.environ.get("RANK", "0") == "0"
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def rows_of(calibration: Calibration) -> Iterator[Row]:
    """What `run` reports, boundary by boundary."""
    for name, ranges in calibration.ranges.items():
        aggregated = ranges.square().mean(0).sqrt()
        chosen, width = calibration.features[name], ranges.shape[1]
        yield {
            "boundary": name,
            "features": list(chosen),
            "k": len(chosen),
            "width": width,
            "bits_per_value": (16 * len(chosen) + 4 * (width - len(chosen))) / width,
            "range_median": float(aggregated.median()),
            "range_largest": float(aggregated.max()),
            "aggregated": aggregated.tolist(),
        }


def _for_job(settings: CalibrateSettings, ranks: int) -> CalibrateSettings:
    """The settings with the ranks of the job, where there is one."""
    import dataclasses

    possible = loading.possible_ranks(settings.model, tuple(range(1, 129)))
    wanted = ranks if ranks > 1 else settings.ranks
    if wanted not in possible:
        raise ConfigError(
            f"ranks is {wanted}; the model's heads can be shared out over {', '.join(map(str, possible))}"
        )
    return dataclasses.replace(settings, ranks=wanted)


def _state_file(output: Path) -> Path:
    return output.with_name(f".{output.name}.state")
