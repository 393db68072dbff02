"""`lowbit evaluate`: perplexity and zero-shot scores of a model with low-bit tensor-parallel sums."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.codecs import Codec, parse
from lowbit.collectives import agree
from lowbit.config import ConfigError
from lowbit.evaluate import calibrate, loading, text
from lowbit.evaluate.harness import mean_score, zero_shot
from lowbit.evaluate.score import Reference, SumErrors, perplexity
from lowbit.evaluate.settings import BASELINE, LOW_BIT, CalibrationConfig, EvaluationConfig, default_calibration
from lowbit.ranks.objects import gather_json
from lowbit.ranks.process_group import world
from lowbit.tensor_parallel import (
    Calibration,
    CalibrationError,
    Installed,
    SumSettings,
    emulate_tensor_parallel_,
    low_bit_,
)
from lowbit.tensor_parallel.reduce import SMALL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CALIBRATED = ("int4", LOW_BIT, f"{LOW_BIT}-distributed")
"""Formats with calibrated scales; other names are codecs, whose scales are sent."""
log = logging.getLogger(__name__)


def measure(settings: EvaluationConfig) -> Iterator[list[dict[str, Any]]]:
    """Measure every format on every number of ranks.

    In one process ranks are emulated (`emulate_tensor_parallel_`); under torchrun the job's ranks are real, and the
    figures the same to the last bit, with as many threads.

    Yields:
        All rows so far, with `format`, `tp`, `real` (ranks), `algorithm` (of the all-reduce of coded values),
        `perplexity` (NaN if a sum was), `loss`, `tokens`, `bits_per_value` (of everything sent), `coded` (share of the
        values; the others are of small sums, which stay in the model's dtype), `logits_error` (relative, to the first
        row's: one rank, or on real ranks bf16), `logits` (digits of the first batch's bits), `sum_error` (relative root
        mean square over the layers; for emulated ranks), `layers` (the same by layer), `calibration` (its text), and
        with tasks `scores` (by task and metric) and `score` (their mean). The command adds `kept` (bf16's perplexity
        over this one) and `scores_kept` (this score over bf16's).

    Raises:
        ConfigError, ValueError: settings, model or text that cannot be used.
        CalibrationError: a calibration for something else.
        AgreementError: ranks that do not hold the same.
    """
    return Evaluation(settings).rows()


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A row to measure."""

    format: str
    tp: int
    low_bit: Calibration | Codec | None = None  # None: one rank, no sum
    source: str = ""


class Evaluation:
    """The formats and numbers of ranks to measure on one model and text."""

    def __init__(self, settings: EvaluationConfig) -> None:
        self.settings = settings
        for name in settings.compared:
            _check_format(name)
        self.rank, self.ranks = world()
        self.device = loading.prepare(settings)
        self.tps = self._tps()
        self.sequences, self.tokenizer = text.read(settings, held_out=True)
        self.sums = SumSettings(algorithm=settings.algorithm, small=SMALL if settings.small is None else settings.small)
        self.reference = Reference()

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """Measure, and yield all rows so far."""
        if self.rank == 0:
            self.sequences.warn_if_fewer(self.settings.sequences)
        rows: list[dict[str, Any]] = []
        with loading.job(self.device):
            if self.ranks > 1:
                agree(None, self._facts(), topic="evaluation")
            calibrations = loading.load_calibrations(self.settings.calibrations)
            model = loading.load_model(self.settings.model, self.settings.dtype, self.device)
            for case in self._cases(model, calibrations):
                rows = [*rows, self._measure(model, case)]
                yield rows

    def _tps(self) -> tuple[int, ...]:
        tps, folder = self.settings.tps, self.settings.model
        if self.ranks > 1:
            if tps not in ((), (self.ranks,)):
                raise ConfigError(f"tp is {tps} and this job has {self.ranks} ranks; allowed: no --tp under torchrun")
            tps = (self.ranks,)
        for tp in tps:
            loading.check_ranks("tp", tp, folder)
        return tps or tuple(n for n in (1, 2, 4, 8) if n in loading.possible_ranks(folder))

    def _facts(self) -> dict[str, str]:
        """Return facts that must be the same on all ranks."""
        local = ("model", "text", "calibration_text", "task_folder", "tokenizer", "calibrations")
        values = dataclasses.asdict(self.settings)
        facts = {key: str(value) for key, value in values.items() if key not in local}
        return facts | {"text": self.sequences.fingerprint(), "calibrations": str(len(self.settings.calibrations))}

    def _cases(self, model: PreTrainedModel, calibrations: Mapping[int, Calibration]) -> Iterator[_Case]:
        warned = False
        for tp in self.tps:
            if tp == 1:
                yield _Case(format=BASELINE, tp=1)
                continue
            calibration: Calibration | None = None
            for name in self.settings.compared:
                if name not in CALIBRATED:
                    yield _Case(format=name, tp=tp, low_bit=parse(name))
                    continue
                if calibration is None:
                    calibration = self._calibration(model, tp, calibrations)
                    same_text = f"tokens {self.sequences.fingerprint()}" in calibration.text
                    if same_text and not warned and self.rank == 0:
                        log.warning(
                            "text is %s, and the calibration was made from the same: results for other text may be "
                            "worse", self.sequences.source,
                        )  # fmt: skip
                    warned = warned or same_text
                yield _Case(format=name, tp=tp, low_bit=_with_features(calibration, name), source=calibration.text)

    def _calibration(self, model: PreTrainedModel, tp: int, calibrations: Mapping[int, Calibration]) -> Calibration:
        """Return a calibration for `tp` ranks: one that was named, the one in the model's folder, or a new one."""
        settings = self.settings
        if tp in calibrations:
            return calibrations[tp]
        if calibrations:
            given = ", ".join(map(str, calibrations))
            raise CalibrationError(
                f"calibration is for {given} ranks and tp is {tp}; allowed: a file for each number of ranks"
            )
        beside = default_calibration(settings.model, tp)
        if not settings.calibration_text and self._all_have(beside):
            return loading.load_calibration(beside)
        wanted = CalibrationConfig(
            ranks=tp, text=settings.calibration_text, sequences=settings.calibration_sequences,
            **{name: getattr(settings, name) for name in ("model", "length", "tokenizer", "seed", "max_bytes")},
        )  # fmt: skip
        if self.rank == 0:
            log.warning(
                "no calibration for %d ranks is given: making one from %s (lowbit calibrate keeps it)",
                tp, ", ".join(wanted.text) or text.LIBRARY,
            )  # fmt: skip
        return calibrate.make(model, calibrate.read(wanted), wanted, keep_state=False)

    def _all_have(self, path: Path) -> bool:
        """Whether the file exists, decided alike on all ranks."""
        if self.ranks == 1:
            return path.exists()
        exists = gather_json(path.exists())
        if len(set(exists)) > 1:
            missing = ", ".join(str(rank) for rank, here in enumerate(exists) if not here)
            raise CalibrationError(
                f"{path.name} is in the model's folder, but not on rank {missing}; allowed: on all ranks or none"
            )
        return exists[0]

    def _measure(self, model: PreTrainedModel, case: _Case) -> dict[str, Any]:
        settings, errors = self.settings, SumErrors()
        windows = len(self.sequences.spread(settings.sequences))
        with (
            self._install(model, case, errors) as installed,
            loading.progress_bar(f"{case.format}, tp {case.tp}", windows) as progress,
        ):
            score = perplexity(
                model, self.sequences, count=settings.sequences, batch=settings.batch, reference=self.reference,
                device=self.device, progress=progress,
            )  # fmt: skip
            scores = zero_shot(model, self.tokenizer.hugging_face(), settings) if settings.tasks else None
        if self.ranks > 1:
            agree(None, {"logits": score.logits, "loss": repr(score.loss)}, topic="outcome")
        if not math.isfinite(score.loss) and self.rank == 0:
            log.warning(
                "%s, tp %d: the loss is %s: a sum over ranks was NaN or infinite", case.format, case.tp, score.loss
            )
        traffic = installed.traffic if case.low_bit is not None else None
        row = {
            "format": case.format,
            "tp": case.tp,
            "real": self.ranks > 1,
            "algorithm": ", ".join(sorted(traffic.algorithms)) or None if traffic else None,
            "perplexity": score.perplexity,
            "loss": score.loss,
            "tokens": score.tokens,
            "bits_per_value": traffic.bits_per_value if traffic else None,
            "coded": traffic.share_coded if traffic else None,
            "logits_error": score.logits_error,
            "logits": score.logits,
            "sum_error": errors.mean(),
            "layers": errors.relative(),
            "calibration": case.source,
        }
        return row if scores is None else row | {"scores": scores, "score": mean_score(scores)}

    def _install(self, model: PreTrainedModel, case: _Case, errors: SumErrors) -> Installed:
        """Let the model add up its partial sums in the format of the case."""
        if case.low_bit is None:
            return Installed()  # one rank: nothing to change
        if self.ranks > 1:
            return low_bit_(model, case.low_bit, settings=self.sums)
        return emulate_tensor_parallel_(model, case.tp, case.low_bit, settings=self.sums, watch=errors)


def _check_format(name: str) -> None:
    """Raise ConfigError unless this is the name of a format."""
    if name not in CALIBRATED:
        try:
            parse(name)
        except ValueError as error:
            raise ConfigError(f"format is {name!r}; allowed: {', '.join(CALIBRATED)}, or a codec: {error}") from error


def _with_features(calibration: Calibration, name: str) -> Calibration:
    """Return the calibration with the features of one of the formats `CALIBRATED`."""
    if name == LOW_BIT:
        return calibration
    return calibration.select(k=0) if name == "int4" else calibration.select(features="distributed")
