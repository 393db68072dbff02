"""`lowbit calibrate`: measure the ranges of a model's partial sums once, and write them to one file."""

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.codecs import parse
from lowbit.collectives import agree
from lowbit.collectives.reduce import check_summable
from lowbit.tensor_parallel import Calibration, CalibrationError, calibrate
from lowbit_lab.evaluate import loading
from lowbit_lab.evaluate.settings import CalibrationConfig
from lowbit_run.config import ConfigError
from lowbit_run.job.process_group import world
from lowbit_run.report import check_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def measure(settings: CalibrationConfig) -> list[dict[str, Any]]:
    """Draw sequences, observe the sums, choose features, write the file.

    Under torchrun the model is split over the ranks and each observes its own partial sums; the file is the same as
    with emulated ranks.

    Returns:
        A row for each layer, with `layer`, `features` (chosen), `k` (their number), `width`, `bits_per_value`,
        `codes` (bits of the codes of its sums) or `inputs` (of its inputs, if it sends these), `whole_weight` (bytes
        that each rank keeps for that in addition to its part), `gain`, `aggregated` (root mean square of the ranks'
        ranges, by feature), and of that `range_median` and `range_largest`.
    """
    rank, ranks = world()
    settings = dataclasses.replace(settings, ranks=ranks if ranks > 1 else settings.ranks)
    loading.check_ranks("ranks", settings.ranks, settings.model)
    device = loading.prepare(settings)
    sequences = read(settings)
    with loading.job(device):
        _check_output(settings.path, replaces=not settings.continue_)
        start = loading.load_calibration(settings.path) if settings.continue_ else None
        model = loading.load_model(settings.model, settings.dtype, device)
        calibration = make(model, sequences, settings, start=start)
    if rank == 0:
        calibration.save(settings.path)
    nbytes = {name: weight.nbytes for name in calibration.inputs for weight in [model.get_submodule(name).weight]}
    return [{**_row(calibration, name), "whole_weight": nbytes.get(name, 0)} for name in calibration.ranges]


def read(settings: CalibrationConfig) -> loading.Sequences:
    """Read the text that sequences are drawn from; ConfigError if it is missing or shorter than one sequence."""
    encoder = loading.model_kind(settings.model) != loading.CAUSAL
    sequences, _ = loading.read_text(settings, encoder=encoder)
    sequences.draw(1, settings.seed)
    return sequences


def make(
    model: "PreTrainedModel",
    sequences: loading.Sequences,
    settings: CalibrationConfig,
    *,
    start: Calibration | None = None,
) -> Calibration:
    """Calibrate a loaded model, whole or on real ranks, with a progress bar on the first rank."""
    drawn = sequences.draw(settings.sequences, settings.seed)
    if world()[0] == 0:
        sequences.warn_if_fewer(settings.sequences)
    k = settings.selection(model.config.get_text_config().hidden_size)
    if start is not None and not settings.features:
        k = start.settings.get("k")
    gain = settings.gain or (start.gain if start is not None else "token")
    bits: Any = None if settings.bits == "uniform" else settings.bits or "auto"
    inputs: Any = "auto"
    if settings.inputs:
        inputs = None if settings.inputs == "none" else check_summable(parse(settings.inputs))
    if start is not None:
        if settings.bits is None and start.gain == gain:
            bits = start.settings.get("bits")
        if not settings.inputs and start.settings.get("inputs") != "auto":
            inputs = next(iter(start.inputs_codecs().values()), None)
    description = (
        f"{len(drawn)} of {settings.length} tokens from {sequences.source}, seed {settings.seed}, "
        f"tokens {sequences.fingerprint()}"
    )
    with loading.progress_bar("calibrating", len(drawn)) as progress:
        return calibrate(
            model,
            (sequence.to(model.device) for sequence in drawn),
            ranks=None if world()[1] > 1 else settings.ranks,
            k=k,
            gain=gain,
            bits=bits,
            inputs=inputs,
            momentum=settings.momentum,
            text=description,
            start=start,
            progress=progress,
        )


def _row(calibration: Calibration, layer: str) -> dict[str, Any]:
    ranges, features = calibration.ranges[layer], calibration.features[layer]
    aggregated = ranges.square().mean(0).sqrt()
    return {
        "layer": layer,
        "features": list(features),
        "k": len(features),
        "width": ranges.shape[1],
        "bits_per_value": calibration.bits_per_value(layer),
        "codes": None if layer in calibration.inputs else calibration.bits.get(layer, 4),
        "inputs": calibration.inputs[layer][0] if layer in calibration.inputs else None,
        "gain": calibration.gain,
        "range_median": float(aggregated.median()),
        "range_largest": float(aggregated.max()),
        "aggregated": aggregated.tolist(),
    }


def _check_output(path: Path, *, replaces: bool) -> None:
    """Raise ConfigError unless the first rank can write there; in a job, all ranks raise the same AgreementError.

    A file that is no calibration stays as it is; `replaces`: one that is makes way for another, which the log says.
    """
    rank, ranks = world()
    problem = ""
    if rank == 0:
        try:
            check_output(path)
        except ValueError as error:
            problem = f"output {error}; allowed: a file in a folder that can be written"
        if not problem and replaces and path.exists():
            try:
                log.warning("%s holds a calibration (%s), which this one replaces", path, Calibration.load(path).text)
            except CalibrationError:
                problem = f"output is {path}, which is no calibration that can be read; allowed: a new file"
    if ranks > 1:
        agree(None, {"output": problem or f"{path} can be written"}, topic="output")
    elif problem:
        raise ConfigError(problem)
