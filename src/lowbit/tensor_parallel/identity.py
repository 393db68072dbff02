"""Computes an identity of a model that is the same for the whole model and for its shards on several ranks."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit.tensor_parallel.plan import shards, text_config
from lowbit.tensor_parallel.sums import ModelSum
from lowbit.wire.messages import gather_json

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

Sums = dict[str, tuple[list[int], bool, list[int]]]
"""By parameter: the whole shape, whether this rank has only a part of it, and a checksum for each dimension."""


def identity(model: nn.Module, layers: Mapping[str, ModelSum], stages: dist.ProcessGroup | None = None) -> str:
    """Return a readable description and 16 hexadecimal digits: "llama, hidden_size 64, ... [0123456789abcdef]".

    The digits depend on the sizes and constants in the model's config, the names of its sums, and the names,
    shapes and contents of all parameters. Contents enter as checksums of all elements, rounded to bfloat16, and their
    positions. So a model may be calibrated in float32 and run in bfloat16, or the other way round, but not in float16,
    which rounds differently. It takes one pass over the weights.

    All tensor-parallel ranks must call it: checksums of their parts are added up. If the ranks hold different whole
    copies of a parameter, the identity is another one, the same on all of them. Quantized weights also change it: each
    rank quantizes its part, and the identity is that of these parts on this number of ranks.

    Args:
        model: a module; its config counts if it has one. layers: its sums by name.
        stages: ranks that hold the other layers of a model that is cut into stages; all of them must call this.
    """
    description, config = type(model).__name__, text_config(model)
    if config is not None:
        sizes = {key: getattr(config, key, None) for key in _SIZES}
        kind = str(sizes.pop("model_type") or description)
        description = ", ".join([kind, *(f"{key} {n}" for key, n in sizes.items() if n is not None)])
    formulas = json.dumps({key: getattr(config, key, None) for key in _FORMULAS}, sort_keys=True, default=str)
    names, held = set(layers), _gathered(_checksums(model), layers)
    for others, theirs in () if stages is None else gather_json([list(layers), held], stages):
        names |= set(others)
        held |= theirs
    digest = hashlib.sha256(json.dumps([description, formulas, sorted(names)]).encode())
    for name, checksums in sorted(held.items()):
        digest.update(f"/{name}/{checksums}".encode())
    return f"{description} [{digest.hexdigest()[:16]}]"


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters; tied ones twice, because cutting a model may separate them; quantized ones in pieces."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor):
            pieces, _ = parameter.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            yield from ((f"{name}.{piece}", getattr(parameter, piece)) for piece in pieces)
        else:
            yield name, parameter


@torch.no_grad()
def _checksums(model: nn.Module) -> Sums:
    """Return sums of the bits of each parameter, or of this rank's part, weighted by position in each dimension.

    Floats are rounded to bfloat16. Computed in int16, whose sums are ten times as fast on CPUs as wider ones. Each
    position has an odd weight, so that any change shows; sums of parts add up, modulo 2^16.
    """
    checksums: Sums = {}
    for name, parameter in _parameters(model):
        part, positions = _part(parameter)
        x = part.reshape(-1, 1) if part.dim() < 2 else part
        bits = x.to(torch.bfloat16).contiguous().view(torch.int16) if x.is_floating_point() else x.to(torch.int16)
        sums = []
        for dim in range(bits.dim()):
            total = bits.sum([d for d in range(bits.dim()) if d != dim], dtype=torch.int16)
            at = positions.get(dim, torch.arange(len(total))).to(total.device) % _MODULUS
            sums.append(int((total.long() * (at * _EVEN + 1)).sum()) % _MODULUS)
        checksums[name] = (list(parameter.shape), part.shape != parameter.shape, sums)
    return checksums


def _part(parameter: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Return this rank's part of a parameter, and where its rows are in the whole, by dimension that is cut."""
    if not isinstance(parameter, DTensor):
        return parameter, {}
    positions: dict[int, Tensor] = {}
    for dim, placement in enumerate(parameter.placements):
        if (cut := getattr(placement, "dim", None)) is not None:
            ranks, rank = parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim)
            blocks = torch.arange(parameter.shape[cut]).chunk(getattr(placement, "split_factor", 1))
            positions[cut % parameter.dim()] = torch.cat([shards(block, ranks, 0)[rank] for block in blocks])
    return parameter.to_local(), positions


def _gathered(mine: Sums, layers: Mapping[str, ModelSum]) -> dict[str, str]:
    group = next(iter(layers.values())).group
    parts: list[Any] = [mine] if group is None else gather_json(mine, group)
    whole: dict[str, str] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [part[name] for part in parts if name in part]
        if not any(cut for _, cut, _ in held):
            held = [h for i, h in enumerate(held) if h not in held[:i]]  # one, if all ranks hold the same
        shapes = ",".join(str(shape) for shape in sorted({tuple(shape) for shape, _, _ in held}))
        whole[name] = f"{shapes}/{[sum(sums) % _MODULUS for sums in zip(*(h[2] for h in held), strict=True)]}"
    return whole
