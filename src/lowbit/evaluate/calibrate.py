"""`lowbit calibrate`: measure what partial sums of a model look like, once, and write it to one file."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowbit.bench.report import Report, Row, machine
from lowbit.collectives import agree
from lowbit.evaluate import loading, text
from lowbit.evaluate.settings import CalibrateSettings
from lowbit.ranks.groups import default_group
from lowbit.ranks.process_group import joined, world
from lowbit.tensor_parallel import Calibration, Settings, calibrate, tensor_parallel_
from lowbit.tensor_parallel.low_bit import load_agreed
from lowbit.train import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TIMEOUT = 300.0
log = logging.getLogger(__name__)


def run(settings: CalibrateSettings) -> Report:
    """Draw sequences, watch the sums, choose features, write the file.

    Under torchrun the model is cut over the ranks and each watches its own partial sums; the file is that of the
    emulation. A run that was ended goes on from what lies beside its output, with the same outcome.

    Returns:
        A report whose rows have `boundary`, `features` (chosen), `k`, `width`, `bits_per_value`, `range_median`,
        `range_largest` (of the ranks' root mean square by feature) and `aggregated` (those of all features).

    Raises:
        ConfigError: a model, text or output that cannot be used.
        CalibrationError: with `continue_`, an output that is missing or made for something else.
    """
    rank, ranks = world()
    settings = _for_job(settings, ranks)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = loading.find_device(settings.device, ranks)
    loading.check_length(settings.model, settings.length)
    sequences = draw(settings)
    with job(device):
        _check_output(settings.path)
        start = load(settings.path) if settings.continue_ else None
        model = parallel_model(settings.model, settings.dtype, device)
        found = make(model, sequences, settings, start=start)
    if rank == 0:
        found.save(settings.path)
        for state in _states(settings.path):
            state.unlink(missing_ok=True)
    return Report(command="calibrate", settings=settings, machine=machine(), rows=list(rows_of(found)))


@contextlib.contextmanager
def job(device: torch.device) -> Iterator[None]:
    """Be a rank of the job for this block, where there is one."""
    if world()[1] == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined(TIMEOUT, backend="nccl" if device.type == "cuda" else "gloo"):
        yield


def parallel_model(folder: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model: cut over the ranks where this process is one of a job, else whole, to play ranks with.

    It is cut on the CPU: a rank's memory there holds the whole of it for a moment, its device its part alone.
    """
    kind = loading.choose_dtype(dtype, device)
    if world()[1] == 1:
        return loading.load_model(folder, dtype=kind, device=device)
    model = loading.load_model(folder, dtype=kind, device=torch.device("cpu"))
    tensor_parallel_(model)
    return model.to(device)  # pyright: ignore[reportArgumentType]


def load(path: Path) -> Calibration:
    """A calibration; on the ranks of a job the same on all of them, or the same error.

    Raises:
        CalibrationError: it cannot be read. AgreementError: or not on all ranks, or not the same.
    """
    if world()[1] == 1:
        return Calibration.load(path)
    found = load_agreed(path, default_group(), Settings())
    assert isinstance(found, Calibration)
    return found


def draw(settings: CalibrateSettings) -> text.Sequences:
    """The text that sequences are drawn from.

    Raises:
        ConfigError: it is missing or shorter than one sequence.
    """
    tokenizer, begin = text.find_tokenizer(settings.tokenizer, settings.model)
    found = text.read(settings.text, tokenizer, length=settings.length, begin=begin, max_bytes=settings.max_bytes)
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
    if world()[0] == 0:
        sequences.warn_if_fewer(settings.sequences)
    k, layout = settings.selection(model.config.get_text_config().hidden_size)
    if start is not None and not settings.features:
        k, layout = start.settings.get("k"), start.settings.get("features", "fixed")
    described = (
        f"{len(drawn)} of {settings.length} tokens from {sequences.source}, seed {settings.seed}, "
        f"tokens {sequences.fingerprint()}"
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
            text=described,
            start=start,
            state=_state_file(settings, described, start) if keep_state else None,
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
            "bits_per_value": calibration.bits_per_value(name),
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


def _check_output(path: Path) -> None:
    """Raise, on all ranks of a job alike, unless the first one can write there.

    Raises:
        ConfigError: it cannot; on a job's ranks AgreementError.
    """
    rank, ranks = world()
    reason = "can be written"
    if rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            reason = f"{error.strerror}; allowed: a file in a folder that can be written"
    if ranks > 1:
        agree(None, {f"output {path}": reason}, topic="output")
    elif reason != "can be written":
        raise ConfigError(f"output is {str(path)!r}: {reason}")


def _state_file(settings: CalibrateSettings, described: str, start: Calibration | None) -> Path:
    """Where the averages of a run lie meanwhile; runs with other options or text have others."""
    before = start.fingerprint() if start else ""
    key = f"{settings.model}/{settings.ranks}/{settings.dtype}/{settings.momentum}/{described}/{before}"
    name = hashlib.sha256(key.encode()).hexdigest()[:8]
    state = settings.path.with_name(f".{settings.path.name}.{name}.state")
    if world()[0] == 0 and _states(settings.path) and not state.exists():
        log.warning("a calibration with other options or text was ended before: this one begins anew")
    return state


def _states(output: Path) -> list[Path]:
    """What ended runs left beside the output."""
    return list(output.parent.glob(f".{glob.escape(output.name)}.*.state"))
