"""`lowbit bench convergence`: the same training run with every boundary format, over several seeds.

Three regimes, because low-bit boundaries cost most early in training from scratch, where signals are small beside the
noise: from scratch after some steps at full precision, from scratch without, and fine-tuning from a full-precision
checkpoint on another text at a small learning rate.

Design in pairs: a seed sets weights and data order, for every format alike, so what counts is the difference from the
fp32 run of the same seed, and its spread over the seeds. Rows are written as runs finish; a repeated call skips them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit.bench.emulated import (
    Recipe,
    activation_policy,
    codec_pair,
    formats_of,
    gradient_codec,
)
from lowbit.bench.jobs import Job, Task, finish
from lowbit.bench.losses import REFERENCE
from lowbit.bench.pipeline import check_formats
from lowbit.bench.replicas import RANKS
from lowbit.bench.report import Report, Row, machine
from lowbit.codecs import parse
from lowbit.codecs.checks import check_choice
from lowbit.pipeline.arguments import check_warm_up
from lowbit.train.config import DataConfig, ModelConfig, OptimizerConfig
from lowbit.train.corpus import library_files
from lowbit.train.data import load_data
from lowbit.train.model import hidden_size, vocabulary

WARM = "scratch-warmup"
REGIMES = (WARM, "scratch", "finetune")
PRETRAIN_SEED = 1234  # apart from the seeds that are compared


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained, on what, and with which boundaries.

    Args:
        regimes: scratch-warmup (from scratch, some steps at full precision first), scratch, finetune (from a
            full-precision checkpoint, on another text).
        boundaries: forward formats, by name or in full. aq-sgd, which codes what changed since a sample was last seen,
            runs in fine-tuning only: from scratch no sample is seen twice. "gradients:fp8": float32 at the boundaries,
            and gradients kept between micro-batches of one sample, and all-reduced over two ranks, in this format.
            "activations:low-bit", "activations:norm-4", "activations:attention-8", "activations:uniform": float32 at
            the boundaries, and what autograd keeps in 4 bits, 8 for norms; in 4 for norms, too; with attention's
            tensors in 8; and in 4 for everything.
        backward: format of the gradients beside low-bit forward formats that do not name their own ("int4 / int6");
            if omitted, its default. fp32, bf16 and fp16 travel alike both ways. SubspaceQuant(directions='auto') needs
            a regime with a warm-up.
        seeds: of weights and data order.
        device: "cpu" or "cuda"; with several devices, runs at the same time take them in turn.
        precision: of the computation: "fp32", or "bf16" (autocast).
        text: files or folders to train on from scratch, and for the checkpoint; absent: Python's standard library.
        held_out: likewise, to evaluate on; absent: the last part of the text.
        finetune_text: files or folders to fine-tune on; absent: Python's language reference (pydoc_data/topics.py).
        finetune_held_out: likewise, to evaluate on; absent: the last part of the text.
        max_bytes: read no more text than this.
        tokenizer: "bytes", or a local folder with a Hugging Face tokenizer.
        pretrained: local Hugging Face folder to fine-tune instead of a checkpoint trained here.
        family: architecture of the model that is trained: llama, gpt2, ... as in `lowbit train`.
        vocab: entries of its embedding; 0: as many as the tokenizer has.
        dim: its width.
        layers: its decoder layers.
        heads: its attention heads.
        stages: how many the pipeline would have; it has one boundary fewer.
        sequence: tokens of a sample.
        batch: samples of a step.
        steps: from scratch.
        warmup_steps: so many of them at full precision, where the regime has a warm-up.
        lr: highest learning rate from scratch; lr_warmup_steps: of its rise.
        pretrain_steps: of the checkpoint that is fine-tuned.
        finetune_steps: of fine-tuning.
        finetune_lr: highest learning rate of fine-tuning.
        finetune_samples: distinct samples to fine-tune on, seen again in every epoch.
        eval_windows: held-out samples of the final evaluation.
        jobs: runs at a time, each in its own process.
        threads: of each run.
        folder: where the checkpoint is kept.
    """

    regimes: tuple[str, ...] = REGIMES
    boundaries: tuple[str, ...] = (
        "fp32",
        "int4",
        "tah-quant",
        "tah-quant-published",
        "aq-sgd",
        "subspace",
    )
    backward: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    device: str = "cpu"
    precision: str = "fp32"
    text: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    finetune_text: tuple[str, ...] = ()
    finetune_held_out: tuple[str, ...] = ()
    max_bytes: int = 16_000_000
    tokenizer: str = "bytes"
    pretrained: str = ""
    family: str = "llama"
    vocab: int = 0
    dim: int = 256
    layers: int = 8
    heads: int = 4
    stages: int = 8
    sequence: int = 128
    batch: int = 4
    steps: int = 400
    warmup_steps: int = 100
    lr: float = 1e-3
    lr_warmup_steps: int = 20
    pretrain_steps: int = 400
    finetune_steps: int = 120
    finetune_lr: float = 1e-4
    finetune_samples: int = 160
    eval_windows: int = 256
    jobs: int = 1
    threads: int = 1
    folder: str = "runs/convergence"

    def __post_init__(self) -> None:
        unknown = [regime for regime in self.regimes if regime not in REGIMES]
        if unknown or not self.regimes:
            raise ValueError(f"regimes is {self.regimes}; allowed: {', '.join(REGIMES)}")
        check_choice("device", self.device, ("cpu", "cuda"))
        check_choice("precision", self.precision, ("fp32", "bf16"))
        _model(self, pretrained=False)
        if self.backward:
            parse(self.backward)
        for boundary in self.boundaries:
            _check_codecs(self, boundary)
            activation_policy(boundary)
            if gradient_codec(boundary) and self.batch % RANKS:
                raise ValueError(f"batch is {self.batch}; allowed: multiples of {RANKS}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")
        if not self.pretrained and self.stages > self.layers:
            raise ValueError(f"stages is {self.stages}; allowed: at most layers ({self.layers})")

    def identity(self) -> dict[str, Any]:
        """The settings that rows must share to be compared with each other; each row tells its own formats."""
        free = ("regimes", "boundaries", "backward", "seeds", "jobs", "threads", "folder")
        values = json.loads(json.dumps(dataclasses.asdict(self)))
        return {name: value for name, value in values.items() if name not in free}


