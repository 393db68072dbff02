"""Training runs with a boundary format on several ranks, for the benchmarks of pipelines, and their curves of loss."""

import dataclasses
import json
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.codecs import parse
from lowbit.pipeline import LowBitStage, connect_more
from lowbit.wire.messages import gather_json
from lowbit_lab.bench.settings import STOCK, check_messages, formats_of
from lowbit_lab.bench.stock import StockTrainer
from lowbit_lab.bench.training import capture
from lowbit_lab.bench.workers import TIMEOUT_SECONDS, report_progress, serve
from lowbit_run.config import ConfigError
from lowbit_run.report import Row
from lowbit_run.train.auto import described
from lowbit_run.train.boundaries import make_codecs
from lowbit_run.train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
    from_mapping,
)
from lowbit_run.train.data import Order
from lowbit_run.train.device import choose_device
from lowbit_run.train.layout import make_layout
from lowbit_run.train.loop import Run
from lowbit_run.train.metrics import StepMetrics
from lowbit_run.train.model import StageModule, build_model, count_layers
from lowbit_run.train.prepare import Prepared, prepare
from lowbit_run.train.trainer import Trainer

PROGRAM = "lowbit_lab.bench.runs"
"""The module of the ranks."""
BACKWARD = 2.0
"""Time of a device's backward pass, relative to a forward pass."""
_SMOOTHED_SECONDS = 2.0
THIN_MODEL = ModelConfig(dim=128, layers=8, heads=4, kv_heads=1, ffn=128)
"""A model for which a slow link is the bottleneck even on two CPU cores, as for a large model on GPUs."""
MANY_STAGES = PipelineConfig(ranks=2, stages_per_rank=4, schedule="Interleaved1F1B", microbatches=4)
"""8 stages on 2 ranks: activations cross the link 7 times, and gradients 7 times."""


@dataclass(frozen=True)
class Split:
    """How a model is split and run: `1F1B/1/8` is 1F1B with one stage on each rank and 8 micro-batches."""

    schedule: str
    stages_per_rank: int
    microbatches: int

    @classmethod
    def of(cls, pipeline: PipelineConfig) -> "Split":
        """Return the split of a pipeline."""
        return cls(pipeline.schedule, pipeline.stages_per_rank, pipeline.microbatches)

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Parse the text of a split."""
        match text.split("/"):
            case [schedule, stages, microbatches] if stages.isdecimal() and microbatches.isdecimal():
                return cls(schedule, int(stages), int(microbatches))
        raise ValueError(f"split is {text!r}; allowed: schedule/stages on each rank/micro-batches, such as 1F1B/1/8")

    def __str__(self) -> str:
        return f"{self.schedule}/{self.stages_per_rank}/{self.microbatches}"


def recipe(
    settings: Any,
    boundary: str,
    *,
    model: ModelConfig | None = None,
    data: DataConfig | None = None,
    pipeline: PipelineConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    **run: Any,
) -> TrainConfig:
    """Return the training run of one boundary.

    Args:
        settings: with `model`, `data`, `pipeline`, `backward`, `device`, `precision` and `seed`.
        boundary: a name in `STOCK`, a codec for each direction, or "auto".
        model, data, pipeline, optimizer: replace those of the settings; run: fields of `RunConfig`.
    """
    formats = formats_of(boundary, settings.backward)
    carried: dict[str, Any] = {name: (codec,) for name, codec in formats.items()}
    if boundary in STOCK:
        carried = dict.fromkeys(carried, (boundary.removeprefix("stock-"),)) | {"tied_rows": "fp32"}
    return TrainConfig(
        model=model or settings.model,
        data=data or settings.data,
        pipeline=replace(pipeline or settings.pipeline, warmup_steps=0, **carried),
        optimizer=optimizer or OptimizerConfig(),
        run=RunConfig(
            device=settings.device, backend="gloo", precision=settings.precision, seed=settings.seed,
            progress=False, prompt="", tensorboard=False, checkpoint_every=0, **run,
        ),
    )  # fmt: skip


def order(config: TrainConfig, boundary: str) -> dict[str, Any]:
    """Return the arguments of an order that say what to train: settings of a run, and whether with PyTorch's stage."""
    return {"config": json.loads(config.to_json()), "stock": boundary in STOCK}


