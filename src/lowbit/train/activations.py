"""What the stages of a run keep of their activations, worked out from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.ranks.pytorch import version
from lowbit.train.config import ActivationsConfig
from lowbit.train.section import ConfigError

Policies = tuple[LayerAware | None, ...]

_SPLITTING = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_SPLITS_SINCE = 2, 13


def saved_policies(config: ActivationsConfig, stages: int) -> Policies:
    """For each stage what it keeps; None: what PyTorch keeps.

    Raises:
        ConfigError: bits or groups that no codec has, or lists of another length than there are stages.
    """
    values = {name: _each(config, name, stages) for name in ("bits", "norm", "mlp", "linear")}
    return tuple(
        _policy(config, {name: each[stage] for name, each in values.items() if each}) for stage in range(stages)
    )


def check_schedule(policies: Policies, schedule: str) -> None:
    """Check that this PyTorch can split the backward of modules that keep few bits.

    Before 2.13 it lets go of what a `torch.autograd.Function` has saved between the passes for inputs and for weights.

    Raises:
        ConfigError: it cannot, and the schedule does so.
    """
    if any(policies) and schedule in _SPLITTING and version() < _SPLITS_SINCE:
        raise ConfigError(
            f"pipeline.schedule is {schedule!r}; with activations.bits below 16 it needs PyTorch 2.13 or newer, here is"
            f" {torch.__version__}; allowed: a schedule without weight passes, such as 1F1B"
        )


def compress(module: nn.Module, policy: LayerAware | None, device: torch.device) -> None:
    """Have a stage's module keep what the policy says; kernels are compiled before a peer waits."""
    if policy is None:
        return
    compress_saved_(module, policy)
    small = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).to(device)
    compress_saved_(small, policy)
    small(torch.ones(1, 8, device=device)).sum().backward()


def _each(config: ActivationsConfig, name: str, stages: int) -> tuple[int, ...]:
    """One number for each stage, or none."""
    values = getattr(config, name)
    if len(values) not in (0 if name != "bits" else 1, 1, stages):
        raise ConfigError(
            f"activations.{name} has {len(values)} entries; allowed: one, or one for each of {stages} stages"
        )
    return values * stages if len(values) == 1 else values


def _policy(config: ActivationsConfig, bits: dict[str, Any]) -> LayerAware | None:
    try:
        policy = LayerAware(**bits, group=config.group, rounding=config.rounding)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"activations.{error}") from error
    return None if set(bits.values()) == {16} else policy
