"""Training in one process, with the error of every message and of the gradient measured on the way."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.codecs import Codec
from lowbit.pipeline import Traffic, emulate_
from lowbit.train.single_process import Loss, PlainGradients
from lowbit_lab.bench.codec_speed import ends_of

WAYS = ("forward", "backward")
Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 (samples, sequence) each."""


@dataclass
class Meter:
    """The error of what crosses one boundary in one direction.

    Args:
        codec: the format.
        repeats: how often `add(again=True)` sends a tensor.

    Attributes:
        errors: |y - x|^2 / |x|^2 of each message x that arrived as y.
        repeated: `bias_of` of the messages that were sent again.
    """

    codec: Codec
    repeats: int
    errors: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    _sums: list[Tensor] = field(default_factory=lambda: [torch.zeros(()), torch.zeros(())])  # of every other message
    _tokens: list[int] = field(default_factory=lambda: [0, 0])
    _energy: float = 0.0

    def add(self, sent: Tensor, arrived: Tensor, *, again: bool = False) -> None:
        """Count a message (..., C); `again`: send it `repeats` times more, through sessions of its own."""
        x = sent.detach().double()
        error = (arrived.detach().double() - x).reshape(-1, x.shape[-1])
        signal, noise = float(x.square().sum()), float(error.square().sum())
        if not signal:
            return
        half = len(self.errors) % 2
        self.errors.append(noise / signal)
        self._sums[half] = self._sums[half].to(error.device) + error.sum(0)
        self._tokens[half] += len(error)
        self._energy += noise
        if again and noise:
            self.repeated.append(bias_of(self.codec, sent.detach(), self.repeats))

    def constant(self) -> float | None:
        """Share of the error's energy in its mean over all tokens of all messages; None without an error.

        The means of every other message are multiplied with those of the rest, so unbiased noise gives 0 on average.
        """
        if not (all(self._tokens) and self._energy):
            return None
        first, second = (total / tokens for total, tokens in zip(self._sums, self._tokens, strict=True))
        return float(first @ second) * sum(self._tokens) / self._energy


def bias_of(codec: Codec, x: Tensor, repeats: int) -> float:
    """Share of the error's energy that is the same whenever a tensor is sent: 1 if all of it is, 0 if E[y] = x.

    The tensor goes through new sessions again and again. Their first message, which may choose directions, does not
    count.
    """
    sender, receiver = ends_of(codec, x)
    receiver.decode(sender.encode(x))
    total, energy = torch.zeros_like(x, dtype=torch.float64), 0.0
    for _ in range(repeats):
        error = receiver.decode(sender.encode(x)).double() - x.double()
        total += error
        energy += float(error.square().sum())
    return (float(total.square().sum()) - energy) / ((repeats - 1) * energy) if energy else 0.0


