"""An identity for models, the same whether a model is whole or in shards on several ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lowbit.ranks.objects import gather_json
from lowbit.tensor_parallel.plan import text_config

_SIZES = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Fields of the config in the readable part."""
_FORMULAS = (
    "rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps",
    "hidden_act", "hidden_activation", "tie_word_embeddings", "sliding_window", "layer_types", "embedding_multiplier",
    "attention_multiplier", "residual_multiplier", "logits_scaling", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping",
)  # fmt: skip
"""Other fields that change what the same weights compute."""
_EVEN, _MODULUS = 0x9E36, 1 << 16

Sums = dict[str, tuple[bool, int, int]]
"""By parameter: whether this rank has a part of it only, and two checksums."""


def identity(model: nn.Module, layers: Mapping[str, nn.Linear], stages: dist.ProcessGroup | None = None) -> str:
    """Return a readable description and 16 hexadecimal digits: "llama, hidden_size 64, ... [0123456789abcdef]".

    The digits depend on the sizes and constants in the model's config, the names of the row-wise layers, and the names,
    shapes and contents of all parameters. Contents enter as checksums of all elements, rounded to bfloat16, and their
    positions. So a model may be calibrated in float32 and run in bfloat16, or the other way round, but not in float16,
    which rounds differently. One pass over the weights.

    On tensor-parallel ranks all of them must call it: checksums of their parts are added up. A parameter that the ranks
    hold whole, but not equal, gives another identity, the same on all of them.

    Args:
        model: a module; its config counts if it has one. layers: its row-wise layers by name.
        stages: ranks that hold the other layers of a model that is cut into stages; all of them must call this.
    """
    description, config = _describe(model), text_config(model)
    formulas = json.dumps({key: getattr(config, key, None) for key in _FORMULAS}, sort_keys=True, default=str)
    shapes = {name: list(p.shape) for name, p in _parameters(model)}
    held = {name: [shapes.get(name), sums] for name, sums in _gathered(_checksums(model), layers).items()}
    names = set(layers)
    for others, theirs in () if stages is None else gather_json([list(layers), held], stages):
        names |= set(others)
        held |= theirs
    digest = hashlib.sha256(json.dumps([description, formulas, sorted(names)]).encode())
    for name, (shape, sums) in sorted(held.items()):
        digest.update(f"/{name}/{None if shape is None else tuple(shape)}/{sums}".encode())
    return f"{description} [{digest.hexdigest()[:16]}]"


def _describe(model: nn.Module) -> str:
    """Return the sizes in the model's config; without one, the name of its class."""
    config = text_config(model)
    if config is None:
        return type(model).__name__
    sizes = {key: getattr(config, key, None) for key in _SIZES}
    kind = str(sizes.pop("model_type") or type(model).__name__)
    return ", ".join([kind, *(f"{key} {n}" for key, n in sizes.items() if n is not None)])


def _parameters(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return all parameters; tied ones twice, because cutting a model may separate them."""
    return model.named_parameters(remove_duplicate=False)


@torch.no_grad()
def _checksums(model: nn.Module) -> Sums:
    """Return sums of the bits of each parameter, or of this rank's part, weighted by row and by column, modulo 2^16.

    In int16, whose sums are ten times as fast on CPUs as wider ones.
    """
    checksums: Sums = {}
    for name, parameter in _parameters(model):
        part, starts = _part(parameter)
        bits = part.to(torch.bfloat16).contiguous().view(torch.int16)
        bits = bits.reshape(len(bits) if bits.dim() else 1, -1) if bits.numel() else bits.new_zeros(1, 1)
        sums = [_weighted(bits.sum(1 - dim, dtype=torch.int16), starts[dim]) for dim in (0, 1)]
        checksums[name] = (any(starts) or part.shape != parameter.shape, sums[0], sums[1])
    return checksums


def _part(parameter: Tensor) -> tuple[Tensor, list[int]]:
    """Return this rank's part of a parameter, and its first row and column in the whole."""
    starts = [0, 0]
    if not isinstance(parameter, DTensor):
        return parameter, starts
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            ranks, rank = parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim)
            cut = placement.dim % parameter.dim()
            size = parameter.shape[cut]
            starts[min(cut, 1)] = min(size, rank * -(-size // ranks))
    return parameter.to_local(), starts


def _weighted(sums: Tensor, start: int) -> int:
    """Add up with an odd weight for each position, so that any change shows; sums of parts add up, modulo 2^16."""
    positions = torch.arange(start, start + len(sums), device=sums.device)
    return int((sums.long() * ((positions % _MODULUS) * _EVEN + 1)).sum()) % _MODULUS


def _gathered(mine: Sums, layers: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Return checksums of whole parameters, from the parts of all ranks."""
    weight = next(iter(layers.values())).weight
    parts: list[Any] = [mine]
    if isinstance(weight, DTensor):
        parts = gather_json(mine, weight.device_mesh.get_group())
    whole: dict[str, str] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [tuple(part[name]) for part in parts if name in part]
        if not any(cut for cut, *_ in held):
            held = sorted(set(held))  # one, if all ranks hold the same
        whole[name] = str([sum(h[i] for h in held) % _MODULUS for i in (1, 2)])
    return whole
