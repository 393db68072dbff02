"""Measures for `lowbit plan memory`: bytes of pipeline stages, and errors of a model's gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, counted
from lowbit.activations.counting import SavedBytes
from lowbit.activations.layer_plan import PLANNED, LayerChoice, layers_of
from lowbit.codecs import parse
from lowbit.plan.budget import StageCost
from lowbit.plan.layers import (
    CHOICES,
    LayersPrediction,
    StepCosts,
    choice_errors,
    layer_settings,
    measure_layers,
    predictions,
    with_errors,
)
from lowbit.plan.measure import bytes_between_passes, bytes_by_width, compressed
from lowbit.plan.sizes import two_layers
from lowbit.train.config import FULL_PRECISION, OptimizerConfig
from lowbit.train.data import Order, load_data
from lowbit.train.layout import PipelineLayout
from lowbit.train.model import StageModule, build_model, next_token_loss, vocabulary
from lowbit.train.single_process import model_loss, train_single_process

if TYPE_CHECKING:
    from lowbit.plan.memory import MemorySettings

_STATE_BYTES = {"adamw": 8.0, "adamw-8bit": 2 + 2 * 4 / 256}
"""Bytes of state for each parameter: two in float32, or torchao's in 8 bits with a float32 scale for each 256."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """A stage's bytes with every number of bits; `plain`: bytes saved of a micro-batch in plain BF16."""

    cost: StageCost
    plain: int


class StageMeter:
    """Counts bytes on one stage of each kind, with two decoder layers of the real width and the real micro-batch.

    The second layer represents all later ones; the first may differ, because a stage's input is not counted.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self.settings, self.splits = settings, settings.held.splits
        torch.manual_seed(settings.seed)
        model, _ = two_layers(settings.model, settings.vocab, settings.data.sequence)
        self.mixed = settings.weights == "fp32"
        self.model = model if self.mixed else model.bfloat16()
        self.dtype = torch.float32 if self.mixed else torch.bfloat16  # of the stages' outputs
        self._measured: dict[tuple[bool, bool], _TwoLayers] = {}

    def stage(self, layout: PipelineLayout, stage: int) -> MeasuredStage:
        kind = kind_of(layout, stage)
        if kind not in self._measured:
            self._measured[kind] = _TwoLayers(self, *kind)
        return self._measured[kind].with_layers(len(layout.layers_of(stage)))

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

    def with_layers(self, layers: int) -> MeasuredStage:
        whole = self.by_width[max(self.by_width)]
        not_planned = {kind for kind, _ in whole.modules} - {*PLANNED, "weights"}
        parameters = self.module.named_parameters()
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
            fixed=round(sum(self._fixed(p) * self._copies(name, layers) for name, p in parameters)),
        )
        kinds = {kind for kind, _ in self.plain.modules} - {"weights"}
        return MeasuredStage(cost=cost, plain=self._bytes(self.plain, layers, kinds))

    def _bytes(self, saved: SavedBytes, layers: int, kinds: Collection[str]) -> int:
        sizes = saved.modules.items()
        return sum(size * self._copies(name, layers) for (kind, name), size in sizes if kind in kinds)

    def _copies(self, name: str, layers: int) -> int:
        """Number of copies of this module or parameter in a stage with `layers` layers."""
        lists = (n for n, m in self.module.named_modules() if isinstance(m, nn.ModuleList))
        return layers - 1 if f"{name}.".startswith(f"{next(lists)}.1.") else 1

    def _fixed(self, parameter: nn.Parameter) -> float:
        storage = self.settings.gradients.storage
        gradient = parameter.nbytes if storage == FULL_PRECISION else parse(storage).nbytes(parameter.shape)
        return parameter.nbytes + gradient + _STATE_BYTES[self.settings.optimizer] * parameter.numel()


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
        layers = len(self._layout.layers_of(stage))
        return predictions(self._costs[kind_of(self._layout, stage)], layers, max_error=self._max_error)

    def predict(self, stage: int, choice: LayerChoice) -> LayersPrediction:
        """Predict a stage with one choice for all of its layers."""
        return self._costs[kind_of(self._layout, stage)].predict(((choice, len(self._layout.layers_of(stage))),))


def kind_of(layout: PipelineLayout, stage: int) -> tuple[bool, bool]:
    """Whether a stage is the first, and whether it is the last: stages of one kind differ only in their length."""
    return stage == 0, stage == layout.stages - 1


def sample_model(settings: MemorySettings) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The whole model, in float32 without dropout, and its loss on one short sample of text, for gradient errors."""
    tokenizer = settings.data.tokenizer
    if settings.model.pretrained and tokenizer == "bytes":
        tokenizer = settings.model.pretrained
    data = load_data(replace(settings.data, tokenizer=tokenizer, sequence=settings.error_tokens, batch=1))
    vocab = vocabulary(settings.model, data.tokenizer.size)
    sequence = max(settings.data.sequence, settings.error_tokens)
    exact = replace(settings.model, dropout=0.0)
    model = build_model(exact, vocab=vocab, sequence=sequence, seed=settings.seed).train()
    steps = 0 if settings.model.pretrained else settings.error_steps
    constant = OptimizerConfig(lr_warmup_steps=0, lr_end=1, clip=0)
    train_single_process(model, data.train, constant, steps=steps, batch=1, seed=settings.seed)
    sample = data.train.batch(Order(samples=len(data.train), batch=1, seed=settings.seed).ids(steps))
    return model, lambda: model_loss(model, *sample)
