"""`lowbit evaluate`: perplexity and zero-shot scores of a model whose tensor-parallel sums travel in few bits."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lowbit.bench.report import Report, Row, machine
from lowbit.codecs import Codec
from lowbit.collectives import agree
from lowbit.evaluate import calibrate, formats, loading, text
from lowbit.evaluate.score import BoundaryErrors, Reference, Score, perplexity
from lowbit.evaluate.settings import (
    BASE,
    CalibrateSettings,
    EvaluateSettings,
    default_calibration,
)
from lowbit.tensor_parallel import (
    Calibration,
    CalibrationError,
    Settings,
    emulate_tensor_parallel_,
    low_bit_,
)
from lowbit.train import ConfigError
from lowbit.train.process_group import world

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def run(
    settings: EvaluateSettings, *, on_rows: Callable[[Sequence[Row]], None] | None = None
) -> Report:
    """Measure every format on every number of ranks.

    In one process ranks are played (`emulate_tensor_parallel_`); under torchrun the job's ranks are real, and the
    figures the same to the last bit, with as many threads.

    Args:
        on_rows: called with the rows so far after each.

    Returns:
        A report whose rows have `format`, `tp`, `real` (ranks), `perplexity`, `kept` (bf16's perplexity over this one),
        `loss`, `tokens`, `bits_per_value`, `logits_error` (relative, to the first row's: one rank, or on real ranks
        bf16), `logits` (digits of the first batch's bits), `boundary_error` (relative root mean square over the
        boundaries; where ranks are played), `boundaries` (the same of each), `calibration` (what from), and with tasks
        `scores` (by task and metric) and `scores_kept` (their mean over bf16's).

    Raises:
        ConfigError, ValueError: settings, model or text that can not be used.
        CalibrationError: a calibration for something else.
        AgreementError: ranks that do not hold the same.
    """
    return Evaluation(settings, on_rows).run()


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One row to measure."""

    format: str
    tp: int
    low_bit: Calibration | Codec | None  # None: one rank, no sum
    source: str


class Evaluation:
    """The evaluation of one model."""

    def __init__(
        self, settings: EvaluateSettings, on_rows: Callable[[Sequence[Row]], None] | None = None
    ) -> None:
        formats.check(settings.compared)
        self.settings, self._on_rows = settings, on_rows
        self.rank, self.ranks = world()
        self.device = loading.find_device(settings.device, self.ranks)
        loading.check_length(settings.model, settings.length)
        self.tps = self._tps()
        self._given = _load_calibrations(settings.calibrations)
        tokenizer, begin = text.find_tokenizer(settings.tokenizer, settings.model)
        self.tokenizer = tokenizer
        self.sequences = text.read(
            settings.text,
            tokenizer,
            length=settings.length,
            begin=begin,
            max_bytes=settings.max_bytes,
            held_out=True,
        )
        self.travel = Settings(**_given(algorithm=settings.algorithm, small=settings.small))
        self.reference = Reference()
        self.rows: list[dict[str, Any]] = []

    def run(self) -> Report:
        """As `run`."""
        settings = self.settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        with calibrate.parallel_model(settings.model, settings.dtype, self.device) as model:
            if self.ranks > 1:
                agree(None, self._facts(), topic="evaluation")
            for case in self._cases(model):
                self.rows.append(self._measure(model, case))
                self._compare()
                if self._on_rows is not None:
                    self._on_rows(self.rows)
        return Report(command="evaluate", settings=settings, machine=machine(), rows=self.rows)

    def _tps(self) -> tuple[int, ...]:
        settings = self.settings
        possible = loading.possible_ranks(settings.model, tuple(range(1, 129)))
        if self.ranks > 1:
            if settings.tps not in ((), (self.ranks,)):
                raise ConfigError(
                    f"tp is {settings.tps} and this job has {self.ranks} ranks; allowed: no --tp under torchrun"
                )
            wanted = (self.ranks,)
        else:
            wanted = settings.tps or tuple(n for n in (1, 2, 4, 8) if n in possible)
        for tp in wanted:
            if tp not in possible:
                raise ConfigError(
                    f"tp is {tp}; the model's heads can be shared out over {', '.join(map(str, possible))}"
                )
        return wanted

    def _facts(self) -> dict[str, str]:
        """What all ranks must have alike."""
        local = ("model", "text", "calibration_text", "task_folder", "tokenizer", "calibrations")
        values = dataclasses.asdict(self.settings)
        facts = {key: str(value) for key, value in values.items() if key not in local}
        found = self._given.get(self.ranks)
        return facts | {
            "text": self.sequences.fingerprint(),
            "calibration": found.fingerprint() if found else "none",
        }

    def _cases(self, model: PreTrainedModel) -> Iterator[_Case]:
        for tp in self.tps:
            if tp == 1:
                yield _Case(format=BASE, tp=1, low_bit=None, source="")
                continue
            calibration, source = None, ""
            for name in self.settings.compared:
                if name in formats.CALIBRATED:
                    if calibration is None:
                        calibration, source = self._calibration(model, tp)
                    low_bit, told = formats.make(name, calibration), source
                else:
                    low_bit, told = formats.make(name, None), ""
                yield _Case(format=name, tp=tp, low_bit=low_bit, source=told)

    def _calibration(self, model: PreTrainedModel, tp: int) -> tuple[Calibration, str]:
        """The calibration for so many ranks, and what it was made from."""
        settings = self.settings
        if tp in self._given:
            return self._given[tp], self._given[tp].text
        if settings.calibrations:
            there = ", ".join(map(str, self._given))
            raise CalibrationError(
                f"calibration is for {there} ranks and tp is {tp}; allowed: a file for each number of ranks"
            )
        beside = default_calibration(settings.model, tp)
        if not settings.calibration_text and self._all_have(beside):
            found = Calibration.load(beside)
            return found, found.text
        wanted = CalibrateSettings(
            model=settings.model,
            ranks=tp,
            text=settings.calibration_text,
            sequences=settings.calibration_sequences,
            **{name: getattr(settings, name) for name in ("length", "tokenizer", "seed", "max_bytes")},
        )  # fmt: skip
        if self.rank == 0:
            log.warning(
                "no calibration for %d ranks is given: making one from %s (lowbit calibrate keeps it)",
                tp, ", ".join(wanted.text) or text.LIBRARY,
            )  # fmt: skip
        found = calibrate.make(model, calibrate.draw(wanted), wanted, keep_state=False)
        return found, found.text

    def _all_have(self, path: Path) -> bool:
        """Whether the file is there, decided alike on all ranks."""
        if self.ranks == 1:
            return path.exists()
        found: list[bool] = [False] * self.ranks
        dist.all_gather_object(found, path.exists())
        if len(set(found)) > 1:
            missing = ", ".join(str(rank) for rank, there in enumerate(found) if not there)
            raise CalibrationError(
                f"{path.name} is in the model's folder, but not on rank {missing}; allowed: on all ranks or none"
            )
        return found[0]

    def _measure(self, model: PreTrainedModel, case: _Case) -> dict[str, Any]:
        errors = BoundaryErrors()
        settings = self.settings
        with self._parallel(model, case, errors):
            windows = len(self.sequences.spread(settings.sequences))
            with calibrate.progress_bar(f"{case.format}, tp {case.tp}", windows) as advance:
                score = perplexity(
                    model,
                    self.sequences,
                    count=settings.sequences,
                    batch=settings.batch,
                    reference=self.reference,
                    device=self.device,
                    progress=advance,
                )
            scores = self._tasks(model)
        if self.ranks > 1:
            agree(None, {"logits": score.logits, "loss": repr(score.loss)}, topic="outcome")
        return self._row(case, score, errors, scores)

    @contextlib.contextmanager
    def _parallel(
        self, model: PreTrainedModel, case: _Case, errors: BoundaryErrors
    ) -> Iterator[None]:
        """The model with its sums in this format; as it was afterwards."""
        if case.low_bit is None:
            yield
        elif self.ranks > 1:
            with low_bit_(model, case.low_bit, settings=self.travel):
                yield
        else:
            with emulate_tensor_parallel_(
                model, case.tp, case.low_bit, settings=self.travel, watch=errors
            ):
                yield

    def _tasks(self, model: PreTrainedModel) -> dict[str, float] | None:
        settings = self.settings
        if not settings.tasks:
            return None
        from lowbit.evaluate.harness import zero_shot

        return zero_shot(
            model,
            self.tokenizer.hugging_face(),
            tasks=settings.tasks,
            folder=settings.task_folder,
            limit=settings.limit,
            shots=settings.shots,
            batch=settings.batch,
            length=settings.length,
        )

    def _row(
        self, case: _Case, score: Score, errors: BoundaryErrors, scores: dict[str, float] | None
    ) -> dict[str, Any]:
        settings, bits = self.settings, None
        if case.low_bit is not None:
            width = loading.model_config(settings.model)["hidden_size"]
            bits = formats.bits_per_value(case.low_bit, settings.batch * settings.length, width)
        row = {
            "format": case.format,
            "tp": case.tp,
            "real": self.ranks > 1,
            "perplexity": score.perplexity,
            "kept": None,
            "loss": score.loss,
            "tokens": score.tokens,
            "bits_per_value": bits,
            "logits_error": score.logits_error,
            "logits": score.logits,
            "boundary_error": errors.mean(),
            "boundaries": errors.relative(),
            "calibration": case.source,
        }
        return row if scores is None else row | {"scores": scores, "scores_kept": None}

    def _compare(self) -> None:
        """Fill in the last row's comparison with bf16 on as many ranks."""
        row = self.rows[-1]
        base = next(r for r in self.rows if r["format"] == BASE and r["tp"] == row["tp"])
        row["kept"] = base["perplexity"] / row["perplexity"]
        if "scores" in row and (before := sum(base["scores"].values())):
            row["scores_kept"] = sum(row["scores"].values()) / before


def _load_calibrations(files: tuple[str, ...]) -> dict[int, Calibration]:
    """Calibrations by their number of ranks.

    Raises:
        CalibrationError: one can not be read.
        ConfigError: two for the same number.
    """
    found: dict[int, Calibration] = {}
    for file in files:
        loaded = Calibration.load(file)
        if loaded.world in found:
            raise ConfigError(
                f"calibration has two files for {loaded.world} ranks; allowed: one for each number of ranks"
            )
        found[loaded.world] = loaded
    return found


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
