"""`lowbit plan memory`: bits of saved activations by stage and layer type, for a memory budget.

Bytes are counted on two decoder layers of the real shape for each kind of stage; errors on the whole model.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lowbit.activations import LayerAware, counted
from lowbit.activations.counting import SavedBytes
from lowbit.activations.layer_plan import PLANNED, LayerChoice, LayerPlan, layers_of
from lowbit.codecs import parse
from lowbit.escape import shown
from lowbit_run.config import ConfigError, NonNegative, section
from lowbit_run.plan.budget import Option, StageCost, fastest_fitting, outside_autograd, plan_bits
from lowbit_run.plan.layers import (
    CHOICES,
    LayersPrediction,
    StepCosts,
    choice_errors,
    described,
    layer_settings,
    measure_layers,
    predictions,
    with_errors,
)
from lowbit_run.plan.measure import bytes_between_passes, bytes_by_width, compressed, sensitivities
from lowbit_run.plan.sizes import parse_bytes, two_layers
from lowbit_run.report import Column, Command, Row, Table, check_output
from lowbit_run.simulate.held import InFlight
from lowbit_run.terminal import wrote
from lowbit_run.train.activations import planned_settings
from lowbit_run.train.config import (
    FULL_PRECISION,
    ActivationsConfig,
    DataConfig,
    GradientsConfig,
    LoraConfig,
    Method,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from lowbit_run.train.data import Order, load_data
from lowbit_run.train.footprint import held_batches, model_bytes
from lowbit_run.train.layout import PipelineLayout, make_layout
from lowbit_run.train.model import (
    StageModule,
    add_adapters,
    build_model,
    count_layers,
    next_token_loss,
    vocabulary,
    vocabulary_of,
)
from lowbit_run.train.single_process import model_loss, train_single_process
from lowbit_run.train.weights import weights_of

_LEAST_BUDGET = 1_000_000  # bytes; less is a unit that was forgotten
_LOW_BIT = LayerChoice(norm=8, mlp=4, linear=4)


@section()
class MemorySettings:
    """Settings of `lowbit plan memory`: a run of `lowbit train`, and the memory of its devices."""

    budget: str = ""
    """Memory of a device for weights, gradients, optimizer, saved activations and the tensors of the pipeline, such as
    24gb or 500mib. If omitted, what the fullest device needs with 4 bits everywhere."""
    out: str = ""
    """File for the plan. `lowbit train` takes it as `activations.plan`."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """fp32: matrix products in bfloat16 and weights in `model.weights`, by default as in `lowbit train`. bf16: bfloat16
    weights only, without float32 between stages."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    """adamw: float32 states. adamw-8bit: torchao's states in 8 bits, `optimizer.states = "8bit"` in `lowbit train`."""
    method: Method = "none"
    """agoq: a plan for `run.method = "agoq"` of `lowbit train`, with gradients in fp8 and the 8-bit optimizer. Bits by
    stage and uncoded attention are part of every plan by stage."""
    group: int = 64
    """Elements that share a scale."""
    by: Literal["stage", "layer"] = "stage"
    """stage: bits for each stage and layer type. layer: for each layer keep, low-bit, checkpoint, or checkpoint with a
    low-bit input; temporary memory is counted, too."""
    max_error: Annotated[float, Field(gt=0)] = 0.03
    """By layer: largest relative error of the gradient. Of the plans that fit, the fastest is chosen."""
    repeats: Annotated[int, Field(ge=1)] = 3
    """By layer: steps timed for each choice; the fastest counts."""
    error_tokens: Annotated[int, Field(ge=2)] = 256
    """Tokens of the sample on which errors of the gradient are measured."""
    error_steps: NonNegative = 20
    """Training steps before errors are measured, because gradients of random weights are not typical. Not used with a
    pretrained model."""
    seed: NonNegative = 0
    """Seed of weights and samples."""
    model: ModelConfig = ModelConfig()
    """The model to train."""
    lora: LoraConfig = LoraConfig()
    """Adapters, with which the model's own weights are frozen, in the format `model.weights`."""
    data: DataConfig = DataConfig(sequence=1024, max_bytes=1_000_000)
    """The text and its windows. Errors of the gradient are measured on it."""
    pipeline: PipelineConfig = PipelineConfig(ranks=4, microbatches=8)
    """Stages, schedule and micro-batches. Its formats do not affect the plan."""
    gradients: GradientsConfig = GradientsConfig()
    """Format in which gradients are stored."""

    def __post_init__(self) -> None:
        if self.gradients.storage != FULL_PRECISION:
            parse(self.gradients.storage)
        if self.budget and self.budget_bytes < _LEAST_BUDGET:
            raise ConfigError(
                f"budget is {shown(self.budget)}, less than a megabyte; allowed: more, such as 24gb or 800mb"
            )
        _ = self.layout, self.vocab, self.recipe
        if self.method == "agoq":
            if self.by == "layer":
                raise ConfigError("by is 'layer', with attention in 8 bits, and method is 'agoq'; allowed: stage")
            object.__setattr__(self, "optimizer", "adamw-8bit")
            object.__setattr__(self, "gradients", self.recipe.gradients)

    @property
    def budget_bytes(self) -> int:
        """Bytes of a device; 0 if `budget` is omitted."""
        return parse_bytes(self.budget) if self.budget else 0

    @property
    def recipe(self) -> TrainConfig:
        """The settings that `lowbit train` shares."""
        return TrainConfig(
            model=self.model, lora=self.lora, data=self.data, pipeline=self.pipeline, gradients=self.gradients,
            optimizer=OptimizerConfig(states="8bit" if self.optimizer == "adamw-8bit" else "fp32"),
            activations=ActivationsConfig(checkpoint=False), run=RunConfig(method=self.method),  # the plan says
        )  # fmt: skip

    @property
    def vocab(self) -> int:
        """Entries of the embedding."""
        return vocabulary_of(self.model, self.data.tokenizer)

    @property
    def held(self) -> InFlight:
        """Micro-batches that the stages hold."""
        return held_batches(self.recipe, self.layout)

    @property
    def layout(self) -> PipelineLayout:
        """The layers of each stage, and the stages of each rank."""
        return make_layout(self.pipeline, ranks=self.pipeline.ranks, layers=count_layers(self.model))


