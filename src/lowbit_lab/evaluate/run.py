"""`lowbit evaluate`: results of a model with low-bit tensor-parallel sums, compared with exact ones."""

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
from lowbit.tensor_parallel import (
    Calibration,
    CalibrationError,
    Installed,
    SumSettings,
    emulate_tensor_parallel_,
    low_bit_,
)
from lowbit.tensor_parallel.reduce import SMALL
from lowbit.wire.messages import gather_json
from lowbit_lab.evaluate import calibrate, loading
from lowbit_lab.evaluate.score import (
    NEAREST,
    SumErrors,
    agreement,
    embed,
    generate,
    perplexity,
    root_mean_square,
    same_tokens,
    sentences,
)
from lowbit_lab.evaluate.settings import (
    BASELINE,
    LOW_BIT,
    STATIC,
    CalibrationConfig,
    EvaluationConfig,
    default_calibration,
)
from lowbit_lab.evaluate.tasks import Scored, Tasks
from lowbit_run.config import ConfigError
from lowbit_run.job.process_group import world

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

CALIBRATED = ("int4", LOW_BIT, STATIC)
"""Formats with calibrated ranges; other names are codecs, whose scales are sent."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A row to measure."""

    format: str
    tp: int
    low_bit: Calibration | Codec | None = None  # None: one rank, no sum
    source: str = ""

    def __str__(self) -> str:
        return f"{self.format}, tp {self.tp}"


