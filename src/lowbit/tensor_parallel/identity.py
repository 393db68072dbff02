"""What tells two models apart, cheaply, whether whole or in shards on several ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_SIZES = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip


def identity(model: Any, boundaries: Mapping[str, nn.Linear]) -> str:
    """A readable description and 16 hexadecimal digits: "llama, hidden_size 64, ... [0123456789abcdef]".

    The digits stand for the sizes in the model's config, the names and shapes of the row-wise weights, and the
    contents of two of their rows, rounded to bfloat16, so that a model may be calibrated in one dtype and run in
    another. On tensor-parallel ranks all of them must call it: rows are gathered.

    Args:
        model: a module, or a Hugging Face config. boundaries: row-wise modules by name.
    """
    described = describe(model)
    digest = hashlib.sha256(described.encode())
    rows = {name: _rows(module.weight) for name, module in boundaries.items()}
    for name, whole in _gathered(rows, boundaries).items():
        digest.update(f"/{name}/{tuple(boundaries[name].weight.shape)}/".encode() + whole)
    return f"{described} [{digest.hexdigest()[:16]}]"


def describe(model: Any) -> str:
    """The sizes in the model's config (or of a config); a module's class, if it has none."""
    config = getattr(model, "config", model)
    if isinstance(config, nn.Module):
        return type(model).__name__
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = {key: getattr(config, key, None) for key in _SIZES}
    kind = str(sizes.pop("model_type") or type(model).__name__)
    return ", ".join([kind, *(f"{key} {n}" for key, n in sizes.items() if n is not None)])


def _rows(weight: Tensor) -> list[bytes]:
    """Two rows, or this rank's columns of them."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    rows = local.detach()[[0, local.shape[0] // 2]].to("cpu", torch.bfloat16).contiguous()
    return [row.view(torch.int16).numpy().tobytes() for row in rows]


def _gathered(
    rows: Mapping[str, list[bytes]], boundaries: Mapping[str, nn.Linear]
) -> dict[str, bytes]:
    """Whole rows by boundary, from the columns that all ranks hold."""
    weight = next(iter(boundaries.values())).weight
    parts: list[Any] = [rows]
    if isinstance(weight, DTensor):
        group = weight.device_mesh.get_group()
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, rows, group=group)
    return {
        name: b"|".join(b"".join(part[name][i] for part in parts) for i in range(len(mine)))
        for name, mine in rows.items()
    }