def measure(settings: MemorySettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Measure, choose, and write the bits to `settings.out`.

    Yields:
        A row for each stage: `stage`, `rank`, `layers`, `held` (micro-batches at its peak), `norm`, `mlp`, `linear`
        (bits), `saved_bytes` (saved by autograd at that peak), `int4_bytes` and `bf16_bytes` (the same with 4 bits
        everywhere, and in plain BF16), `fixed_bytes` (weights, gradients, optimizer), `pipeline_bytes` (inputs, outputs
        and gradients that the pipeline holds at most), `device_bytes` (of its rank: all its stages together, at the
        rank's worst moment), `error` (its part of the gradient's relative error); and, the same in all rows, `budget`,
        `least` (the smallest that suffices), `error_all` and `error_int4` (of the plan, and of 4 bits everywhere).
        By layer: `stage`, `rank`, `layers`, `held`, `choices` (in words), `kept_bytes` (by all held micro-batches),
        `extra_bytes` (what one takes beyond that while it runs), `fixed_bytes`, `device_bytes`, `seconds` and
        `low_bit_seconds` (of the layers for a micro-batch, planned and with 4 bits everywhere), `error`, `budget`,
        `least`.

    Raises:
        ValueError: a budget that no plan fits, with the smallest that suffices; or a file that cannot be written.
    """
    if settings.out:
        check_output(Path(settings.out))
        if Path(settings.out).exists():
            try:
                LayerPlan.read(settings.out)
            except ValueError as error:
                raise ConfigError(f"out is {settings.out!r}, which holds no plan; allowed: a new file") from error
    layout, meter = settings.layout, StageMeter(settings)
    measured = [meter.stage(layout, stage) for stage in range(layout.stages)]
    costs = [cost for cost, _ in measured]
    if settings.by == "layer":
        plan, rows = _by_layer(settings, meter, costs)
    else:
        plan, rows = _by_stage(settings, costs, [plain for _, plain in measured])
    if settings.out:
        made_for = planned_settings(settings.recipe, layout, settings.vocab)
        replace(plan, made_for={**plan.made_for, **made_for, "weights": settings.weights}).write(settings.out)
    yield rows


def _by_stage(
    settings: MemorySettings, costs: Sequence[StageCost], plain: Sequence[int]
) -> tuple[LayerPlan, list[Row]]:
    held = settings.held
    errors = sensitivities(*sample_model(settings), group=settings.group)
    plan_for = partial(plan_bits, held, sensitivities=errors, group=settings.group)
    only_4 = [replace(cost, saved={kind: {4: cost.saved[kind][4]} for kind in PLANNED}) for cost in costs]
    int4 = plan_for(only_4, device_bytes=1 << 62)
    plan = plan_for(costs, device_bytes=settings.budget_bytes or max(int4.device_bytes.values()))
    return plan.bits, [
        {
            "stage": one.stage,
            "rank": one.rank,
            "layers": one.layers,
            "held": one.held,
            **one.bits,
            "saved_bytes": one.saved_bytes,
            "int4_bytes": int4.stages[one.stage].saved_bytes,
            "bf16_bytes": one.held * plain[one.stage],
            "fixed_bytes": costs[one.stage].fixed,
            "pipeline_bytes": max(
                outside_autograd(held, moment, costs, [one.stage]) for moment in held.moments[one.rank]
            ),
            "device_bytes": plan.device_bytes[one.rank],
            "error": one.error,
            "budget": plan.limit,
            "least": plan.least,
            "error_all": plan.error,
            "error_int4": int4.error,
        }
        for one in plan.stages
    ]


def _by_layer(settings: MemorySettings, meter: "StageMeter", costs: Sequence[StageCost]) -> tuple[LayerPlan, list[Row]]:
    held, layers = settings.held, LayerMeter(settings, meter)
    total = sum(cost.layers for cost in costs)

    def option(stage: int, one: LayersPrediction) -> Option:
        loss = costs[stage].layers / total * one.error**2
        return Option(what=one, held=one.held, extra=one.peak - one.held, seconds=one.seconds, loss=loss)

    choose_among = partial(fastest_fitting, held, costs, least_with=f"with max_error {settings.max_error}")
    low = [layers.predict(stage, _LOW_BIT) for stage in held.stages]
    of_low = choose_among([[option(stage, one)] for stage, one in enumerate(low)], device_bytes=1 << 62)
    budget = settings.budget_bytes or max(of_low.device_bytes.values())
    every = [[option(stage, one) for one in layers.predictions(stage)] for stage in held.stages]
    chosen = choose_among(every, device_bytes=budget)
    best: list[LayersPrediction] = [option.what for option in chosen.options]
    plan = LayerPlan(stages=tuple(one.choices for one in best), group=settings.group, made_for=layers.made_for)
    return plan, [
        {
            "stage": stage,
            "rank": held.rank_of(stage),
            "layers": len(one.choices),
            "held": held.peak(stage),
            "choices": described(one.choices),
            "kept_bytes": one.held * held.peak(stage),
            "extra_bytes": one.peak - one.held,
            "fixed_bytes": costs[stage].fixed,
            "device_bytes": chosen.device_bytes[held.rank_of(stage)],
            "seconds": one.seconds,
            "low_bit_seconds": low[stage].seconds,
            "error": one.error,
            "budget": budget,
            "least": chosen.least,
        }
        for stage, one in enumerate(best)
    ]


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.1f}"


def _within(row: Row) -> str:
    return f"within {_megabytes(row['budget'])} MB a device (the least that would do: {_megabytes(row['least'])} MB)"


def _title(rows: Sequence[Row]) -> str:
    one = rows[0]
    return (
        f"Saved activations {_within(one)}\n"
        f"relative error of the gradient: {one['error_all']:.4f}, with 4 bits everywhere {one['error_int4']:.4f}"
    )


_BYTES = {
    "saved": "saved_bytes", "4 bits": "int4_bytes", "BF16": "bf16_bytes", "fixed": "fixed_bytes",
    "pipeline": "pipeline_bytes", "device": "device_bytes",
}  # fmt: skip
COMMAND = Command(
    name="plan memory",
    summary="Bits of saved activations by stage and layer type, for a memory budget.",
    examples=(
        "lowbit plan memory --budget 24gb --model.pretrained my_model",
        "lowbit plan memory --budget 8gb --model.layers 16 --out plan.json",
        "lowbit plan memory --by layer --budget 8gb --model.layers 16 --out plan.json",
    ),
    settings=MemorySettings,
    measure=measure,
    ending=lambda settings: (
        wrote("plan", settings.out, "lowbit train run.toml --activations.plan {}") if settings.out else ()
    ),
    tables=(
        Table(
            columns=(
                *(Column(name, name) for name in ("stage", "rank", "held")),
                *(Column(f"{kind}\nbits", kind) for kind in PLANNED),
                *(Column(f"{title}\nMB", field, _megabytes) for title, field in _BYTES.items()),
                Column("error", "error", "{:.4f}"),
            ),
            title=_title,
            rows=lambda rows: [row for row in rows if "choices" not in row],
        ),
        Table(
            columns=(
                *(Column(name, name) for name in ("stage", "rank", "held", "choices")),
                *(Column(f"{name}\nMB", f"{name}_bytes", _megabytes) for name in ("kept", "extra", "fixed", "device")),
                Column("ms", "seconds", lambda seconds: f"{1e3 * seconds:.1f}"),
                Column("low-bit\nms", "low_bit_seconds", lambda seconds: f"{1e3 * seconds:.1f}"),
                Column("error", "error", "{:.4f}"),
            ),
            title=lambda rows: f"What each layer keeps, {_within(rows[0])}",
            rows=lambda rows: [row for row in rows if "choices" in row],
        ),
    ),
)


class StageMeter:
    """Counts bytes on one stage of each kind, with two decoder layers of the real width and the real micro-batch.

    The second layer represents all later ones; the first may differ, because a stage's input is not counted.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self.settings, self.splits = settings, settings.held.splits
        torch.manual_seed(settings.seed)
        model, _ = two_layers(settings.model, settings.vocab, settings.data.sequence)
        self.mixed, recipe = settings.weights == "fp32", settings.recipe
        if not self.mixed:
            recipe = replace(recipe, model=replace(recipe.model, weights=recipe.model.weights or "bf16"))
        autocast = torch.bfloat16 if self.mixed else None
        # Layers and ends differ: what they keep is counted for each of them.
        self.kept = model_bytes(recipe, vocab=settings.vocab, autocast=autocast)
        self.model = model if weights_of(recipe, autocast) == "fp32" else model.bfloat16()
        if settings.lora.rank:
            add_adapters(self.model, recipe)
        self.dtype = torch.float32 if self.mixed else torch.bfloat16  # of the stages' outputs
        self._measured: dict[tuple[bool, bool], _TwoLayers] = {}

    def stage(self, layout: PipelineLayout, stage: int) -> tuple[StageCost, int]:
        """A stage's bytes with every number of bits, and the bytes saved of a micro-batch in plain BF16."""
        kind = kind_of(layout, stage)
        if kind not in self._measured:
            self._measured[kind] = _TwoLayers(self, *kind)
        cost, plain = self._measured[kind].with_layers(len(layout.layers_of(stage)))
        first, last = kind
        fixed = self.kept.stage(layout.layers_of(stage), first=first, last=last).total
        fixed += self.kept.anchors(layout, [stage])
        return replace(cost, fixed=fixed), plain

    def module(self, layers: int, first: bool, last: bool) -> StageModule:
        return StageModule(
            self.model, layers=range(layers), first=first, last=last,
            autocast=torch.bfloat16 if self.mixed else None, boundary_dtype=self.dtype,
        ).train()  # fmt: skip

    def batch(self, module: StageModule) -> tuple[Tensor, Tensor]:
        """Token ids of a micro-batch, and the stage's input for it."""
        shape = (self.settings.recipe.rows, self.settings.data.sequence)
        ids = torch.randint(module.vocab, shape, generator=torch.Generator().manual_seed(0))
        if module.first:
            return ids, ids
        return ids, torch.randn(*shape, module.width, dtype=self.dtype, requires_grad=True)

    def between_passes(self, layers: int, first: bool, last: bool) -> int:
        """Bytes that a stage of `layers` layers holds between two passes of backward; the first has only one."""
        if first or not self.splits:
            return 0
        module = self.module(layers, first, last)
        ids, inputs = self.batch(module)
        with compressed(module, LayerAware(group=self.settings.group)):
            output = module(inputs)
            gradient = None if last else torch.ones_like(output)
            output = next_token_loss(output, ids) if last else output
            return bytes_between_passes(output, gradient, inputs, module.parameters())


class _TwoLayers:
    """A stage with two decoder layers, measured."""

    def __init__(self, meter: StageMeter, first: bool, last: bool) -> None:
        self.settings, self.module = meter.settings, meter.module(2, first, last)
        ids, inputs = meter.batch(self.module)

        def forward() -> Tensor:
            output = self.module(inputs)
            return next_token_loss(output, ids) if last else output

        with counted(self.module) as self.plain:
            graph = forward()
        del graph
        with torch.no_grad():
            self.output = self.module(inputs).nbytes
        self.by_width = bytes_by_width(self.module, forward, group=self.settings.group)
        self.received = 0 if first else inputs.nbytes
        self.inputs = self.received if meter.splits else 0
        self.gradients = [meter.between_passes(layers, first, last) for layers in (1, 2)]

    def with_layers(self, layers: int) -> tuple[StageCost, int]:
        whole = self.by_width[max(self.by_width)]
        not_planned = {kind for kind, _ in whole.modules} - {*PLANNED, "weights"}

        one, two = self.gradients
        cost = StageCost(
            layers=layers,
            saved={
                kind: {bits: self._bytes(saved, layers, {kind}) for bits, saved in self.by_width.items()}
                for kind in PLANNED
            },
            other=self._bytes(whole, layers, not_planned),
            output=self.output,
            inputs=self.inputs,
            received=self.received,
            early=self._bytes(whole, layers, {"loss"}) + self.output if self.module.last else 0,
            gradients=one + (layers - 1) * (two - one),
        )
        kinds = {kind for kind, _ in self.plain.modules} - {"weights"}
        return cost, self._bytes(self.plain, layers, kinds)

    def _bytes(self, saved: SavedBytes, layers: int, kinds: Collection[str]) -> int:
        return sum(n * self._copies(name, layers) for (kind, name), n in saved.modules.items() if kind in kinds)

    def _copies(self, name: str, layers: int) -> int:
        """Number of copies of this module or parameter in a stage with `layers` layers."""
        lists = (n for n, m in self.module.named_modules() if isinstance(m, nn.ModuleList))
        return layers - 1 if f"{name}.".startswith(f"{next(lists)}.1.") else 1


class LayerMeter:
    """Measures what each choice costs in the layers of each stage, on two layers."""

    def __init__(self, settings: MemorySettings, meter: StageMeter) -> None:
        self._layout, self._max_error = settings.layout, settings.max_error
        # Between a backward's two passes a checkpointed layer holds what it has computed again.
        choices = [choice for choice in CHOICES if not (meter.splits and choice.checkpoint)]
        errors = choice_errors(*sample_model(settings), choices, group=settings.group)
        self._costs: dict[tuple[bool, bool], StepCosts] = {}
        for kind in dict.fromkeys(kind_of(self._layout, stage) for stage in range(self._layout.stages)):
            module = meter.module(2, *kind)
            self.made_for = layer_settings(next(iter(layers_of(module).values())))
            ids, inputs = meter.batch(module)

            def step(module: StageModule = module, ids: Tensor = ids, inputs: Tensor = inputs) -> None:
                output = module(inputs)
                loss = next_token_loss(output, ids) if module.last else output
                loss.backward(torch.ones_like(loss))

            costs = measure_layers(module, step, choices=choices, group=settings.group, repeats=settings.repeats)
            self._costs[kind] = with_errors(costs, errors)

    def predictions(self, stage: int) -> list[LayersPrediction]:
        costs, layers = self._of(stage)
        return predictions(costs, layers, max_error=self._max_error)

    def predict(self, stage: int, choice: LayerChoice) -> LayersPrediction:
        """Predict a stage with one choice for all of its layers."""
        costs, layers = self._of(stage)
        return costs.predict(((choice, layers),))

    def _of(self, stage: int) -> tuple[StepCosts, int]:
        return self._costs[kind_of(self._layout, stage)], len(self._layout.layers_of(stage))


def kind_of(layout: PipelineLayout, stage: int) -> tuple[bool, bool]:
    """Whether a stage is the first, and whether it is the last: stages of one kind differ only in their length."""
    return stage == 0, stage == layout.stages - 1


def sample_model(settings: MemorySettings) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The whole model, in float32 without dropout, and its loss on one short sample of text, for gradient errors."""
    short = replace(settings.data, sequence=settings.error_tokens, batch=1)
    data = load_data(short, pretrained=settings.model.pretrained)
    vocab = vocabulary(settings.model, data.tokenizer.size)
    sequence = max(settings.data.sequence, settings.error_tokens)
    exact = replace(settings.model, dropout=0.0)
    model = build_model(exact, vocab=vocab, sequence=sequence, seed=settings.seed).train()
    if settings.lora.rank:
        add_adapters(model, settings.recipe)
    steps = 0 if settings.model.pretrained else settings.error_steps
    constant = OptimizerConfig(lr_warmup_steps=0, lr_end=1, clip=0)
    train_single_process(model, data.train, constant, steps=steps, batch=1, seed=settings.seed)
    sample = data.train.batch(Order(samples=len(data.train), batch=1, seed=settings.seed).ids(steps))
    return model, lambda: model_loss(model, *sample)
