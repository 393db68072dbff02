"""Tensor parallelism inside hosts and a pipeline between them, in one Transformers model, both in few bits.

    model = load_parallel("my_model", tensor=2, stages=2, dtype=torch.bfloat16)  # torchrun, 4 processes
    low_bit_parallel_(model, "calibration-tp2.safetensors", GroupInt(bits=8, group=64))

Ranks 0 and 1 share the first half of the layers, ranks 2 and 3 the second. Start ranks that share layers on one host.

`DistributedConfig(tp_size=2, pp_size=2)` fails in Transformers 5.23: after cutting the model into stages, it looks for
the layers of the whole model. `load_parallel` gives it those of the stage.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from lowbit.codecs import Codec
from lowbit.integrations.transformers import LowBitPipelineStage, from_transformers, low_bit_pipeline_
from lowbit.tensor_parallel import Calibration, Drift, Installed, SumSettings
from lowbit.tensor_parallel.low_bit import install_formats, load_agreed
from lowbit.tensor_parallel.sums import group_of, real_sums

__all__ = ["LowBitParallel", "load_parallel", "low_bit_parallel_"]

_mixin = from_transformers("transformers.distributed.mixin", "apply_tensor_parallelism")
_apply: Any = _mixin.apply_tensor_parallelism
_Config: Any = from_transformers("transformers.distributed.configuration_utils", "DistributedConfig").DistributedConfig
_pipeline = from_transformers("transformers.distributed.pipeline_parallel", "PipelineIdentityLayer")


def load_parallel(folder: str | Path, *, tensor: int, stages: int, **options: Any) -> Any:
    """Load this rank's part of a causal language model: some of its layers, and a part of their weights.

    Call it on every rank of the default group, which must have `tensor * stages` ranks. Each reads only its own part.

    Args:
        folder: of the model. tensor: number of ranks that share a layer. stages: number of pipeline stages.
        options: of `from_pretrained`, such as `dtype`.

    Raises:
        ValueError: the group has another number of ranks.
    """
    ranks = dist.get_world_size()
    if tensor < 1 or stages < 1 or tensor * stages != ranks:
        raise ValueError(
            f"tensor is {tensor} and stages is {stages}; allowed: numbers whose product is {ranks}, the number of ranks"
        )
    from transformers import AutoModelForCausalLM

    config = _Config(tp_size=tensor, pp_size=stages)
    with mock.patch.object(_mixin, "apply_tensor_parallelism", of_this_stage):
        # Transformers' own default asks on the terminal whether to run a folder's code.
        return AutoModelForCausalLM.from_pretrained(
            folder, **({"distributed_config": config, "trust_remote_code": False} | options)
        ).eval()


def of_this_stage(model: nn.Module, mesh: Any, plan: dict[str, str]) -> nn.Module:
    """Call Transformers' `apply_tensor_parallelism` without the modules that other stages hold."""
    parameters = {name for name, _ in model.named_parameters()}
    held = parameters | {
        name for name, module in model.named_modules() if not isinstance(module, _pipeline.PipelineIdentityLayer)
    }
    return _apply(model, mesh, {name: style for name, style in plan.items() if name in held})


@dataclass(frozen=True)
class LowBitParallel:
    """The changes that `low_bit_parallel_` has made to a model.

    Args:
        sums: of the tensor-parallel ranks, with counts in `sums.traffic`.
        stage: of the pipeline, with counts in `stage.traffic`.
    """

    sums: Installed
    stage: LowBitPipelineStage

    def remove(self) -> None:
        """Restore Transformers' own sums and stage; call it on every rank."""
        self.stage.remove()
        self.sums.remove()


def low_bit_parallel_(
    model: nn.Module,
    calibration: str | Path | Calibration | Codec,
    codec: Codec | None = None,
    *,
    settings: SumSettings | None = None,
    drift: Drift | None = None,
    timeout: float = 120.0,
    checksums: bool = True,
) -> LowBitParallel:
    """Sum over tensor-parallel ranks, and send between stages, in few bits; call it on every rank.

    Each rank of a stage sends its share of the rows to the next host, where the ranks exchange them: a link between
    hosts carries hidden states once. If there are few rows, each rank sends all of them.

    Args:
        model: as `load_parallel` returns it.
        calibration: of the whole model, for the number of ranks that share a layer; or a codec for all sums.
        codec: format of hidden states; None: 8 bits in groups of 64.
        settings: of sums. drift: watches whether calibrated ranges hold. timeout, checksums: of the pipeline.

    Raises:
        ValueError: a model without stages, or without tensor-parallel layers.
        CalibrationError: a calibration that cannot be read, or of another model or number of ranks.
        AgreementError: models, formats or settings differ between ranks; the same text on all.
    """
    layers, own = real_sums(model), getattr(model, "_pp_stage", None)
    if not layers or own is None:
        raise ValueError(
            f"model is {type(model).__name__} without {'stages' if layers else 'tensor-parallel layers'}; allowed: one "
            "of load_parallel with tensor and stages of at least 2"
        )
    group, settings = group_of(layers), settings or SumSettings()
    everybody: Any = dist.group.WORLD
    source = load_agreed(calibration, everybody, settings)
    if isinstance(source, Calibration):
        source.check(model, dist.get_world_size(group), layers, own.pp_group)
    with contextlib.ExitStack() as undo:
        sums = undo.enter_context(install_formats(model, layers, source, group, settings, drift))
        stage = low_bit_pipeline_(model, codec, timeout=timeout, checksums=checksums)
        undo.pop_all()
    return LowBitParallel(sums, stage)
