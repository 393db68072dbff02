"""Everything of a rank that a checkpoint holds, as named tensors, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.pipeline import LowBitStage
from lowbit.train.checkpoint import pack, unpack
from lowbit.train.stages import Pipeline


def collect(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, optimizer moments, what codecs remember, and the state of random generators."""
    tensors = {"random/cpu": torch.get_rng_state()}
    if pipeline.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(pipeline.device)
    for stage in pipeline.stages:
        if isinstance(stage, LowBitStage):
            tensors[f"codecs/{stage.stage_index}"] = pack(stage.codec_state_dict())
    for name, parameter in _parameters(pipeline).items():
        tensors[f"model/{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def restore(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Take over what `collect` gave, on the same rank of an equal pipeline."""
    torch.set_rng_state(tensors["random/cpu"])
    if pipeline.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], pipeline.device)
    for stage in pipeline.stages:
        if isinstance(stage, LowBitStage):
            stage.load_codec_state_dict(unpack(tensors[f"codecs/{stage.stage_index}"]))
    for name, parameter in _parameters(pipeline).items():
        parameter.data.copy_(tensors[f"model/{name}"])
        prefix = f"optimizer/{name}/"
        moments = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        optimizer.state[parameter] = {k: v.to(parameter.device) for k, v in moments.items()}


def _parameters(pipeline: Pipeline) -> dict[str, nn.Parameter]:
    """This rank's parameters under the names they have in the whole model."""
    modules = pipeline.modules.values()
    return {name: parameter for module in modules for parameter, name in module.names.items()}
