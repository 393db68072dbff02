"""`lowbit bench convergence`: held-out loss of one training run by boundary format, over seeds.

There are three regimes, because low-bit boundaries cost most early in training from scratch, when signals are small
compared with the noise: from scratch after a warm-up, from scratch without one, and fine-tuning from a full-precision
checkpoint on another text at a small learning rate.

A seed sets weights and data order for every format, so each run is compared with the fp32 run of its seed. Rows are
written as runs finish; a repeated call skips them.
"""

import dataclasses
import hashlib
import logging
import math
import operator
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from lowbit.codecs import parse
from lowbit.codecs.names import pair_name
from lowbit_lab.bench.settings import AtLeastTwo, Device, EachOnce, check_device, check_messages
from lowbit_lab.bench.training import RANKS, TrainingRecipe, formats_in
from lowbit_lab.bench.workers import Workers, step_bars
from lowbit_lab.charts import Points
from lowbit_lab.charts.style import family, recommended, row_name, title_of
from lowbit_run.config import ConfigError, NonNegative, Positive, section
from lowbit_run.report import Baseline, Column, Command, Row, Table
from lowbit_run.terminal import console
from lowbit_run.train.config import DataConfig, LoraConfig, ModelConfig, OptimizerConfig, TrainConfig
from lowbit_run.train.data import library_files, load_data
from lowbit_run.train.model import check_lora, vocabulary

log = logging.getLogger(__name__)

Regime = Literal["scratch-warmup", "scratch", "finetune"]
WARM = "scratch-warmup"
TITLES = {
    "scratch-warmup": "from scratch, after warm-up",
    "scratch": "from scratch, no warm-up",
    "finetune": "fine-tuning",
}
REFERENCE = "fp32"
PRETRAIN_SEED = 1234  # unlike the seeds that are compared


@section()
class ConvergenceBenchmark:
    """Training runs to compare."""

    regimes: Annotated[tuple[Regime, ...], EachOnce] = get_args(Regime)
    """scratch-warmup: from scratch, the first steps at full precision. scratch: from scratch, without a warm-up.
    finetune: from a full-precision checkpoint, on another text."""
    boundaries: tuple[str, ...] = ("fp32", "int4", "tah-quant", "tah-quant-published", "aq-sgd", "transform")
    """Formats of activations, by name or in full. tah-quant is our setting of TAH-Quant, tah-quant-published that of
    the paper's v2 (bits by tile), tah-quant-published-token that of its v1 (bits by token). aq-sgd
    runs in fine-tuning only: it needs samples that repeat.
    "gradients:fp8": float32 activations, but gradients stored and all-reduced over two ranks in this format.
    "activations:norm-8": float32 boundaries, but saved activations in 4 bits, norms in 8, attention as it is;
    "activations:agoq": norms in 4, too, as in AGoQ; "activations:attention-8": attention in 8;
    "activations:uniform": everything in 4; "activations:default": the bits of `LayerAware()`. With "+8bit" after these,
    gradients are stored and all-reduced over two ranks in FP8 as well, and the optimizer is torchao's 8-bit AdamW.
    "agoq" is AGoQ as published: "activations:agoq+8bit".
    "anchor:transform": with token anchors, which the warm-up of fine-tuning fits to `model.pretrained`."""
    backward: str = ""
    """Format of gradients next to low-bit activations, unless `boundaries` names it. If omitted, the default of each
    format. fp32, bf16 and fp16 are used both ways."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and data order."""
    model: ModelConfig = ModelConfig()
    """Model to train. Fine-tuning starts from `pretrained` or, without it, from a checkpoint that is trained first."""
    lora: LoraConfig = LoraConfig()
    """Adapters that fine-tuning from `model.pretrained` trains instead of all weights."""
    data: DataConfig = DataConfig(sequence=128, batch=4)
    """Text for training from scratch and for the checkpoint. By default, it leaves out the text for fine-tuning."""
    finetune_text: tuple[str, ...] = ()
    """Files or folders to fine-tune on. If omitted, Python's language reference (pydoc_data/topics.py)."""
    finetune_held_out: tuple[str, ...] = ()
    """Files or folders to evaluate fine-tuning on. If omitted, the last part of the text."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer from scratch and for the checkpoint."""
    device: Device = "cpu"
    """cuda: runs at the same time share the GPUs."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of matrix products."""
    stages: AtLeastTwo = 8
    """Stages of the emulated pipeline. It has one boundary fewer."""
    steps: Positive = 400
    """Steps from scratch."""
    warmup_steps: NonNegative = 100
    """First steps at full precision, in the regime scratch-warmup."""
    pretrain_steps: Positive = 400
    """Steps of the checkpoint for fine-tuning."""
    finetune_steps: Positive = 120
    """Steps of fine-tuning."""
    finetune_warmup_steps: NonNegative = 0
    """First steps of fine-tuning at full precision."""
    finetune_lr: float = 1e-4
    """Highest learning rate of fine-tuning."""
    finetune_samples: Positive = 160
    """Distinct samples to fine-tune on. Each epoch visits all of them."""
    eval_windows: Positive = 256
    """Held-out samples of the final evaluation."""
    jobs: Positive = 1
    """Runs at the same time, each in its own process."""
    threads: Positive = 1
    """PyTorch threads of each run."""
    folder: str = "runs/convergence"
    """Folder for the checkpoint."""

    def __post_init__(self) -> None:
        if self.backward:
            parse(self.backward)
        for boundary in self.boundaries:
            formats = formats_in(boundary, self.backward)
            fitted = self.regimes == ("finetune",) and self.model.pretrained and self.finetune_warmup_steps
            if formats.anchor and (formats.forward.is_plain or not fitted):
                raise ConfigError(
                    f"boundary is {boundary!r}; allowed: a format that codes activations, with regime finetune alone, "
                    "model.pretrained and finetune_warmup_steps above 0: the warm-up fits token anchors"
                )
            for regime in self.regimes:
                check_messages(boundary, formats[:2], _model(self, regime), self.data.batch, self.data.sequence)
            if formats.gradients and self.data.batch % RANKS:
                raise ConfigError(f"data.batch is {self.data.batch}; allowed: multiples of {RANKS}")
        if self.finetune_warmup_steps and "finetune" not in self.regimes:
            raise ConfigError(f"finetune_warmup_steps is {self.finetune_warmup_steps}; allowed: with regime finetune")
        if self.finetune_warmup_steps >= self.finetune_steps:
            raise ConfigError(
                f"finetune_warmup_steps is {self.finetune_warmup_steps}; allowed: fewer than finetune_steps "
                f"({self.finetune_steps})"
            )
        check_lora(TrainConfig(model=self.model, lora=self.lora))
        if not self.model.pretrained and self.stages > self.model.layers:
            raise ConfigError(f"stages is {self.stages}; allowed: at most model.layers ({self.model.layers})")