def merged(answers: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge each rank's metrics into metrics of each step over all ranks, with the time of the slowest."""
    steps = []
    for metrics in zip(*answers, strict=True):
        seconds = max(of_rank["seconds"] for of_rank in metrics)
        speed = metrics[0]["tokens_per_second"] * metrics[0]["seconds"] / seconds
        steps.append({**metrics[0], "seconds": seconds, "tokens_per_second": speed})
    return steps


def check_samples(settings: Any) -> None:
    """Check that samples fill whole batches."""
    if settings.samples % settings.data.batch:
        raise ConfigError(f"samples is {settings.samples}; allowed: a multiple of data.batch ({settings.data.batch})")


def check_recipes(settings: Any, pipeline: PipelineConfig) -> None:
    """Check that a training run with every boundary can start, on the device of the settings."""
    unused = PipelineConfig()
    for name in ("data_parallel", "forward", "backward", "warmup_steps", "anchor"):
        if getattr(pipeline, name) != getattr(unused, name):
            raise ConfigError(f"pipeline.{name} is {getattr(pipeline, name)!r}; allowed: formats, in `boundaries`")
    if pipeline.ranks < 2:
        raise ConfigError(f"pipeline.ranks is {pipeline.ranks}; allowed: at least 2")
    if settings.backward:
        parse(settings.backward)
    for boundary in settings.boundaries:
        if boundary in STOCK and settings.device == "cuda":
            raise ConfigError(
                f"boundaries has {boundary!r}; PyTorch's own stage cannot use Gloo from a GPU; "
                "allowed with device cuda: all other formats"
            )
        config = recipe(settings, boundary, pipeline=pipeline)
        plan = make_layout(config.pipeline, ranks=pipeline.ranks, layers=count_layers(settings.model))
        codecs = make_codecs(config.pipeline, plan.stages - 1)
        both = (*codecs.forward, *codecs.backward)
        check_messages(boundary, both, settings.model, config.rows, config.data.sequence)
    choose_device(settings.device, pipeline.ranks)


class Runs:
    """Has this rank's part of every run, by name. All ranks get the same orders."""

    def __init__(self) -> None:
        self._trainers: dict[str, Trainer] = {}
        self._steps: dict[str, int] = {}
        self._connections: dict[str, int] = {}
        self._devices: dict[str, Device] = {}
        self._recordings: dict[str, Recording] = {}
        self._choosing: dict[str, Run] = {}  # whose formats are "auto"
        self._evaluated: set[str] = set()

    def open(
        self, name: str, config: dict[str, Any], stock: bool, samples: int, connections: int = 1, compute: float = 0.0
    ) -> None:
        """Set up a run.

        Args:
            name: of the run in later orders.
            config, stock: of the run, from `order`.
            samples: windows of the text to train on, in every epoch; 0: all.
            connections: for each pair of ranks, at all steps of this run, which posts receives for the next ones.
            compute: seconds that a stage waits in a forward pass, with recorded activations; 0: it computes.
        """
        trainer = _trainer(config, stock)
        prepared = trainer.members.prepared
        if samples:
            trainer.order = Order(samples=samples, batch=prepared.config.data.batch, seed=prepared.config.run.seed)
        self._trainers[name], self._steps[name], self._connections[name] = trainer, 0, connections
        if compute:  # contenders that differ in formats share a recording of the same stages
            key = repr((prepared.config.model, prepared.config.data, prepared.layout, prepared.config.run.seed))
            if key not in self._recordings:
                self._recordings[key] = Recording(prepared, samples or len(prepared.data.train))
            self._devices[name] = Device(trainer, self._recordings[key], compute)
        if prepared.config.pipeline.is_auto:
            if name in self._choosing:
                self._choosing[name].folder.unlock()
            self._choosing[name] = Run(trainer)

    def choose(self, runs: list[dict[str, Any]]) -> None:
        """Open runs with the formats "auto", again on each link, and train until they have chosen."""
        for arguments in runs:
            self.open(**arguments)
            run = self._choosing[arguments["name"]]
            auto = run.adaptation.auto
            while run.members.links.pairs and auto is not None and auto.choice is None:
                self.steps(arguments["name"], 1)

    def steps(self, name: str, count: int) -> list[dict[str, Any]]:
        """Advance a run; return metrics of each step (`lowbit_run.train.metrics.StepMetrics`).

        The time of a step with the formats "auto" includes that of looking at the links after it.
        """
        trainer = self._trainers[name]
        connect_more(trainer.members.replicas.pipeline, self._connections[name], timeout=TIMEOUT_SECONDS)
        dist.barrier()
        start = self._steps[name]
        self._steps[name] += count
        done = []
        for step in range(start, start + count):
            if name in self._devices:
                self._devices[name].ids = trainer.order.ids(step)
            begin = time.perf_counter()
            metrics = trainer.step(step)
            if name in self._choosing:
                self._choosing[name].end_step(metrics, last=False)
                seconds = time.perf_counter() - begin
                speed = metrics.tokens_per_second * metrics.seconds / seconds
                metrics = replace(metrics, seconds=seconds, tokens_per_second=speed)
            done.append(dataclasses.asdict(metrics))
        return done

    def turn(self, name: str, count: int, *, evaluate: bool) -> dict[str, Any]:
        """Take `count` steps, and evaluate. A step before them is not counted: caches are cold and TCP starts again.

        Nor is a run's first evaluation.
        """
        choices = self._choosing[name].observers.choices if name in self._choosing else []
        if evaluate and name not in self._evaluated:
            self.evaluate(name)
            self._evaluated.add(name)
        return {
            "steps": self.steps(name, 1 + count)[1:],
            "evaluation": self.evaluate(name) if evaluate else None,
            "state_bytes": self.state_bytes(name),
            "chosen": described(choices[-1].formats) if choices else None,
        }

    def held_out_loss(self, name: str) -> float:
        """Return the loss on held-out text, with full precision at the boundaries."""
        return self._evaluate(name, None)

    def evaluate(self, name: str) -> float:
        """Return the seconds of an evaluation on held-out text, with this run's formats at the boundaries."""
        trainer = self._trainers[name]
        codecs = None if isinstance(trainer, StockTrainer) else trainer.pipeline.codecs.forward
        dist.barrier()
        start = time.perf_counter()
        self._evaluate(name, codecs)
        return time.perf_counter() - start

    def state_bytes(self, name: str) -> int:
        """Return the bytes that this rank's codecs keep between steps."""
        stages = self._trainers[name].pipeline.stages
        return sum(stage.state_bytes() for stage in stages if isinstance(stage, LowBitStage))

    def train(self, config: dict[str, Any], stock: bool, seconds: float = math.inf) -> None:
        """Run a training and write its files as `lowbit train` does, for about `seconds`; rank 0 reports steps.

        The seconds that it reports are the clock's since the first step began: "auto" looks at links between steps.
        """
        run, passed, begin = Run(_trainer(config, stock)), 0.0, 0.0

        def report(metrics: StepMetrics) -> bool:
            nonlocal passed, begin
            begin = begin or time.perf_counter() - metrics.seconds
            passed = time.perf_counter() - begin
            if dist.get_rank() == 0:
                report_progress({**dataclasses.asdict(metrics), "passed": passed})
            enough = passed + metrics.seconds / 2 > seconds  # the next step would end farther from it than this one
            return gather_json(enough, run.members.side)[0]

        run.finish(report)

    def _evaluate(self, name: str, codecs: Any) -> float:
        trainer = self._trainers[name]
        prepared = trainer.members.prepared
        batch, batches = prepared.config.data.batch, prepared.config.run.eval_batches
        held_out = prepared.data.held_out
        return trainer.evaluation.scores(held_out, batch=batch, batches=batches, codecs=codecs)[0]


def _trainer(config: dict[str, Any], stock: bool) -> Trainer:
    return (StockTrainer if stock else Trainer)(prepare(from_mapping(config), ranks=dist.get_world_size()))


@dataclass(frozen=True)
class Duration:
    """A time, as text: 50ms or 1.5s."""

    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Parse the text of a duration."""
        if found := re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s)", text):
            return cls(float(found[1]) / (1000 if found[2] == "ms" else 1))
        raise ValueError(f"compute is {text!r}; allowed: a number with a unit, such as 50ms or 1.5s")

    def __str__(self) -> str:
        return f"{1000 * self.seconds:g}ms"


class Recording:
    """What the stages of a model send for each sample.

    Attributes:
        outputs: activations (samples, sequence, width) of each stage except the last.
        gradients: of a sample's mean loss with respect to these, of the same shape.
    """

    def __init__(self, prepared: Prepared, samples: int) -> None:
        config, windows = prepared.config, prepared.data.train
        model = build_model(config.model, vocab=prepared.vocab, sequence=config.data.sequence, seed=config.run.seed)
        each = [
            capture(
                model, *windows.batch(torch.tensor([sample])), stages=prepared.layout, autocast=prepared.autocast
            )
            for sample in range(samples)
        ]  # fmt: skip
        self.outputs, self.gradients = (
            [torch.cat(x) for x in zip(*sent, strict=True)] for sent in zip(*each, strict=True)
        )


class Device:
    """Emulates a device: a trainer's stages take a given time and hand over what was recorded; weights are given up.

    Two CPU cores cannot compute a layer of 4096 channels as fast as a GPU, but they can code its activations.

    Args:
        trainer: on one rank, before its first step.
        recording: of its model.
        seconds: of a stage's forward pass of one micro-batch.

    Attributes:
        ids: of the samples of the step under way.
    """

    def __init__(self, trainer: Trainer, recording: Recording, seconds: float) -> None:
        self.recording, self.seconds = recording, seconds
        self.rows, self.stages = trainer.members.config.rows, trainer.members.layout.stages
        self.ids = torch.empty(0, dtype=torch.int64)
        for index, module in trainer.model.modules.items():
            for parameter in module.parameters():
                parameter.data = torch.empty(0)
            module.forward = _Stage(self, index, module)
        trainer.pipeline.schedule._loss_fn = lambda logits, _: _NoLoss.apply(logits)


class _Stage:
    """The forward function of one stage."""

    def __init__(self, device: Device, index: int, module: StageModule) -> None:
        self._device, self._index, self._vocab, self._calls = device, index, module.vocab, 0
        self._anchor = nn.Parameter(torch.zeros(()))  # so that the first stage has a backward pass, too

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        device, recording, index = self._device, self._device.recording, self._index
        chunks = device.ids.split(device.rows)  # schedules run the forward passes of a stage in this order
        ids = chunks[self._calls % len(chunks)]
        self._calls += 1
        last = index == device.stages - 1
        output = torch.zeros(()).expand(*x.shape[:2], self._vocab) if last else recording.outputs[index][ids]
        gradient = recording.gradients[index - 1][ids] / device.rows if index else None
        return _Pass.apply(x, self._anchor, output, gradient, device.seconds)  # pyright: ignore[reportReturnType]


class _Pass(torch.autograd.Function):
    """Waits as long as a pass takes, and hands over what was recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, output: Tensor, gradient: Tensor | None, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(BACKWARD * ctx.seconds)
        return ctx.gradient, torch.zeros(()), None, None, None


class _NoLoss(torch.autograd.Function):
    """The loss of no logits; the vocabulary would cost the CPU more time than the device."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return torch.zeros(()).expand(ctx.shape)


def curve(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return points of (seconds of training, mean training loss of the steps of the last two seconds)."""
    points, seconds, recent = [], 0.0, deque[tuple[float, float]]()
    for step in metrics:
        seconds += step["seconds"]
        recent.append((seconds, step["loss"]))
        while recent[0][0] < seconds - _SMOOTHED_SECONDS:
            recent.popleft()
        points.append((seconds, statistics.fmean(loss for _, loss in recent)))
    return points


def reached(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Add to rows `target_loss`, the lowest loss that all curves have reached, and `seconds_to_loss`."""
    target = max(min(loss for _, loss in row["curve"]) for row in rows)
    return [{**row, "target_loss": target, "seconds_to_loss": seconds_until(row["curve"], target)} for row in rows]


def seconds_until(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when a curve of (seconds, loss) first reaches the target, interpolating linearly between its points."""
    before = curve[0]
    for seconds, loss in curve:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + share * (seconds - before[0])
        before = (seconds, loss)
    return None


if __name__ == "__main__":
    serve(Runs)