class Evaluation:
    """The formats and numbers of ranks to measure on one model and text."""

    def __init__(self, settings: EvaluationConfig) -> None:
        self.settings = settings
        self.paths = [name for name in settings.compared if name.endswith(".safetensors")]
        self.codecs = {name: _parsed(name) for name in settings.compared if name not in (*CALIBRATED, *self.paths)}
        self.files: dict[str, Calibration] = {}
        self.rank, self.ranks = world()
        self.device = loading.prepare(settings)
        self.tps = self._tps()
        self.kind = loading.model_kind(settings.model)
        self.encoder = self.kind != loading.CAUSAL
        asked = {"generate": settings.generate, "task": ", ".join(settings.tasks)}
        if self.encoder and (key := next((key for key, value in asked.items() if value), None)):
            raise ConfigError(
                f"{key} is {asked[key]}; allowed for a causal language model only, and this is: {self.kind}"
            )
        if not self.encoder and settings.sentences != type(settings).__dataclass_fields__["sentences"].default:
            raise ConfigError(f"sentences is {settings.sentences}; allowed for encoders only, and this is: {self.kind}")
        self.sequences, self.tokenizer = loading.read_text(settings, held_out=True, encoder=self.encoder)
        self.tasks = Tasks(settings, self.tokenizer)
        self.sentences = self._sentences() if self.encoder else []
        self.vectors: Tensor | None = None
        self.texts: Tensor | None = None
        self.sums = SumSettings(algorithm=settings.algorithm, small=SMALL if settings.small is None else settings.small)
        self.reference: list[Tensor] = []

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """Measure every format on every number of ranks.

        In one process ranks are emulated (`emulate_tensor_parallel_`); under torchrun the job's ranks are real, and
        with the same number of threads the figures are the same to the last bit.

        Yields:
            All rows so far, with `model` (its folder's name), `kind` (of model), `format`, `tp`, `real` (ranks),
            `algorithm` (of the all-reduce of coded values), `bits_per_value` (of everything sent), `coded` (share of
            the values; the others belong to small sums, which stay in the model's dtype), `sum_error` (relative root
            mean square over the layers; for emulated ranks), `token_error` (the same with equal weight for every
            token), `layers`, `layers_by_token` (the same by layer), `calibration` (its text).

            Models that predict tokens add `perplexity` (NaN if a sum was), `loss`, `tokens`, `logits_error` (relative
            to the first row: one rank, or on real ranks bf16) and `logits` (digits of the first batch's bits). Encoders
            add `sentences`, `nearest`, `nearest_10` and `rank_correlation`, compared with the first row (`agreement`).
            `generate` adds `same_tokens`, `tokens_before`, `same_texts`, compared with the first row
            (`score.same_tokens`). Tasks add `scores` (by task and metric), `scores_error` (their standard errors),
            `score` (their mean) and, unless nothing was coded, `score_kept` (each over bf16's on the same number of
            ranks), `score_kept_error` and `scores_kept_error` (standard errors). Tasks from files add, by task,
            `chance` (accuracy of random answers), `cut` (questions that lost the beginning of their text),
            `same_answers`, `divergence` and `change` (`tasks.differences` from bf16 on the same number of ranks) with
            `_error` for their standard errors, and `questions` (a list: `answer`, the index of the right choice,
            `log_likelihoods` in nats, and these differences). The command adds `kept` (bf16's
            perplexity over this one) and `scores_kept` (`score` over bf16's), unless nothing was coded.
        """
        if self.rank == 0 and not self.encoder:
            self.sequences.warn_if_fewer(self.settings.sequences)
        rows: list[dict[str, Any]] = []
        with loading.job(self.device):
            if self.ranks > 1:
                agree(None, self._facts(), topic="evaluation")
            calibrations = loading.load_calibrations(self.settings.calibrations)
            self.files = {name: loading.load_calibration(name) for name in self.paths}
            self._check_calibrations(calibrations)
            model = loading.load_model(self.settings.model, self.settings.dtype, self.device)
            used = [calibration for world, calibration in calibrations.items() if world in self.tps]
            for calibration in (*used, *self.files.values()):
                calibration.check(model, calibration.world)
            self.tasks.prepare(model, self.device)
            for case in self._cases(model, calibrations):
                rows = [*rows, self._measure(model, case)]
                yield rows

    def _check_calibrations(self, calibrations: Mapping[int, Calibration]) -> None:
        """Raise, before anything is measured, unless the given files suit all ranks and formats."""
        for name, calibration in self.files.items():
            if wrong := [tp for tp in self.tps if tp not in (1, calibration.world)]:
                raise CalibrationError(
                    f"format is {name}, a calibration for {calibration.world} ranks, and tp is {wrong[0]}; allowed: "
                    f"--tp {calibration.world}"
                )
        names = [name for name in self.settings.compared if name in CALIBRATED]
        for tp in (tp for tp in self.tps if tp > 1 and calibrations and names):
            if tp not in calibrations:
                given = ", ".join(map(str, calibrations))
                raise CalibrationError(
                    f"calibration is for {given} ranks and tp is {tp}; allowed: a file for each number of ranks"
                )
            for name in names:
                _with_features(calibrations[tp], name)

    def _sentences(self) -> list[str]:
        wanted = self.settings.sentences
        chosen = sentences(loading.documents(self.settings, held_out=True), wanted, self.settings.seed)
        if len(chosen) < min(wanted, NEAREST + 2):
            raise ConfigError(
                f"{self.sequences.source} has {len(chosen)} sentences of 40 to 400 characters; "
                f"allowed: at least {NEAREST + 2}"
            )
        if len(chosen) < wanted and self.rank == 0:
            log.warning("sentences is %d, and %s has %d: using all of them", wanted, self.sequences.source, len(chosen))
        return chosen

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
        paths = ("model", "calibration_text", "task_folder", "tokenizer")
        facts = {key: str(value) for key, value in dataclasses.asdict(self.settings).items() if key not in paths}
        calibrations = str(len(self.settings.calibrations))
        # Ranks may have their files in different places.
        facts["formats"] = str([self.files[name].fingerprint() if name in self.files else name
                                for name in self.settings.compared])  # fmt: skip
        return facts | {"text": self.sequences.fingerprint(), "tasks": self.tasks.facts(), "calibrations": calibrations}

    def _cases(self, model: PreTrainedModel, calibrations: Mapping[int, Calibration]) -> Iterator[_Case]:
        warned = False
        for tp in self.tps:
            if tp == 1:
                yield _Case(format=BASELINE, tp=1)
                continue
            calibration: Calibration | None = None
            for name in self.settings.compared:
                if name in self.codecs:
                    yield _Case(format=name, tp=tp, low_bit=self.codecs[name])
                    continue
                if name in self.files:
                    yield _Case(format=self._name(name), tp=tp, low_bit=self.files[name], source=self.files[name].text)
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

    def _name(self, file: str) -> str:
        """Return the name of a calibration in the results: the file's, or its path if another format has that name."""
        names = [Path(name).stem if name in self.files else name for name in (*self.settings.compared, *CALIBRATED)]
        return stem if names.count(stem := Path(file).stem) == 1 and stem != BASELINE else file

    def _calibration(self, model: PreTrainedModel, tp: int, calibrations: Mapping[int, Calibration]) -> Calibration:
        """Return a calibration for `tp` ranks: a given one, the one in the model's folder, or a new one."""
        settings = self.settings
        if tp in calibrations:
            return calibrations[tp]
        in_folder = default_calibration(settings.model, tp)
        if not settings.calibration_text:
            exists = gather_json(in_folder.exists()) if self.ranks > 1 else [in_folder.exists()]
            if all(exists):
                return loading.load_calibration(in_folder)
            if any(exists):
                missing = ", ".join(str(rank) for rank, here in enumerate(exists) if not here)
                where = f"in the model's folder, but not on rank {missing}"
                raise CalibrationError(f"{in_folder.name} is {where}; allowed: on all ranks or none")
        wanted = CalibrationConfig(
            ranks=tp, text=settings.calibration_text, sequences=settings.calibration_sequences,
            **{name: getattr(settings, name) for name in ("model", "length", "tokenizer", "seed", "max_bytes")},
        )  # fmt: skip
        if self.rank == 0:
            log.warning(
                "no calibration for %d ranks is given: making one from %s (lowbit calibrate keeps it)",
                tp, ", ".join(wanted.text) or loading.LIBRARY,
            )  # fmt: skip
        return calibrate.make(model, calibrate.read(wanted), wanted)

    def _measure(self, model: PreTrainedModel, case: _Case) -> dict[str, Any]:
        settings, errors = self.settings, SumErrors()
        scored: Scored | None = None
        if case.low_bit is None:
            installed = Installed()  # one rank: nothing to change
        elif self.ranks > 1:
            installed = low_bit_(model, case.low_bit, settings=self.sums)
        else:
            installed = emulate_tensor_parallel_(model, case.tp, case.low_bit, settings=self.sums, watch=errors)
        with installed:
            measured = self._neighbours(model, case) if self.encoder else self._predict(model, case)
            if settings.generate:
                texts = generate(model, self.sequences, settings.generate, self.device)
                self.texts = texts if self.texts is None else self.texts
                measured |= same_tokens(self.texts, texts)
            if settings.tasks:
                scored = self.tasks.score(model, self.tokenizer.hugging_face(), self.device, str(case))
        traffic = installed.traffic if case.low_bit is not None else None
        if traffic is not None and not traffic.coded and case.format != BASELINE and self.rank == 0:
            small = self.sums.small
            log.warning("%s: nothing was coded: every sum has fewer than %d elements (small)", case, small)
        if scored is not None:
            coded = traffic is None or bool(traffic.coded)
            measured |= self.tasks.row(scored, case.tp, baseline=case.format == BASELINE, coded=coded)
        return {
            "model": Path(settings.model).absolute().name,
            "kind": self.kind,
            "format": case.format,
            "tp": case.tp,
            "real": self.ranks > 1,
            "algorithm": ", ".join(sorted(traffic.algorithms)) or None if traffic else None,
            "bits_per_value": traffic.bits_per_value if traffic else None,
            "coded": traffic.share_coded if traffic else None,
            "small": self.sums.small,
            "sum_error": errors.mean(),
            "token_error": root_mean_square(errors.by_token().values()),
            "layers": errors.relative(),
            "layers_by_token": errors.by_token(),
            "calibration": case.source,
            **measured,
        }

    def _predict(self, model: PreTrainedModel, case: _Case) -> dict[str, Any]:
        settings, windows = self.settings, len(self.sequences.spread(self.settings.sequences))
        with loading.progress_bar(str(case), windows) as progress:
            score = perplexity(
                model, self.sequences, count=settings.sequences, batch=settings.batch, reference=self.reference,
                device=self.device, progress=progress,
            )  # fmt: skip
        if self.ranks > 1:
            agree(None, {"logits": score.logits, "loss": repr(score.loss)}, topic="outcome")
        if not math.isfinite(score.loss) and self.rank == 0:
            log.warning("%s: the loss is %s: a sum over ranks was NaN or infinite", case, score.loss)
        return {"perplexity": score.perplexity, **vars(score)}

    def _neighbours(self, model: PreTrainedModel, case: _Case) -> dict[str, Any]:
        with loading.progress_bar(f"{case}, sentences", len(self.sentences)) as progress:
            vectors = embed(
                model, self.tokenizer.hugging_face(), self.sentences, batch=8 * self.settings.batch,
                device=self.device, progress=progress,
            )  # fmt: skip
        if not bool(vectors.isfinite().all()) and self.rank == 0:
            log.warning("%s: a sentence's vector is NaN or infinite: a sum over ranks was", case)
        self.vectors = vectors if self.vectors is None else self.vectors
        return {"sentences": len(self.sentences), **agreement(self.vectors, vectors)}


def _parsed(name: str) -> Codec:
    try:
        return parse(name)
    except ValueError as error:
        which = "" if name.startswith("feature-int") else f": {error}"  # theirs would ask for a calibration
        allowed = f"{', '.join(CALIBRATED)}, a file of `lowbit calibrate`, or a codec"
        raise ConfigError(f"format is {name!r}; allowed: {allowed}{which}") from error


def _with_features(calibration: Calibration, name: str) -> Calibration:
    """Return the calibration with the features and the gain of one of the formats `CALIBRATED`."""
    if name == STATIC:
        return calibration if calibration.gain == "static" else calibration.select(gain="static")
    if calibration.gain == "static":
        raise CalibrationError(
            f"format is {name}, which has a gain for each token, and the calibration was made with --gain static; "
            f"allowed: --format {STATIC}, or a calibration made with --gain token"
        )
    return calibration.summed(None).select(k=0) if name == "int4" else calibration
