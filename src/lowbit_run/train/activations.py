"""Choose the bits of each stage's saved activations, from the configuration or the plan file that it names."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from lowbit.activations import LayerAware, LayerPlan, compress_saved_
from lowbit.activations.layer_plan import PLANNED
from lowbit.activations.policy import WHOLE
from lowbit.codecs import parse
from lowbit_run.config import ConfigError
from lowbit_run.train.config import FULL_PRECISION, ActivationsConfig, TrainConfig
from lowbit_run.train.layout import PipelineLayout, even
from lowbit_run.train.model import architecture


@dataclass(frozen=True, kw_only=True)
class StageOfPlan:
    """A stage's part of a plan for each layer."""

    plan: LayerPlan
    stage: int
    rounding: str


_BITS = ("bits", *PLANNED, "attention")
Policies = tuple[LayerAware | StageOfPlan | None, ...]


def saved_policies(config: ActivationsConfig, stages: int, settings: Mapping[str, Any]) -> Policies:
    """Return the policy of each stage; None means that PyTorch saves activations as they are.

    Args:
        config: bits, or the file of a plan. stages: number of stages.
        settings: the run's `planned_settings`; a plan must have been made for the same.

    Raises:
        ConfigError: invalid bits or groups, lists of the wrong length, a file without a plan or with one for another
            run, or both bits and a plan.
    """
    if config.plan:
        plan, path = _read(config.plan), config.plan
        if len(plan.stages) != stages:
            raise ConfigError(f"activations.plan: {path} has bits for {len(plan.stages)} stages; this run has {stages}")
        for name, value in settings.items():
            if (planned := plan.made_for.get(name)) != value:
                raise ConfigError(
                    f"activations.plan: {path} was made for {name} {planned!r}; here it is {value!r}; "
                    "allowed: what `lowbit plan memory` wrote for this run"
                )
        if not plan.is_by_stage:
            _check_alone(config)
            return tuple(StageOfPlan(plan=plan, stage=stage, rounding=config.rounding) for stage in range(stages))
    config, _ = written_out(config)
    values = {name: _each(config, name, stages) for name in _BITS}
    return tuple(
        _policy(config, {name: each[stage] for name, each in values.items() if each}) for stage in range(stages)
    )


def planned_settings(config: TrainConfig, layout: PipelineLayout, vocab: int) -> dict[str, Any]:
    """Return the settings that determine a run's memory, by name; a plan records them, and a run compares its own."""
    storage = config.gradients.storage
    settings = {f"model.{key}": value for key, value in architecture(config.model, vocab=vocab).items()}
    uneven = layout.layer_counts != even(sum(layout.layer_counts), layout.stages)
    return settings | {
        "pipeline.layers": ", ".join(map(str, layout.layer_counts)) if uneven else None,
        "model.dropout": config.model.dropout,
        "data.sequence": config.data.sequence,
        "samples of a micro-batch": config.rows,
        "pipeline.ranks": layout.ranks,
        "pipeline.stages_per_rank": layout.stages_per_rank,
        "pipeline.schedule": config.pipeline.schedule,
        "pipeline.microbatches": config.pipeline.microbatches,
        "gradients.storage": storage if storage == FULL_PRECISION else repr(parse(storage)),
        "weights": "fp32",
        "optimizer": "adamw" if config.optimizer.states == FULL_PRECISION else "adamw-8bit",
    }


def written_out(config: ActivationsConfig) -> tuple[ActivationsConfig, str | None]:
    """Replace a plan by stage with its bits; of a plan by layer, also return a digest in place of the path."""
    if not config.plan:
        return config, None
    _check_alone(config)
    plan = _read(config.plan)
    if not plan.is_by_stage:
        values = asdict(replace(plan, made_for={}))
        return replace(config, plan=""), hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
    policies = [plan.policy(stage) for stage in range(len(plan.stages))]
    bits: dict[str, Any] = {kind: tuple(policy.bits_of(kind) for policy in policies) for kind in _BITS[1:]}
    if len(set(bits["attention"])) == 1:  # as a user would write it
        bits["attention"] = bits["attention"][:1]
    return replace(config, plan="", group=plan.group, **bits), None


def _check_alone(config: ActivationsConfig) -> None:
    defaults = ActivationsConfig()
    for name in (*_BITS, "group"):
        if (value := getattr(config, name)) != getattr(defaults, name):
            raise ConfigError(
                f"activations.{name} is {value} and activations.plan is {config.plan!r}; allowed: one of the two"
            )


def compress(module: nn.Module, policy: LayerAware | StageOfPlan | None, device: torch.device) -> None:
    """Make a stage's module compress its saved activations, and compile the kernels before a peer waits."""
    if policy is None:
        return
    if isinstance(policy, StageOfPlan):
        try:
            policy.plan.apply_(module, stage=policy.stage, rounding=policy.rounding)
        except ValueError as error:
            raise ConfigError(f"activations.plan does not fit this run: {error}") from None
        plan, stage = policy.plan, policy.stage
        coded = next((choice for choice in (*plan.stages[stage], plan.rest[stage]) if choice.is_coded), None)
        if coded is None:
            return
        policy = LayerAware(**coded.bits, group=plan.group, rounding=policy.rounding)
    else:
        compress_saved_(module, policy)
    small = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).to(device)
    compress_saved_(small, policy)
    small(torch.ones(1, 8, device=device)).sum().backward()


def _read(path: str) -> LayerPlan:
    try:
        return LayerPlan.read(path)
    except ValueError as error:
        raise ConfigError(f"activations.plan: {error}; allowed: a file that `lowbit plan memory` wrote") from None


def _each(config: ActivationsConfig, name: str, stages: int) -> tuple[int, ...]:
    """Return one number for each stage; empty if the setting is omitted."""
    values = getattr(config, name)
    if len(values) not in (1, stages) and (values or name == "bits"):
        allowed = f"one, or one for each of {stages} stages"
        raise ConfigError(f"activations.{name} has {len(values)} entries; allowed: {allowed}")
    return values * stages if len(values) == 1 else values


def _policy(config: ActivationsConfig, bits: dict[str, Any]) -> LayerAware | None:
    try:
        policy = LayerAware(**bits, group=config.group, rounding=config.rounding)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"activations.{error}") from error
    return None if set(bits.values()) == {WHOLE} else policy