def _model(settings: ConvergenceBenchmark, regime: str) -> ModelConfig:
    """Return the model of a regime: without pretrained weights unless it is fine-tuned."""
    return settings.model if regime == "finetune" else replace(settings.model, pretrained="")


def recipe(settings: ConvergenceBenchmark, regime: str) -> TrainingRecipe:
    """Return the training run of a regime ("pretrain": of the checkpoint that fine-tuning starts from)."""
    finetune = regime == "finetune"
    pretrained = settings.model.pretrained if finetune else ""
    data, optimizer = settings.data, settings.optimizer
    if finetune:
        reference = Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")
        text = settings.finetune_text or (str(reference),)
        data = replace(data, text=text, held_out=settings.finetune_held_out, tokenizer=pretrained or data.tokenizer)
        optimizer = replace(optimizer, lr=settings.finetune_lr, lr_warmup_steps=10)
    elif not (data.text or data.dataset):  # leave out the language reference, which is for fine-tuning
        data = replace(data, text=tuple(str(p) for p in library_files() if p.parent.name != "pydoc_data"))
    steps = {"finetune": settings.finetune_steps, "pretrain": settings.pretrain_steps}
    return TrainingRecipe(
        model=_model(settings, regime),
        lora=settings.lora if finetune else LoraConfig(),
        data=data,
        optimizer=optimizer,
        steps=steps.get(regime, settings.steps),
        warmup_steps={WARM: settings.warmup_steps, "finetune": settings.finetune_warmup_steps}.get(regime, 0),
        stages=settings.stages,
        samples=settings.finetune_samples if finetune else 0,
        eval_windows=settings.eval_windows,
        start=str(_checkpoint(settings)) if finetune and not pretrained else "",
        device=settings.device,
        precision=settings.precision,
    )