class Observed(PlainGradients):
    """Gradients of a model with low-bit boundaries, compared with exact ones now and then.

    Args:
        model: in training mode. Until `close`, the codecs are in it.
        at: names of the modules that end a stage.
        codecs: of activations and gradients.
        warmup_steps: first steps at full precision. Nothing is measured in them.
        every: steps from one comparison to the next; the first is that of the first coded step.
        repeats: how often messages of these steps are sent again.
        fixed: two batches for the squared norm of the exact gradient.

    Attributes:
        meters: by direction, one for each boundary.
        alignment: of each comparison, see `aligned`.
        norms: pairs of the coded steps before a comparison and the squared norm there, the product of the exact
            gradients of both fixed batches: their noise is independent, so that it is unbiased.
    """

    def __init__(
        self, model: nn.Module, at: Sequence[str], codecs: tuple[Codec, Codec],
        *, warmup_steps: int, every: int, repeats: int, fixed: tuple[Batch, Batch],
    ) -> None:  # fmt: skip
        super().__init__(model)
        self._modules = [model.get_submodule(name) for name in at]
        self._warmup_steps, self._every, self._fixed = warmup_steps, every, fixed
        self._steps = 0
        self._repeating = False
        self._sent: dict[int, Tensor] = {}  # what has left in this direction, by boundary
        self._before = Traffic()
        self.meters = {
            way: [Meter(codec, repeats) for _ in at] for way, codec in zip(WAYS, codecs, strict=True)
        }  # fmt: skip
        self.alignment: list[dict[str, float]] = []
        self.norms: list[tuple[int, float]] = []
        leaving = [m.register_forward_hook(self._hook(i, self._leaves)) for i, m in enumerate(self._modules)]
        self._emulation = emulate_(
            model, at=at, forward=codecs[0], backward=codecs[1], warmup_steps=warmup_steps, in_evaluation=False
        )
        arriving = [m.register_forward_hook(self._hook(i, self._arrives)) for i, m in enumerate(self._modules)]
        self._handles = [*leaving, *arriving]

    def backward(self, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
        """As `Gradients`; measures every message after the warm-up, and compares gradients when it is time."""
        coded = self._steps - self._warmup_steps
        if coded == 0:
            self._before = replace(self._emulation.traffic)
        self._repeating = coded >= 0 and coded % self._every == 0
        exact = torch.zeros(0)
        if self._repeating:
            exact = self._exact(loss, inputs, targets)
            first, second = (self._exact(loss, *batch) for batch in self._fixed)
            self.norms.append((coded, float(first @ second)))
        mean = super().backward(loss, inputs, targets)
        if self._repeating:
            self.alignment.append(aligned(exact, self._gradient()))
        self._emulation.step()
        self._steps += 1
        return mean

    def bits(self) -> dict[str, float]:
        """Bits per element each way, once the warm-up is over, every byte counted."""
        sent, before = self._emulation.traffic, self._before
        parts = {}
        for way in WAYS:
            size, elements = (
                getattr(sent, f"{way}_{what}") - getattr(before, f"{way}_{what}") for what in ("bytes", "elements")
            )
            parts[f"bits_{way}"] = 8 * size / elements if elements else 0.0
        return parts

    def close(self) -> None:
        """Take codecs and hooks out of the model."""
        self._emulation.remove()
        while self._handles:
            self._handles.pop().remove()

    def _exact(self, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient without codecs, of the same dropout as what is computed next."""
        for module in self._modules:
            module.training = False  # of itself, not of its parts: the emulation then leaves it out
        try:
            with torch.random.fork_rng():
                loss(inputs, targets).backward()
        finally:
            for module in self._modules:
                module.training = True
        gradient = self._gradient()
        self.model.zero_grad()
        return gradient

    def _gradient(self) -> Tensor:
        """All gradients in one vector of its own."""
        parts = (p.grad for p in self.model.parameters() if p.grad is not None)
        return torch.cat([part.detach().double().flatten() for part in parts])

    def _hook(self, boundary: int, what: Callable[[int, Tensor], None]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module.training and self._steps >= self._warmup_steps:
                what(boundary, output if isinstance(output, Tensor) else output[0])

        return hook

    def _leaves(self, boundary: int, x: Tensor) -> None:
        """An activation leaves here, and its gradient arrives."""
        self._sent[boundary] = x.detach()
        x.register_hook(lambda gradient: self._count("backward", boundary, gradient))

    def _arrives(self, boundary: int, y: Tensor) -> None:
        """An activation arrives here, and its gradient leaves."""
        self._count("forward", boundary, y)
        y.register_hook(lambda gradient: self._sent.update({boundary: gradient}))

    def _count(self, way: str, boundary: int, arrived: Tensor) -> None:
        with torch.no_grad(), torch.autocast(arrived.device.type, enabled=False):
            self.meters[way][boundary].add(self._sent.pop(boundary), arrived, again=self._repeating)


def aligned(exact: Tensor, coded: Tensor) -> dict[str, float]:
    """Compare the gradient h that came through codecs with the exact one, g.

    Returns:
        `cosine`; `projection`, <g, h> / |g|^2; `gradient_error`, |h - g|^2 / |g|^2.
    """
    square, product = float(exact @ exact), float(exact @ coded)
    return {
        "cosine": product / (float(coded.norm()) * square**0.5),
        "projection": product / square,
        "gradient_error": float((coded - exact).square().sum()) / square,
    }


def running(norms: Sequence[tuple[int, float]], every: int) -> list[tuple[int, float]]:
    """Means of the squared norm from the first coded step on, each under the steps that it stands for."""
    totals = itertools.accumulate(norm for _, norm in norms)
    return [(step + every, total / (i + 1)) for i, ((step, _), total) in enumerate(zip(norms, totals, strict=True))]


def slope_of(curve: Sequence[tuple[int, float]]) -> float | None:
    """Slope of a straight line through logarithms; None with fewer than three points, or one that is not positive."""
    if len(curve) < 3 or min(value for _, value in curve) <= 0:
        return None
    xs, ys = (torch.tensor(column, dtype=torch.float64).log().tolist() for column in zip(*curve, strict=True))
    return statistics.linear_regression(xs, ys).slope
