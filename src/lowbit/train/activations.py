"""What the stages of a run keep of their activations, worked out from its configuration."""

from __future__ import annotations

import torch
from torch import nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.train.config import ActivationsConfig
from lowbit.train.section import ConfigError

Policies = tuple[LayerAware | None, ...]


def saved_policies(config: ActivationsConfig, stages: int) -> Policies:
    """For each stage what it keeps; None: what PyTorch keeps.

    Raises:
        ConfigError: bits or groups that no codec has, or lists of another length than there are stages.
    """
    bits, norm, mlp, linear = (
        _each(config, name, stages) for name in ("bits", "norm", "mlp", "linear")
    )
    return tuple(
        _policy(config, *of_stage) for of_stage in zip(bits, norm, mlp, linear, strict=True)
    )


def compress(module: nn.Module, policy: LayerAware | None, device: torch.device) -> None:
    """Have a stage's module keep what the policy says; kernels are compiled before a peer waits."""
    if policy is None:
        return
    compress_saved_(module, policy)
    small = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).to(device)
    compress_saved_(small, policy)
    small(torch.ones(1, 8, device=device)).sum().backward()


def _each(config: ActivationsConfig, name: str, stages: int) -> tuple[int | None, ...]:
    values = getattr(config, name)
    if not values and name != "bits":
        return (None,) * stages
    if len(values) not in (1, stages):
        raise ConfigError(
            f"activations.{name} has {len(values)} entries; allowed: one, or one for each of {stages} stages"
        )
    return values if len(values) == stages else values * stages


def _policy(
    config: ActivationsConfig, bits: int, norm: int | None, mlp: int | None, linear: int | None
) -> LayerAware | None:
    try:
        policy = LayerAware(
            bits=bits,
            norm=norm,
            mlp=mlp,
            linear=linear,
            group=config.group,
            rounding=config.rounding,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"activations.{error}") from error
    return None if {bits, norm, mlp, linear} <= {16, None} else policy
