"""Train a whole model in one process: the recipe of `lowbit train` without ranks, for measurements and tests."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lowbit_run.train.answers import Answers
from lowbit_run.train.config import OptimizerConfig
from lowbit_run.train.data import Order, Windows
from lowbit_run.train.model import next_token_loss
from lowbit_run.train.optim import Named, learning_rate, make_optimizer, set_learning_rate

Loss = Callable[[Tensor, Tensor], Tensor]
"""Computes the mean loss of samples from inputs and targets: int64 (samples, sequence) each."""


class PlainGradients:
    """PyTorch's gradients: in `.grad`, for the whole batch at once. Subclasses compute or apply them differently."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def backward(self, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a batch, and return its mean loss."""
        mean = loss(inputs, targets)
        mean.backward()
        return mean.detach()

    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> None:
        """Clip the gradients to this norm (0: never), take the optimizer's step, and drop the gradients."""
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def model_loss(model: nn.Module, inputs: Tensor, targets: Tensor, *, autocast: torch.dtype | None = None) -> Tensor:
    """Compute the mean loss in nats per token. inputs, targets: int64 (batch, sequence), on any device."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        logits = model(input_ids=inputs.to(device), use_cache=False).logits
    return next_token_loss(logits, targets.to(device))


def train_single_process(
    model: nn.Module,
    windows: Windows | Answers,
    optimizer: OptimizerConfig,
    *,
    steps: int,
    batch: int,
    seed: int,
    samples: int = 0,
    autocast: torch.dtype | None = None,
    gradients: PlainGradients | None = None,
    make: Callable[[Named, OptimizerConfig], torch.optim.Optimizer] = make_optimizer,
    before_step: Callable[[int, Tensor], None] | None = None,
    after_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a model in place, on the same samples in the same order as `lowbit train` with this seed.

    Args:
        model: a Hugging Face causal language model, in training mode, on its device. The caller prepares low-bit
            boundaries and saved activations: `emulate_(model, ...)`, `compress_saved_(model, ...)`.
        windows: the text. samples: number of windows to train on, the same in every epoch; 0: all.
        optimizer: `lr_warmup_steps=0, lr_end=1` keeps `lr` constant. make: makes it.
        batch: windows of a step. seed: determines their order.
        autocast: dtype of matrix products; None: that of the weights. gradients: None: PyTorch's.
        before_step: called with the step number (from 0) and its sample ids, int64 (batch,).
        after_step: called with the step number and its loss, after the optimizer's step.

    Returns:
        The training loss of every step, in nats per token.
    """
    order = Order(samples=min(samples or len(windows), len(windows)), batch=batch, seed=seed)
    adamw = make(model.named_parameters(), optimizer)
    gradients = gradients or PlainGradients(model)
    loss = partial(model_loss, model, autocast=autocast)
    losses: list[float] = []
    for step in range(steps):
        ids = order.ids(step)
        if before_step is not None:
            before_step(step, ids)
        set_learning_rate(adamw, learning_rate(optimizer, step=step, steps=steps))
        mean = gradients.backward(loss, *windows.batch(ids))
        gradients.step(adamw, optimizer.clip)
        losses.append(mean.item())
        if after_step is not None:
            after_step(step, losses[-1])
    return losses
