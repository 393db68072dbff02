"""AdamW, its learning rate, and the norm of gradients over all ranks."""

import importlib.util
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_run.train.config import OptimizerConfig
from lowbit_run.train.rounding import RoundingAdamW

Named = Iterable[tuple[str, nn.Parameter]]
"""Parameters by their names in the whole model; copies of one have the same name."""
_LEAST, _BLOCK = 4096, 256  # torchao keeps smaller states, and those that its blocks do not divide, in float32


def make_optimizer(parameters: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make AdamW with `parameter_groups`: PyTorch's fused one, or torchao's if states have 8 bits.

    If weights are bfloat16, it is `RoundingAdamW`.
    """
    groups = parameter_groups(parameters := list(parameters), config)
    if any(p.dtype == torch.bfloat16 for group in groups for _, p in group["params"]):
        zeros = zeros_8bit if config.states == "8bit" else None
        return RoundingAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, zeros=zeros)
    if config.states == "8bit":
        return eight_bit_adamw(parameters, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def eight_bit_adamw(parameters: Named, config: OptimizerConfig, *, compiled: bool = False) -> torch.optim.Optimizer:
    """Make torchao's AdamW with 8-bit states.

    `compiled`: compile it on a CPU too, if there is a C++ compiler: four times as fast, but takes extra memory.
    """
    import torchao.optim  # pyright: ignore[reportMissingImports]

    groups = parameter_groups(parameters, config)
    adamw = torchao.optim.AdamW8bit(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    if not groups[0]["params"][0][1].is_cuda and not (compiled and shutil.which(os.environ.get("CXX", "g++"))):
        step = adamw.step

        def eager(*args: Any, **kwargs: Any) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return step(*args, **kwargs)

        adamw.step = eager
    return adamw


def state_bytes(elements: int, config: OptimizerConfig) -> int:
    """Return the bytes of both states of a parameter, whatever its dtype."""
    if config.states == "8bit" and _has_8bit(elements):
        return 2 * (elements + 4 * elements // _BLOCK)  # codes, and a float32 scale for each block
    return 2 * 4 * elements


def _has_8bit(elements: int) -> bool:
    return elements >= _LEAST and elements % _BLOCK == 0


def zeros_8bit(parameter: Tensor, signed: bool) -> Tensor:
    """Make an 8-bit state of zeros; in float32 for the parameters for which torchao does so."""
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    if not _has_8bit(parameter.numel()):
        return torch.zeros_like(parameter, dtype=torch.float32)
    return OptimState8bit.zeros(parameter.shape, signed, _BLOCK, parameter.device, torch.float32)


def check_torchao() -> None:
    """Raise ModuleNotFoundError without torchao; the command line derives from it what to install."""
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError("No module named 'torchao'", name="torchao")


def parts_of(state: Tensor) -> dict[str, Tensor]:
    """Split a state into plain tensors; an 8-bit one has codes, scales and table, by "/" and their names."""
    if not hasattr(state, "__tensor_flatten__"):
        return {"": state}
    names, _ = state.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return {f"/{name}": getattr(state, name) for name in names}


def state_of(parts: Mapping[str, Tensor]) -> Tensor:
    """Invert `parts_of`."""
    if "" in parts:
        return parts[""]
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    codes, scale, table = (parts[f"/{name}"] for name in ("codes", "scale", "qmap"))
    return OptimState8bit(codes, scale, table, signed=bool((table < 0).any()))


def parameter_groups(parameters: Named, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group matrices, which decay, and vectors (norms, biases), which do not; empty groups are left out."""
    parameters = list(parameters)
    groups = [
        {"params": [pair for pair in parameters if pair[1].dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [pair for pair in parameters if pair[1].dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """Return the learning rate of a step (from 0): a linear rise, then half a cosine down to `lr * lr_end`.

    It depends on the step alone, so that a resumed run needs no scheduler state.
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
    """Sum the squares of all elements.

    Each tensor's norm is float32, and the squares are added in float64: the sum over the stages of a pipeline, in any
    order, differs from the whole model's by at most the last of 53 bits.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0


def scale_(gradients: Iterable[Tensor], *, norm: float, limit: float) -> None:
    """Scale gradients in place so that their norm over all ranks, now `norm`, is at most `limit` (0: never)."""
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
