"""AdamW, its learning rate, and the norm of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.train.config import OptimizerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """PyTorch's fused AdamW with `parameter_groups`."""
    groups = parameter_groups(parameters, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def parameter_groups(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors (norms, biases), which do not; none of the two groups is empty."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0: a linear rise, then half a cosine down to `lr * lr_end`.

    A function of the step alone, so that a resumed run needs no state of a scheduler.
    """
    rise = min(config.lr_warmup_steps, steps)
    if step < rise:
        return config.lr * (step + 1) / rise
    progress = (step - rise) / max(1, steps - 1 - rise)
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.lr_end + (1 - config.lr_end) * fall)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, and PyTorch's with `capturable`
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Sum of the squares of all elements.

    Each tensor's norm is float32, and their squares are added in float64: the sum over the stages of a pipeline, in any
    order, equals the whole model's but for the last of 53 bits.
    """
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0


def scale_(gradients: Iterable[Tensor], *, norm: float, limit: float) -> None:
    """Scale gradients in place so that their norm over all ranks, now `norm`, is at most `limit` (0: never)."""
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
