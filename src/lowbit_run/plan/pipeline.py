"""`lowbit plan pipeline`: chooses stages, schedule and formats for a cluster, and predicts the speed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator

from lowbit.codecs import parse_pair
from lowbit.codecs.names import pair_name
from lowbit.escape import shown
from lowbit_run.config import ConfigError, NonNegative, Positive, section, to_toml
from lowbit_run.config.edited import check_written, write_unless_changed
from lowbit_run.plan.cluster import Cluster
from lowbit_run.plan.predict import PipelineChoice, Prediction, Predictor, search
from lowbit_run.plan.sizes import measure_sizes
from lowbit_run.report import Column, Command, Row, Table, check_output
from lowbit_run.terminal import wrote
from lowbit_run.train import load
from lowbit_run.train.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from lowbit_run.train.layout import even
from lowbit_run.train.model import vocabulary_of
from lowbit_run.train.schedules import Schedule

_PLAIN = ("fp32", "bf16")
_MOST_MICRO_BATCHES = 64
_PROGRAM = "lowbit plan pipeline"
_OF_RECIPE = ("model", "lora", "data", "run")


def _some(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values or len(set(values)) < len(values):
        raise ConfigError(f"a list is {list(values)}; allowed: one or more, each once")
    return values


@section()
class PipelinePlanSettings:
    """Settings of `lowbit plan pipeline`: a cluster, a model, and the candidates."""

    cluster: str
    """File with the machines and links (`cluster.toml`)."""
    recipe: str = ""
    """Configuration of `lowbit train` to plan for, in place of the model, data and run below. `output` has
    its other settings, too."""
    output: str = ""
    """File for the settings of the best choice. `lowbit train` takes it."""
    overwrite: bool = False
    """Replace `output` even if it was changed by hand."""
    tokens: NonNegative = 0
    """Tokens of the whole run. 0: those of `run.steps` steps."""
    formats: Annotated[tuple[str, ...], AfterValidator(_some)] = ("transform", "tah-quant", *_PLAIN)
    """Candidate formats, of activations or of both ways, such as "int4 / int6". Name only those whose loss you accept:
    the plan considers speed alone."""
    schedules: Annotated[tuple[Schedule, ...], AfterValidator(_some)] = (
        "1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble",
    )  # fmt: skip
    """Candidate schedules."""
    stages_per_rank: Annotated[tuple[Positive, ...], AfterValidator(_some)] = (1, 2)
    """Candidate numbers of stages on each rank."""
    microbatch_counts: tuple[Positive, ...] = ()
    """Candidate numbers of micro-batches. If omitted, all up to 64 that divide the batch."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of matrix products, which determines the memory of saved activations; `output` has it, too. auto: that
    of `run.precision`; if that is auto, too, which `output` keeps, bf16 if all machines have GPUs, otherwise fp32."""
    model: ModelConfig = ModelConfig()
    """The model to train. With `model.pretrained`, a folder with Hugging Face's config.json is enough."""
    lora: LoraConfig = LoraConfig()
    """Adapters, with which the model's own weights are frozen."""
    data: DataConfig = DataConfig(sequence=1024, batch=32)
    """Tokens per window, and windows per step."""
    run: RunConfig = RunConfig()
    """Steps of the run, and settings that are written to the output."""

    def __post_init__(self) -> None:
        for text in self.formats:
            parse_pair(text)

    @cached_property
    def base(self) -> TrainConfig:
        """Settings that the plan does not choose."""
        return load(self.recipe) if self.recipe else TrainConfig()

    def trained(self, pipeline: PipelineConfig) -> TrainConfig:
        """Settings of `lowbit train` with these of the pipeline."""
        return replace(
            self.base, model=self.model, lora=self.lora, data=self.data, pipeline=pipeline,
            run=replace(self.run, steps=self.steps),
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        each = self.data.batch * self.data.sequence
        return -(-self.tokens // each) if self.tokens else self.run.steps

    def check_given(self, typed: Iterable[str]) -> None:
        """Refuse options that the recipe decides, also if they equal the default."""
        for key in typed:
            if self.recipe and key.partition(".")[0] in _OF_RECIPE:
                raise ConfigError(f"{key} is given, and recipe is {shown(self.recipe)}; allowed: one of them")


def _resolved(settings: PipelinePlanSettings, cluster: Cluster) -> PipelinePlanSettings:
    """Take the recipe's settings, and one precision for the plan and its output, if one is named."""
    settings = _with_recipe(settings) if settings.recipe else settings
    wanted, own = settings.precision, settings.run.precision
    if "auto" not in (wanted, own) and wanted != own:
        raise ConfigError(f"precision is {wanted}, and run.precision {own}; allowed: one of them")
    named = next((each for each in (wanted, own) if each != "auto"), "auto")
    # On CPUs that have bfloat16, training will take less than this.
    likely = "bf16" if all(machine.gpus for machine in cluster.of_ranks) else "fp32"
    precision = likely if named == "auto" else named
    return replace(settings, precision=precision, run=replace(settings.run, precision=named))


def _with_recipe(settings: PipelinePlanSettings) -> PipelinePlanSettings:
    base = settings.base
    if base.elastic.lighthouse:
        raise ConfigError(
            f"recipe is {shown(settings.recipe)}, with elastic.lighthouse {shown(base.elastic.lighthouse)}; "
            "allowed: none, since a plan leaves out what replicas send each other"
        )
    for name in _OF_RECIPE:
        if getattr(settings, name) != PipelinePlanSettings.__dataclass_fields__[name].default:
            raise ConfigError(f"{name} is given, and recipe is {shown(settings.recipe)}; allowed: one of them")
    if base.pipeline.data_parallel > 1:
        raise ConfigError(
            f"recipe is {shown(settings.recipe)}, with pipeline.data_parallel {base.pipeline.data_parallel}; "
            "allowed: 1, since a plan is of one pipeline over all machines"
        )
    return replace(settings, **{name: getattr(base, name) for name in _OF_RECIPE})


def measure(settings: PipelinePlanSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Search, and write the settings of the best choice to `settings.output`.

    Yields:
        A row for each of the three best choices, of different formats, and for FP32 and BF16: `choice` (1 is the best),
        `formats`, `schedule`, `stages_per_rank`, `microbatches`, `layers` (of each stage), `rank_layers`
        (by rank), `forward` and `backward` (bits per element of each boundary), `seconds_per_step`,
        `tokens_per_second`, `waiting_share`, `bytes_per_step`, `link_share` (of the busiest link), `memory_bytes` (by
        rank) and `machines` (their names), `steps`, `warmup_steps` (at full precision), `hours` (of all steps) and
        `traffic_bytes` (of all steps, of evaluations of `run.eval_batches` batches, none if that is 0, and of saving
        the model).

    Raises:
        ConfigError: a cluster that contradicts itself, or on which the model cannot be trained.
    """
    cluster = Cluster.read(settings.cluster)
    settings = _resolved(settings, cluster)
    if settings.output:
        check_output(Path(settings.output))
        check_written(settings.output, _PROGRAM, overwrite=settings.overwrite)
    vocab = vocabulary_of(settings.model, settings.data.tokenizer)
    autocast = torch.bfloat16 if settings.precision == "bf16" else None
    config = settings.trained(replace(settings.base.pipeline, data_parallel=1, layers=(), microbatches=1))
    predictor = Predictor(cluster, measure_sizes(config, vocab=vocab, autocast=autocast), config)
    batch = settings.data.batch
    divisors = tuple(count for count in range(1, min(batch, _MOST_MICRO_BATCHES) + 1) if batch % count == 0)
    find = partial(
        search, predictor, schedules=settings.schedules, stages_per_rank=settings.stages_per_rank,
        microbatches=settings.microbatch_counts or divisors,
    )  # fmt: skip
    found = find(formats=settings.formats)
    plain = {name: find(formats=(name,))[0] for name in _PLAIN}
    if settings.output:
        text = to_toml(train_settings(settings, predictor, found[0].choice), meanings=False)
        write_unless_changed(settings.output, _PROGRAM, text, overwrite=settings.overwrite)
    rows = [_row(settings, predictor, each, number) for number, each in enumerate(found[:3], 1)]
    shown = [row["formats"] for row in rows]
    rows += [_row(settings, predictor, each, None) for name, each in plain.items() if [name] not in shown]
    yield rows


def train_settings(settings: PipelinePlanSettings, predictor: Predictor, choice: PipelineChoice) -> TrainConfig:
    """The settings of `lowbit train` for a choice."""
    layout = predictor.layout(choice)
    if layout.layer_counts == even(predictor.sizes.layers, layout.stages):
        choice = replace(choice, layers=())
    return settings.trained(choice.pipeline(layout.ranks, settings.base.pipeline))


def _row(settings: PipelinePlanSettings, predictor: Predictor, found: Prediction, number: int | None) -> dict[str, Any]:
    choice, tokens = found.choice, settings.data.batch * settings.data.sequence
    layout = predictor.layout(choice)
    warm = min(train_settings(settings, predictor, choice).codec_warmup_steps, settings.steps)
    exact = found if choice.formats == ("fp32",) else predictor.predict(replace(choice, formats=("fp32",)))
    rest, run = settings.steps - warm, settings.run
    evaluations = 1 + ((settings.steps - 1) // run.eval_every if run.eval_every else 0)
    outside = predictor.bytes_outside_steps(choice, evaluations, batches=run.eval_batches, saved=run.save_model)
    return {
        "choice": number,
        "formats": list(dict.fromkeys(choice.formats)),
        "schedule": choice.schedule,
        "stages_per_rank": choice.stages_per_rank,
        "microbatches": choice.microbatches,
        "layers": list(layout.layer_counts),
        "rank_layers": [[layout.layer_counts[s] for s in layout.stages_of(r)] for r in range(layout.ranks)],
        "forward": [forward for forward, _ in found.bits],
        "backward": [backward for _, backward in found.bits],
        "seconds_per_step": found.seconds,
        "tokens_per_second": tokens / found.seconds,
        "waiting_share": found.step.waiting_share,
        "link_share": float(found.step.busy.max(initial=0.0)) / found.seconds,
        "bytes_per_step": found.nbytes,
        "machines": [machine.name for machine in predictor.machines],
        "memory_bytes": list(found.memory),
        "steps": settings.steps,
        "warmup_steps": warm,
        "hours": (warm * exact.seconds + rest * found.seconds) / 3600,
        "traffic_bytes": warm * exact.nbytes + rest * found.nbytes + outside,
    }


def _name(row: Row) -> str:
    return ", ".join(pair_name(text) for text in row["formats"])


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _time(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def _title(rows: Sequence[Row]) -> str:
    one = rows[0]
    return f"Predicted: {one['tokens_per_second']:,.0f} tokens/s, {_time(one['hours'])} for {one['steps']:,} steps"


def _by_machine(rows: Sequence[Row]) -> list[Row]:
    each = zip(rows[0]["machines"], rows[0]["memory_bytes"], rows[0]["rank_layers"], strict=True)
    return [
        {"rank": rank, "machine": machine, "layers": " and ".join(map(str, layers)), "memory_bytes": size}
        for rank, (machine, size, layers) in enumerate(each)
    ]


COMMAND = Command(
    name="plan pipeline",
    summary="Stages, schedule and formats for a cluster, with the speed to expect.",
    examples=(
        "lowbit plan pipeline cluster.toml --recipe recipe.toml --output run.toml",
        "lowbit plan pipeline cluster.toml --model.pretrained my_model --format bf16",
    ),
    settings=PipelinePlanSettings,
    measure=measure,
    ending=lambda settings: wrote("settings", settings.output, "lowbit train {}") if settings.output else (),
    tables=(
        Table(
            title=_title,
            columns=(
                Column("choice", lambda row: row["choice"] or "plain"),
                Column("formats", _name),
                Column("schedule", "schedule"),
                Column("stages\na rank", lambda row: row["stages_per_rank"] if row["stages_per_rank"] > 1 else None),
                Column("micro-\nbatches", "microbatches"),
                Column("layers", lambda row: " ".join(map(str, row["layers"]))),
                Column("tokens/s", "tokens_per_second", "{:,.0f}"),
                Column("wait", "waiting_share", "{:.0%}"),
                Column("link\nbusy", "link_share", "{:.0%}"),
                Column("run", lambda row: _time(row["hours"])),
                Column("traffic", "traffic_bytes", _bytes),
            ),
        ),
        Table(
            title="The first choice, by rank",
            rows=_by_machine,
            columns=(
                *(Column(name, name) for name in ("rank", "machine", "layers")),
                Column("memory", "memory_bytes", _bytes),
            ),
        ),
    ),
)  # fmt: skip
