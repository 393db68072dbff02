"""What the stages of a run save, by its settings, and what its ranks then take."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lowbit.activations import LayerAware, LayerPlan
from lowbit_run.config import ConfigError
from lowbit_run.train.activations import Policies, StageOfPlan, planned_settings, saved_policies
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.footprint import (
    BatchBytes,
    LayerSaves,
    ModelBytes,
    batch_meter,
    held_batches,
    model_bytes,
    rank_bytes,
)
from lowbit_run.train.layout import PipelineLayout

Batch = Callable[[LayerSaves], BatchBytes]
_LEAST, _MOST = 4, 8  # bits of AGoQ


def stage_policies(
    config: TrainConfig, layout: PipelineLayout, kept: ModelBytes, batch: Batch, *, vocab: int
) -> Policies:
    """Return the policy of each stage; None means that PyTorch saves activations as they are.

    Args:
        kept, batch: of `model_bytes` and `batch_meter`, for AGoQ.

    Raises:
        ConfigError: as in `saved_policies`; AGoQ with a plan by layer.
    """
    saved = config.activations
    settings = planned_settings(config, layout, vocab) if saved.plan else {}
    if config.run.method != "agoq":
        return saved_policies(saved, layout.stages, settings)
    if not saved.plan:
        bits = bits_by_stage(config, layout, kept, batch)
        saved = replace(saved, bits=bits, norm=bits)
    policies = saved_policies(saved, layout.stages, settings)
    by_stage = [policy for policy in policies if not isinstance(policy, StageOfPlan)]
    if len(by_stage) < len(policies):
        raise ConfigError(
            f"activations.plan is {saved.plan!r}, a plan by layer, and run.method is agoq; "
            "allowed: a plan by stage, which leaves attention as it is"
        )
    # Without the outliers that norms in 8 bits keep exactly: these are ours, not the paper's.
    return tuple(policy and replace(policy, outliers=False) for policy in by_stage)


def bits_by_stage(config: TrainConfig, layout: PipelineLayout, kept: ModelBytes, batch: Batch) -> tuple[int, ...]:
    """Return AGoQ's bits of each stage: 4 on the rank that takes most, and up to 8 where a rank takes less.

    A rank's stages get the most bits with which it takes no more memory than the fullest rank with 4: weights,
    optimizer, logits and short-lived tensors count (arXiv 2605.00539 has bits by stage, and does not describe how they
    are found; `lowbit plan memory` searches within a budget). Shapes decide alone, so all ranks find the same.
    """
    if layout.ranks == 1:
        return (_LEAST,) * layout.stages
    policies = [replace(LayerAware.published(), bits=bits, norm=bits) for bits in (_LEAST, _MOST)]
    least, most = (peaks_of(config, layout, kept, batch, (one,) * layout.stages) for one in policies)
    steps = _MOST - _LEAST  # of one bit, each of which takes as much
    bits = [  # without a difference, activations could not be counted
        min(_MOST, _LEAST + steps * (max(least) - low) // (high - low)) if high > low else _LEAST
        for low, high in zip(least, most, strict=True)
    ]
    return tuple(bits[layout.rank_of(stage)] for stage in range(layout.stages))


def rank_peaks(config: TrainConfig, layout: PipelineLayout, *, vocab: int, autocast: torch.dtype | None) -> list[int]:
    """Predict the most bytes of each rank of a pipeline: what it keeps, activations and short-lived tensors."""
    counts: dict[str, Any] = {"vocab": vocab, "autocast": autocast}
    kept = model_bytes(config, **counts)
    batch = batch_meter(config, **counts)
    return peaks_of(config, layout, kept, batch, stage_policies(config, layout, kept, batch, vocab=vocab))


def saves_of(policy: LayerAware | StageOfPlan | None, layers: int) -> list[LayerSaves]:
    """Return what each layer of a stage saves."""
    if not isinstance(policy, StageOfPlan):
        return [policy] * layers
    plan, rest = policy.plan, (policy.plan.rest[policy.stage],)
    return [LayerPlan(stages=((choice,),), rest=rest, group=plan.group) for choice in plan.stages[policy.stage]]


def peaks_of(
    config: TrainConfig, layout: PipelineLayout, kept: ModelBytes, batch: Batch, policies: Policies
) -> list[int]:
    """Predict the most bytes of each rank, as `rank_peaks` does, for given policies of the stages."""
    held = held_batches(config, layout)
    saved = [saves_of(policy, layers) for policy, layers in zip(policies, layout.layer_counts, strict=True)]
    return [
        rank_bytes(kept, batch, layout, rank, rows=config.rows, held=held, saved=saved) for rank in range(layout.ranks)
    ]
