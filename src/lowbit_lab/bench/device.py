"""An emulated device: stages that take a given time and hand over recorded activations and gradients.

Two CPU cores cannot compute a layer of 4096 channels as fast as a GPU, but they can code its activations. So the model
runs once on each sample, and after that every stage only waits.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.train.boundaries import stock_dtype
from lowbit.train.model import StageModule, build_model, next_token_loss
from lowbit.train.prepare import Prepared
from lowbit.train.trainer import Trainer

BACKWARD = 2.0
"""Time of a backward pass, relative to a forward pass."""


@dataclass(frozen=True)
class Duration:
    """A time, as text: 50ms or 1.5s."""

    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Duration:
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
        config, layout = prepared.config, prepared.layout
        model = build_model(
            config.model, vocab=prepared.vocab, sequence=config.data.sequence, seed=config.run.seed
        ).requires_grad_(False)  # fmt: skip
        stages = [
            StageModule(
                model, layers=layout.layers_of(stage), first=stage == 0, last=stage == layout.stages - 1,
                autocast=prepared.autocast, boundary_dtype=stock_dtype(config.pipeline),
            )
            for stage in range(layout.stages)
        ]  # fmt: skip
        sent: list[list[Tensor]] = [[] for _ in stages[1:]]
        back: list[list[Tensor]] = [[] for _ in stages[1:]]
        for sample in range(samples):
            inputs, targets = prepared.data.train.batch(torch.tensor([sample]))
            x, cuts = inputs, list[Tensor]()
            for stage in stages[:-1]:
                x = stage(x).detach().requires_grad_() if not cuts else stage(x)
                x.retain_grad()
                cuts.append(x)
            next_token_loss(stages[-1](x), targets).backward()
            for boundary, cut in enumerate(cuts):
                assert cut.grad is not None
                sent[boundary].append(cut.detach())
                back[boundary].append(cut.grad)
        self.outputs = [torch.cat(each) for each in sent]
        self.gradients = [torch.cat(each) for each in back]


class Device:
    """Replaces the computing of a trainer's stages; their weights are given up.

    Args:
        trainer: on one rank, before its first step.
        recording: of its model.
        seconds: of a stage's forward pass of one micro-batch.

    Attributes:
        ids: of the samples of the step under way.
    """

    def __init__(self, trainer: Trainer, recording: Recording, seconds: float) -> None:
        self.recording, self.seconds = recording, seconds
        self.rows, self.stages = trainer.config.rows, trainer.layout.stages
        self.ids = torch.empty(0, dtype=torch.int64)
        for index, module in trainer.modules.items():
            for parameter in module.parameters():
                parameter.data = torch.empty(0)
            module.forward = _Stage(self, index, module)
        trainer.pipeline.schedule._loss_fn = _no_loss


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


def _no_loss(logits: Tensor, targets: Tensor) -> Tensor:
    del targets
    return _NoLoss.apply(logits)  # pyright: ignore[reportReturnType]