_LEAST = {
    "stages": 2, "sequence": 8, "batch": 1, "steps": 1, "warmup_steps": 0, "pretrain_steps": 1, "finetune_steps": 1,
    "finetune_samples": 1, "eval_windows": 1, "jobs": 1, "threads": 1, "lr_warmup_steps": 0, "max_bytes": 1,
}  # fmt: skip


def run(settings: Settings, *, file: Path | None = None) -> Report:
    """Train every combination that `file` does not hold yet.

    Args:
        settings: what to compare.
        file: JSON that is read first, if it is there, and written again after each run.

    Returns:
        A report with a row for each run: `regime`, `boundary`, `forward` and `backward` (its formats in full), `seed`,
        `loss` (held-out, nats a token, of the trained
        model by itself), `over_fp32` (less the fp32 run's of the same seed; None without one) and what
        `lowbit.bench.emulated.train` measures.

    Raises:
        ValueError: `file` holds rows of other settings, or of a boundary with other formats; or text, folder,
            checkpoint or device cannot be used.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda; this machine has none that PyTorch can use; allowed: cpu")
    rows = _read(file, settings) if file else []
    known = {(row["regime"], row["boundary"], row["seed"]) for row in rows}
    jobs = [job for job in planned(settings) if (job.regime, job.boundary, job.seed) not in known]
    recipes = {regime: recipe(settings, regime) for regime in {job.regime for job in jobs}}
    for needed in recipes.values():  # what cannot work is an error here, not in a worker
        vocabulary(needed.model, load_data(needed.data).tokenizer.size)
    report = _report(settings, rows)
    for row in _train_all(settings, jobs, recipes):
        report = _report(settings, [*report.rows, row])
        if file:
            report.write_json(file)
    return report


def planned(settings: Settings) -> list[Job]:
    """All runs, in the order in which they start."""
    return [
        Job(regime, boundary, seed, settings.backward)
        for regime in settings.regimes
        for boundary in settings.boundaries
        if regime == "finetune" or not codec_pair(boundary, settings.backward)[0].needs_key
        for seed in settings.seeds
    ]


def recipe(settings: Settings, regime: str) -> Recipe:
    """The training run of a regime ("pretrain": of the checkpoint that fine-tuning starts from)."""
    finetune = regime == "finetune"
    text = settings.finetune_text if finetune else settings.text
    held_out = settings.finetune_held_out if finetune else settings.held_out
    lr = settings.finetune_lr if finetune else settings.lr
    steps = {"finetune": settings.finetune_steps, "pretrain": settings.pretrain_steps}
    return Recipe(
        model=_model(settings, pretrained=finetune),
        data=DataConfig(
            text=text or (_language_reference() if finetune else _library()),
            held_out=held_out,
            tokenizer=(finetune and settings.pretrained) or settings.tokenizer,
            max_bytes=settings.max_bytes,
            sequence=settings.sequence,
            batch=settings.batch,
        ),
        optimizer=OptimizerConfig(lr=lr, lr_warmup_steps=10 if finetune else settings.lr_warmup_steps),
        steps=steps.get(regime, settings.steps),
        warmup_steps=warmup_steps(settings, regime),
        stages=settings.stages,
        samples=settings.finetune_samples if finetune else 0,
        eval_windows=settings.eval_windows,
        start=str(_checkpoint(settings)) if finetune and not settings.pretrained else "",
        device=settings.device,
        precision=settings.precision,
    )


def warmup_steps(settings: Settings, regime: str) -> int:
    """Steps at full precision in a regime."""
    return settings.warmup_steps if regime == WARM else 0


def _check_codecs(settings: Settings, boundary: str) -> None:
    """Check a boundary's formats against every regime that it is to run in.

    Raises:
        ValueError: one needs a warm-up that is not there, or cannot code the model's activations.
    """
    codecs = codec_pair(boundary, settings.backward)
    for codec in codecs:
        if not codec.settled and settings.regimes != (WARM,):
            raise ValueError(
                f"regimes is {settings.regimes}, and boundary {boundary!r} has {codec}, which is settled "
                f"in a warm-up; allowed with it: {WARM}"
            )
        check_warm_up(f"boundary {boundary!r}", codec, settings.warmup_steps)
    for regime in settings.regimes:
        width = hidden_size(_model(settings, pretrained=regime == "finetune"))
        if width is not None:
            check_formats(boundary, (codec for codec in codecs if codec.settled), width)


def _model(settings: Settings, *, pretrained: bool) -> ModelConfig:
    if pretrained and settings.pretrained:
        return ModelConfig(pretrained=settings.pretrained)
    names = ("family", "vocab", "dim", "layers", "heads")
    return ModelConfig(**{name: getattr(settings, name) for name in names})


def _library() -> tuple[str, ...]:
    """Python's standard library without the language reference, which is for fine-tuning."""
    return tuple(str(path) for path in library_files() if path.parent.name != "pydoc_data")


