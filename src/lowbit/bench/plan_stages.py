"""What `lowbit plan memory` measures: bytes of pipeline stages, and errors of a model's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit.activations.budget import CHOSEN, Sensitivities, StageCost
from lowbit.activations.counting import Kept, counted
from lowbit.activations.measure import bytes_between_passes, bytes_by_width, sensitivities
from lowbit.activations.policy import LayerAware
from lowbit.activations.saved import compress_saved_
from lowbit.codecs import parse
from lowbit.train.config import FULL_PRECISION, DataConfig, OptimizerConfig
from lowbit.train.data import Order, load_data
from lowbit.train.layout import Layout
from lowbit.train.model import StageModule, build_model, hugging_face_config, next_token_loss, vocabulary
from lowbit.train.optim import make_optimizer

if TYPE_CHECKING:
    from lowbit.bench.plan_memory import Settings

OPTIMIZERS = {"adamw": 8.0, "adamw-8bit": 2 + 2 * 4 / 256}
"""Bytes of state for each parameter: two in float32, or torchao's in 8 bits with a float32 scale for each 256."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """What a stage costs with every number of bits; `plain`: bytes that it keeps of a micro-batch in plain BF16."""

    cost: StageCost
    plain: int


class StageMeter:
    """Counts bytes on stages of two decoder layers of the real width and micro-batch, one of each kind.

    The second layer stands for all that follow; the first may differ, because a stage's input is not counted.
    """

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        self.settings, self.splits = settings, settings.held.splits
        vocab = vocabulary(settings.model, 256)
        config: Any = hugging_face_config(settings.model, vocab=vocab, sequence=settings.sequence)
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        torch.manual_seed(settings.seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
        self.model = model.bfloat16() if settings.weights == "bf16" else model
        self.mixed = settings.weights == "fp32"
        self.wire = torch.float32 if self.mixed else torch.bfloat16
        self._found: dict[tuple[bool, bool], _TwoLayers] = {}

    def stage(self, layout: Layout, stage: int) -> MeasuredStage:
        """A stage of the pipeline."""
        kind = (stage == 0, stage == layout.stages - 1)
        if kind not in self._found:
            self._found[kind] = self._measure(*kind)
        return self._found[kind].times(len(layout.layers_of(stage)))

    def _measure(self, first: bool, last: bool) -> _TwoLayers:
        module = self._module(2, first, last)
        ids, given = self._batch(module)

        def forward() -> Tensor:
            out = module(given)
            return next_token_loss(out, ids) if last else out

        with counted(module) as plain:
            graph = forward()
        del graph
        with torch.no_grad():
            output = module(given).nbytes
        return _TwoLayers(
            widths=bytes_by_width(module, forward, group=self.settings.group),
            plain=plain,
            output=output,
            inputs=given.nbytes if self.splits and not first else 0,
            received=0 if first else given.nbytes,
            gradients=[self._gradients(layers, first, last) for layers in (1, 2)],
            module=module,
            settings=self.settings,
        )

    def _module(self, layers: int, first: bool, last: bool) -> StageModule:
        return StageModule(
            self.model, layers=range(layers), first=first, last=last,
            autocast=torch.bfloat16 if self.mixed else None, boundary_dtype=self.wire,
        ).train()  # fmt: skip

    def _batch(self, module: StageModule) -> tuple[Tensor, Tensor]:
        """Token ids of a micro-batch, and what the stage is given of it."""
        shape = (self.settings.batch, self.settings.sequence)
        ids = torch.randint(module.vocab, shape, generator=torch.Generator().manual_seed(0))
        if module.first:
            return ids, ids
        return ids, torch.randn(*shape, module.width, dtype=self.wire, requires_grad=True)

    def _gradients(self, layers: int, first: bool, last: bool) -> int:
        """Bytes that a stage of so many layers holds between two passes of backward; the first has only one."""
        if first or not self.splits:
            return 0
        module = self._module(layers, first, last)
        ids, given = self._batch(module)
        compressed = compress_saved_(module, LayerAware(group=self.settings.group))
        try:
            out = module(given)
            gradient = None if last else torch.ones_like(out)
            out = next_token_loss(out, ids) if last else out
            return bytes_between_passes(out, gradient, given, module.parameters())
        finally:
            compressed.remove()


@dataclass(frozen=True, kw_only=True)
class _TwoLayers:
    """A stage with two decoder layers, measured; `gradients` with one and with two."""

    widths: Mapping[int, Kept]
    plain: Kept
    output: int
    inputs: int
    received: int
    gradients: Sequence[int]
    module: StageModule
    settings: Settings

    def times(self, layers: int) -> MeasuredStage:
        """The same stage with so many layers."""
        saved = {
            kind: {bits: self._bytes(kept, layers, (kind,)) for bits, kept in self.widths.items()} for kind in CHOSEN
        }
        kept = self.widths[max(self.widths)]
        others = tuple({kind for kind, _ in kept.modules} - {*CHOSEN, "weights"})
        named = self.module.named_parameters()
        fixed = sum(self._fixed(p) * self._times(name, layers) for name, p in named)
        other = self._bytes(kept, layers, others)
        one, two = self.gradients
        loss = self._bytes(kept, layers, ("loss",))
        cost = StageCost(
            layers=layers, saved=saved, other=other, output=self.output, inputs=self.inputs, received=self.received,
            early=loss + self.output if self.module.last else 0, gradients=one + (layers - 1) * (two - one),
            fixed=round(fixed),
        )  # fmt: skip
        kinds = tuple({kind for kind, _ in self.plain.modules} - {"weights"})
        return MeasuredStage(cost=cost, plain=self._bytes(self.plain, layers, kinds))

    def _bytes(self, kept: Kept, layers: int, kinds: tuple[str, ...]) -> int:
        found = kept.modules.items()
        return sum(size * self._times(name, layers) for (kind, name), size in found if kind in kinds)

    def _times(self, name: str, layers: int) -> int:
        """How often what has this name is there in a stage of so many layers."""
        lists = (n for n, m in self.module.named_modules() if isinstance(m, nn.ModuleList))
        return layers - 1 if f"{name}.".startswith(f"{next(lists)}.1.") else 1

    def _fixed(self, parameter: nn.Parameter) -> float:
        """Bytes of a parameter, its gradient and its state."""
        gradient = float(parameter.nbytes)
        if self.settings.gradients != FULL_PRECISION:
            gradient = parse(self.settings.gradients).nbytes(parameter.shape)
        return parameter.nbytes + gradient + OPTIMIZERS[self.settings.optimizer] * parameter.numel()


def gradient_errors(settings: Settings) -> Sensitivities:
    """Errors of the whole model's gradient by layer type and bits, on one short sample of text.

    Computed in float32, after some steps of training unless the model is pretrained.
    """
    data = DataConfig(
        text=settings.text, tokenizer=settings.pretrained or "bytes", sequence=settings.error_tokens,
        batch=1, max_bytes=settings.max_bytes,
    )  # fmt: skip
    loaded = load_data(data)
    vocab = vocabulary(settings.model, loaded.tokenizer.size)
    sequence = max(settings.sequence, settings.error_tokens)
    model = build_model(settings.model, vocab=vocab, sequence=sequence, seed=settings.seed).train()
    order = Order(samples=len(loaded.train), batch=1, seed=settings.seed)

    def loss(step: int) -> Tensor:
        inputs, targets = loaded.train.batch(order.ids(step))
        return next_token_loss(model(input_ids=inputs, use_cache=False).logits, targets)

    steps = 0 if settings.pretrained else settings.error_steps
    optimizer = make_optimizer(model.parameters(), OptimizerConfig())
    for step in range(steps):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    return sensitivities(model, lambda: loss(steps), group=settings.group)
