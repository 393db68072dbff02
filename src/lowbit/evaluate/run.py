"""`lowbit evaluate`: perplexity and zero-shot scores of a model whose tensor-parallel sums travel in few bits."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
from lowbit.ranks.groups import default_group
from lowbit.ranks.objects import gather_json
from lowbit.ranks.process_group import world
from lowbit.tensor_parallel import (
    Calibration,
    CalibrationError,
    Drift,
    Settings,
    Traffic,
    emulate_tensor_parallel_,
    low_bit_,
)
from lowbit.train import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def run(settings: EvaluateSettings, *, on_rows: Callable[[Sequence[Row]], None] | None = None) -> Report:
    """Measure every format on every number of ranks.

    In one process ranks are played (`emulate_tensor_parallel_`); under torchrun the job's ranks are real, and the
    figures the same to the last bit, with as many threads.

    Args:
        on_rows: called with the rows so far after each.

    Returns:
        A report whose rows have `format`, `tp`, `real` (ranks), `algorithm` (of the all-reduce of what was coded),
        `perplexity` (NaN where a sum was), `kept` (bf16's perplexity over this one), `loss`, `tokens`, `bits_per_value`
        (of all that travelled), `coded` (share of the values; the others are of sums that are too small, and travel in
        the model's dtype), `clipped` (share of the coded partial sums beyond their calibrated ranges), `logits_error`
        (relative, to the first row's: one rank, or on real ranks bf16), `logits` (digits of the first batch's bits),
        `boundary_error` (relative root mean square over the boundaries; where ranks are played), `boundaries` (the same
        of each), `calibration` (what from), and with tasks `scores` (by task and metric) and `scores_kept` (the mean
        over the tasks, of each the mean of its metrics, over bf16's).

    Raises:
        ConfigError, ValueError: settings, model or text that cannot be used.
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

    def __init__(self, settings: EvaluateSettings, on_rows: Callable[[Sequence[Row]], None] | None = None) -> None:
        formats.check(settings.compared)
        self.settings, self._on_rows = settings, on_rows
        self.rank, self.ranks = world()
        self.device = loading.find_device(settings.device, self.ranks)
        loading.check_length(settings.model, settings.length)
        self.tps = self._tps()
        self._given: dict[int, Calibration] = {}
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
        self._warned = False

    def run(self) -> Report:
        """As `run`."""
        settings = self.settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        if self.rank == 0:
            self.sequences.warn_if_fewer(settings.sequences)
        with calibrate.job(self.device):
            if self.ranks > 1:
                agree(None, self._facts(), topic="evaluation")
            self._given = _load_calibrations(settings.calibrations)
            model = calibrate.parallel_model(settings.model, settings.dtype, self.device)
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
        return facts | {
            "text": self.sequences.fingerprint(),
            "calibrations": str(len(self.settings.calibrations)),
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
                        self._warn_of_same_text(source)
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
            found = calibrate.load(beside)
            return found, found.text
        wanted = CalibrateSettings(
            model=settings.model,
            ranks=tp,
            text=settings.calibration_text,
            sequences=settings.calibration_sequences,
            **{name: getattr(settings, name) for name in ("length", "tokenizer", "seed", "max_bytes")},
        )
        if self.rank == 0:
            log.warning(
                "no calibration for %d ranks is given: making one from %s (lowbit calibrate keeps it)",
                tp, ", ".join(wanted.text) or text.LIBRARY,
            )  # fmt: skip
        found = calibrate.make(model, calibrate.draw(wanted), wanted, keep_state=False)
        return found, found.text

    def _warn_of_same_text(self, source: str) -> None:
        same = f"tokens {self.sequences.fingerprint()}" in source
        if same and self.rank == 0 and not self._warned:
            self._warned = True
            log.warning(
                "text is %s, and the calibration was made from the same: what it says of other text may be too good",
                self.sequences.source,
            )

    def _all_have(self, path: Path) -> bool:
        """Whether the file is there, decided alike on all ranks."""
        if self.ranks == 1:
            return path.exists()
        found = gather_json(path.exists())
        if len(set(found)) > 1:
            missing = ", ".join(str(rank) for rank, there in enumerate(found) if not there)
            raise CalibrationError(
                f"{path.name} is in the model's folder, but not on rank {missing}; allowed: on all ranks or none"
            )
        return found[0]

    def _measure(self, model: PreTrainedModel, case: _Case) -> dict[str, Any]:
        settings, watch = self.settings, _Watch(case)
        with self._parallel(model, case, watch):
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
        if not math.isfinite(score.loss) and self.rank == 0:
            log.warning(
                "%s, tp %d: the loss is %s: a sum over ranks was NaN or infinite",
                case.format, case.tp, score.loss,
            )  # fmt: skip
        return self._row(case, score, watch, scores)

    @contextlib.contextmanager
    def _parallel(self, model: PreTrainedModel, case: _Case, watch: _Watch) -> Iterator[None]:
        """The model with its sums in this format; as it was afterwards."""
        if case.low_bit is None:
            yield
            return
        given: dict[str, Any] = {"settings": self.travel, "drift": watch.drift}
        if self.ranks > 1:
            parallel: Any = low_bit_(model, case.low_bit, **given)
        else:
            parallel = emulate_tensor_parallel_(model, case.tp, case.low_bit, watch=watch.errors, **given)
        watch.traffic = parallel.traffic
        with parallel:
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

    def _row(self, case: _Case, score: Score, watch: _Watch, scores: dict[str, float] | None) -> dict[str, Any]:
        traffic = watch.traffic
        row = {
            "format": case.format,
            "tp": case.tp,
            "real": self.ranks > 1,
            "algorithm": ", ".join(sorted(traffic.algorithms)) or None if traffic else None,
            "perplexity": score.perplexity,
            "kept": None,
            "loss": score.loss,
            "tokens": score.tokens,
            "bits_per_value": traffic.bits_per_value if traffic else None,
            "coded": traffic.share_coded if traffic else None,
            "clipped": watch.clipped(self.ranks > 1),
            "logits_error": score.logits_error,
            "logits": score.logits,
            "boundary_error": watch.errors.mean(),
            "boundaries": watch.errors.relative(),
            "calibration": case.source,
        }
        return row if scores is None else row | {"scores": scores, "scores_kept": None}

    def _compare(self) -> None:
        """Fill in the last row's comparison with bf16 on as many ranks."""
        row = self.rows[-1]
        base = next(r for r in self.rows if r["format"] == BASE and r["tp"] == row["tp"])
        row["kept"] = base["perplexity"] / row["perplexity"]
        if "scores" in row and (before := mean_score(base["scores"])):
            row["scores_kept"] = mean_score(row["scores"]) / before


class _Watch:
    """What is seen of a case's sums while it runs."""

    def __init__(self, case: _Case) -> None:
        self.errors = BoundaryErrors()
        self.traffic: Traffic | None = None
        # shares are columns here, so no warnings; one sample of the error, which nobody looks at
        calibrated = isinstance(case.low_bit, Calibration)
        self.drift = Drift(threshold=1.0, every=1 << 30) if calibrated else None

    def clipped(self, real: bool) -> float | None:
        """Share of the coded partial sums that were cut; to be called by all real ranks. None: ranges that travel."""
        if self.drift is None:
            return None
        rows = self.drift.report(default_group() if real else None).rows
        values = sum(row.values for row in rows)
        return sum(row.clipped * row.values for row in rows) / values if values else None


def _load_calibrations(files: tuple[str, ...]) -> dict[int, Calibration]:
    """Calibrations by their number of ranks.

    Raises:
        CalibrationError: one cannot be read.
        ConfigError: two for the same number.
    """
    found: dict[int, Calibration] = {}
    for file in files:
        loaded = calibrate.load(Path(file))
        if loaded.world in found:
            raise ConfigError(
                f"calibration has two files for {loaded.world} ranks; allowed: one for each number of ranks"
            )
        found[loaded.world] = loaded
    return found


def mean_score(scores: Mapping[str, float]) -> float:
    """Mean over the tasks, of each the mean of its metrics; by "task metric"."""
    by_task: dict[str, list[float]] = {}
    for name, value in scores.items():
        by_task.setdefault(name.partition(" ")[0], []).append(value)
    return statistics.fmean(map(statistics.fmean, by_task.values())) if by_task else 0.0


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