def _language_reference() -> tuple[str, ...]:
    return (str(Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")),)


def _checkpoint(settings: Settings) -> Path:
    """Where the weights lie that fine-tuning starts from; a name for each way of making them."""
    names = (
        "text", "held_out", "max_bytes", "tokenizer", "family", "vocab", "dim", "layers", "heads", "sequence", "batch",
        "pretrain_steps", "lr", "lr_warmup_steps", "precision",
    )  # fmt: skip
    text = repr([getattr(settings, name) for name in names])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Path(settings.folder) / f"pretrained-{digest}.pt"


def _train_all(settings: Settings, jobs: list[Job], recipes: dict[str, Recipe]) -> Iterator[Row]:
    """Rows, as the runs finish; first, if any run starts from it, the checkpoint."""
    for tuned in recipes.values():
        if tuned.start and not Path(tuned.start).exists():
            job = Job("pretrain", REFERENCE, PRETRAIN_SEED, settings.backward)
            task = Task(job, recipe(settings, "pretrain"), keep=tuned.start)
            list(finish([task], jobs=1, threads=settings.threads))
    tasks = [Task(job, recipes[job.regime]) for job in jobs]
    yield from finish(tasks, jobs=settings.jobs, threads=settings.threads)


def _report(settings: Settings, rows: Sequence[Row]) -> Report:
    reference = {(row["regime"], row["seed"]): row["loss"] for row in rows if row["boundary"] == REFERENCE}
    compared = []
    for row in rows:
        against = reference.get((row["regime"], row["seed"]))
        over = None if against is None else row["loss"] - against
        compared.append({**row, "over_fp32": over})
    return Report(
        command="bench convergence",
        settings=settings,
        machine=machine(),
        rows=compared,
    )


def _read(file: Path, settings: Settings) -> list[Row]:
    """Rows of an earlier call with the same settings."""
    if not file.exists():
        return []
    earlier = Report.read_json(file, command="bench convergence", fields=("regime", "boundary", "seed", "loss"))
    found = Settings().identity() | earlier.settings  # a setting that is newer than the file was as by default
    for name, value in settings.identity().items():
        if found[name] != value:
            raise ValueError(
                f"{file} holds runs with {name} {found[name]!r}; this call has {value!r}: name another file"
            )
    rows = []
    for row in earlier.rows:  # older files tell formats by their settings
        formats = formats_of(row["boundary"], earlier.settings.get("backward", ""))
        rows.append({**formats, **row})
        now = formats_of(row["boundary"], settings.backward)
        for direction, text in now.items() if row["boundary"] in settings.boundaries else ():
            if parse(rows[-1][direction]) != parse(text):
                raise ValueError(
                    f"{file} holds runs of {row['boundary']} with {rows[-1][direction]} {direction}; "
                    f"this call has {text}: name another file"
                )
    return rows