def _checkpoint(settings: ConvergenceBenchmark) -> Path:
    """Return the file of the weights that fine-tuning starts from, named by a hash of their training settings."""
    names = ("model", "data", "optimizer", "pretrain_steps", "precision")
    text = repr([getattr(settings, name) for name in names])
    return Path(settings.folder) / f"pretrained-{hashlib.sha256(text.encode()).hexdigest()[:12]}.pt"


def measure(settings: ConvergenceBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Train every combination that `earlier` rows lack.

    Yields:
        Rows, one for each run: `regime`, `boundary`, `forward` and `backward` (its formats in full), `seed`,
        `over_fp32` (`loss` minus that of fp32 with the same seed; None without one), `over_fp32_codecs` (likewise,
        evaluated through the codecs) and the fields of `lowbit_lab.bench.training.train`.
    """
    check_device(settings.device)
    for row in earlier:
        if row["boundary"] in settings.boundaries:
            formats = formats_in(row["boundary"], settings.backward)
            for way, codec in {"forward": formats.forward, "backward": formats.backward}.items():
                if parse(row[way]) != codec:
                    raise ConfigError(
                        f"the JSON file holds rows of {row['boundary']} with {row[way]} {way}; this call has {codec}: "
                        "name another file"
                    )
    rows, key = list(earlier), operator.itemgetter(*COMMAND.key)
    known = set(map(key, rows))
    runs = [one for one in planned(settings) if key(one) not in known]
    recipes = {regime: recipe(settings, regime) for regime in {one["regime"] for one in runs}}
    for needed in recipes.values():  # so that an unusable text or vocabulary is an error here, not in a worker
        vocabulary(needed.model, load_data(needed.data, pretrained=needed.model.pretrained).tokenizer.size)
    yield rows
    tuned = recipes.get("finetune")
    if tuned and tuned.start and not Path(tuned.start).exists():
        first = {"regime": "pretrain", "boundary": REFERENCE, "seed": PRETRAIN_SEED, "backward": settings.backward}
        list(train_all(settings, [first], {"pretrain": recipe(settings, "pretrain")}, keep=tuned.start))
    for row in train_all(settings, runs, recipes):
        rows.append(row)
        yield rows


def planned(settings: ConvergenceBenchmark) -> list[dict[str, Any]]:
    """Return all runs in the order in which they start; those that need samples to come again are for fine-tuning."""
    keyed = [each for each in settings.boundaries if formats_in(each, settings.backward).forward.needs_key]
    if keyed and (others := [regime for regime in settings.regimes if regime != "finetune"]):
        log.warning("%s left out of %s, where no sample comes again", ", ".join(keyed), ", ".join(others))
    return [
        {"regime": regime, "boundary": boundary, "seed": seed, "backward": settings.backward}
        for regime in settings.regimes
        for boundary in settings.boundaries
        if regime == "finetune" or boundary not in keyed
        for seed in settings.seeds
    ]


def train_all(
    settings: ConvergenceBenchmark, runs: Sequence[dict[str, Any]], recipes: dict[str, TrainingRecipe], keep: str = ""
) -> Iterator[Row]:
    """Train, `jobs` at a time, and yield a row as each run ends; `keep`: file for the weights."""
    orders = [
        {**one, "recipe": dataclasses.asdict(recipes[one["regime"]]), "threads": settings.threads, "keep": keep}
        for one in runs
    ]
    steps = {"steps": sum(recipes[one["regime"]].steps for one in runs)}
    with (
        step_bars(steps, console(stderr=True)) as step,
        Workers("lowbit_lab.bench.training", min(settings.jobs, max(1, len(runs)))) as workers,
    ):
        yield from workers.share("train", orders, on_progress=lambda line: step("steps", line))


def summarized(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each regime and boundary: means over the seeds, if all have a finite loss.

    Seeds without a run of fp32 do not count where others have one. `diverged`: seeds without a finite loss.
    `over_fp32_spread` is the sample standard deviation of the differences from fp32. It is smaller than that of the
    losses, because a seed that is easy for one format is easy for all.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: list(TITLES).index(row["regime"])):
        groups.setdefault((row["regime"], row["boundary"]), []).append(row)
    result = []
    for (regime, boundary), group in groups.items():
        names = ("loss", "bits_forward", "bits_backward", "state_bytes")
        diverged = sum(each["loss"] is None or not math.isfinite(each["loss"]) for each in group)
        group = group if diverged else [each for each in group if each.get("over_fp32") is not None] or group
        row = {"regime": regime, "boundary": pair_name(boundary), "seeds": len(group), "diverged": diverged}
        row |= {name: statistics.fmean(each[name] for each in group) for name in names[diverged > 0 :]}
        row = {**row, "loss": None if diverged else row["loss"]}
        for name in ("over_fp32_codecs", "over_fp32"):
            over = [each[name] for each in group if each.get(name) is not None] if not diverged else []
            row[name] = statistics.fmean(over) if over else None
            row[f"{name}_spread"] = statistics.stdev(over) if len(over) > 1 else None
        row |= {"lowest": min(over, default=None), "highest": max(over, default=None)}
        row["bits_total"] = row["bits_forward"] + row["bits_backward"]
        result.append(row)
    return result


def _finding(rows: Sequence[Row]) -> str:
    """State what the recommended format costs, compared with the published one, in the first regime."""
    rows = [row for row in rows if row["regime"] == rows[0]["regime"] and row["over_fp32"] is not None]
    rivals = [row for row in rows if family(row["boundary"]) == "tah-quant-published"]
    shown = [row for row in (recommended(rows, "boundary"), *rivals[:1]) if row]
    texts = [f"{title_of(row['boundary'])}: {_cost(row)} in {row['bits_total']:.1f} bits" for row in shown]
    return "; ".join(texts) or "Held-out loss by bits of the boundary format"


def _cost(row: Row) -> str:
    cost, spread = round(row["over_fp32"], 3), row["over_fp32_spread"]
    if spread is not None and abs(row["over_fp32"]) <= spread:
        return "no measurable difference"
    return f"{cost:+.3f} nats" if cost else "0.000 nats"


COMMAND = Command(
    name="bench convergence",
    summary="Held-out loss of one training run by boundary format, over seeds.",
    examples=(
        "lowbit bench convergence --regime scratch --boundary fp32,transform --seed 0",
        "lowbit bench convergence --json convergence.json --png convergence.png",
    ),
    settings=ConvergenceBenchmark,
    measure=measure,
    key=("regime", "boundary", "seed"),
    free=("regimes", "boundaries", "backward", "seeds", "jobs", "threads", "folder"),
    live=False,
    baselines=[
        Baseline(field=field, value=value, to={"boundary": REFERENCE}, alike=("regime", "seed"), way="minus")
        for field, value in (("over_fp32", "loss"), ("over_fp32_codecs", "loss_through_codecs"))
    ],
    tables=[
        Table(
            rows=summarized,
            each="regime",
            title=lambda rows: f"Held-out loss, nats a token: {TITLES[rows[0]['regime']]}",
            columns=[
                Column("boundary", "boundary", row_name),
                Column("bits\nfwd", "bits_forward", "{:.2f}"),
                Column("bits\nbwd", "bits_backward", "{:.2f}"),
                Column("bits\nboth", "bits_total", "{:.2f}"),
                Column("loss", "loss", "{:.4f}"),
                Column("over\nfp32", "over_fp32", "{:+.4f}"),
                Column("±", "over_fp32_spread", "{:.4f}"),
                Column("with\ncodecs", "over_fp32_codecs", "{:+.4f}"),
                Column("±", "over_fp32_codecs_spread", "{:.4f}"),
                Column("seeds", lambda row: f"{row['seeds']}" + (f", {d} diverged" if (d := row["diverged"]) else "")),
                Column("state\nMB", lambda row: row["state_bytes"] / 1e6, "{:.1f}"),
            ],
        )
    ],
    charts=[
        # From scratch, both small and large differences matter: the scale is linear up to 0.01 nats.
        Points(
            rows=lambda rows: [
                row for row in summarized(rows) if row["over_fp32"] is not None and row["boundary"] != REFERENCE
            ],
            panel=lambda row: TITLES[row["regime"]],
            series="boundary", x="bits_total", low="lowest", y="over_fp32", high="highest", linear=0.01,
            x_ticks=(4, 6, 8, 10, 12, 16, 24, 32, 48, 64),
            y_ticks=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            x_label="bits per element, forward and backward together", label="loss above FP32, nats per token",
            zero="FP32", title=_finding, height=4.2,
            subtitle="Held-out loss minus that of FP32 of the same seed: mean and range. Lower left is better.",
        )
    ],
)  # fmt: skip
