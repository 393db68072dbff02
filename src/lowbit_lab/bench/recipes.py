"""Training runs with a boundary format on several ranks, for the benchmarks of pipelines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowbit.codecs import parse
from lowbit.config import ConfigError
from lowbit.train.boundaries import make_codecs
from lowbit.train.config import DataConfig, ModelConfig, OptimizerConfig, PipelineConfig, RunConfig, TrainConfig
from lowbit.train.device import choose_device
from lowbit.train.layout import make_layout
from lowbit.train.model import count_layers, hidden_size
from lowbit_lab.bench.settings import STOCK, check_shape, formats_of
from lowbit_lab.bench.workers import Workers

PROGRAM = "lowbit_lab.bench.runs"
"""The module of the ranks."""
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
    def of(cls, pipeline: PipelineConfig) -> Split:
        """Return the split of a pipeline."""
        return cls(pipeline.schedule, pipeline.stages_per_rank, pipeline.microbatches)

    @classmethod
    def parse(cls, text: str) -> Split:
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
        boundary: a name in `STOCK`, or a codec for each direction.
        model, data, pipeline, optimizer: replace those of the settings; run: fields of `RunConfig`.
    """
    formats = formats_of(boundary, settings.backward)
    carried = {name: (codec,) for name, codec in formats.items() if codec is not None} or {"boundary": boundary}
    return TrainConfig(
        model=model or settings.model,
        data=data or settings.data,
        pipeline=replace(pipeline or settings.pipeline, warmup_steps=0, **carried),
        optimizer=optimizer or OptimizerConfig(),
        run=RunConfig(
            device=settings.device, backend="gloo", precision=settings.precision, seed=settings.seed,
            progress=False, tensorboard=False, checkpoint_every=0, **run,
        ),
    )  # fmt: skip


def as_mapping(config: TrainConfig) -> dict[str, Any]:
    """Convert the settings of a run to an argument of an order."""
    return json.loads(config.to_json())


def step(ranks: Workers, name: str, count: int) -> list[dict[str, Any]]:
    """Advance a run; return metrics of each step over all ranks, with the time of the slowest."""
    return merged(ranks.ask("steps", name=name, count=count))


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
    for name in ("data_parallel", "forward", "backward", "boundary", "warmup_steps"):
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
        if (width := hidden_size(settings.model)) is not None:
            shape = (config.rows, config.data.sequence, width)
            check_shape(boundary, (*codecs.forward, *codecs.backward), shape)
    choose_device(settings.device, pipeline.ranks)
