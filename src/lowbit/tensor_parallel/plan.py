"""Which layers of a model tensor parallelism cuts, and how, from the model's own plan."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lowbit.tensor_parallel.encoders import encoder_plan

COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
ROW = ("rowwise",)
ROW_OF_WHOLE_INPUT = ("rowwise_rep", "rowwise_split_input")
"""Styles of Hugging Face plans. Column-wise: the weight is cut by outputs. Row-wise: it is cut by inputs, and a rank is
given its own part of the input, or the whole of it."""
_EXACT = ("embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate")
"""Styles that do not change results, not even in the last bit."""

Plan = Mapping[str, str]
"""Style by module name, in which `*` stands for the number of a layer."""


def plan_of(model: nn.Module, plan: Plan | None = None) -> dict[str, tuple[nn.Linear, str]]:
    """Return layer and style by module name, in the order of the model's modules, without styles that change nothing.

    Args:
        model: a Hugging Face model, which brings its own plan, or any module with one.
        plan: overrides the model's.

    Raises:
        ValueError: no plan, an unknown style, a module other than `Linear`, or no row-wise layer.
    """
    rules = dict(plan if plan is not None else getattr(model, "_tp_plan", None) or encoder_plan(model))
    if not rules:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan; allowed: a model with one (Llama, Qwen, Mistral, "
            "Gemma, ... of Hugging Face), or plan={'layers.*.mlp.down_proj': 'rowwise', ...}"
        )
    planned: dict[str, tuple[nn.Linear, str]] = {}
    for name, module in model.named_modules():
        style = next((s for rule, s in rules.items() if fnmatch.fnmatchcase(name, rule)), None)
        if style is None or style in _EXACT:
            continue
        if style not in COLUMN and not is_row(style):
            known = ", ".join((*COLUMN, *ROW, *ROW_OF_WHOLE_INPUT, *_EXACT))
            raise ValueError(f"{name} has the style {style!r}; allowed: {known}")
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is {type(module).__name__}; allowed for tensor parallelism here: torch.nn.Linear")
        planned[name] = (module, style)
    if not any(is_row(style) for _, style in planned.values()):
        raise ValueError(
            f"no module of {type(model).__name__} is row-wise parallel by the plan {rules}; allowed: at least one"
        )
    return planned


def is_row(style: str) -> bool:
    """Whether a layer of this style computes partial sums."""
    return style in (*ROW, *ROW_OF_WHOLE_INPUT)


def rowwise_layers(model: nn.Module, plan: Plan | None = None) -> dict[str, nn.Linear]:
    """Return the layers whose outputs are partial sums over the ranks, by module name.

    In a model that is tensor parallel already they are found by their weights, else by the plan (`plan_of`).
    """
    if sharded := sharded_rowwise_layers(model):
        return sharded
    return {name: layer for name, (layer, style) in plan_of(model, plan).items() if is_row(style)}


def sharded_rowwise_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the row-wise layers of a model on real tensor-parallel ranks; none if the model is whole."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_cut_by_input(module)
    }


def is_cut_by_input(module: nn.Linear) -> bool:
    """Whether the weight is a `DTensor` of which each rank holds the columns of some inputs."""
    weight = module.weight
    return isinstance(weight, DTensor) and weight.placements in ((Shard(1),), (Shard(-1),))


def text_config(model: nn.Module) -> Any:
    """Return the Hugging Face config of the model's language model; None without a config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_heads(model: nn.Module, ranks: int) -> None:
    """Raise ValueError unless the heads of queries and of keys can be divided evenly among the ranks."""
    config = text_config(model)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(f"ranks is {ranks} and the model has {key} {heads}; allowed: a divisor of it")


def shards(x: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Cut a tensor as `DTensor` does: equal parts, but the last ones may be smaller or empty."""
    size = x.shape[dim]
    length = -(-size // ranks) if size else 0
    starts = [min(rank * length, size) for rank in range(ranks + 1)]
    return [x.narrow(dim, a, b - a) for a, b in itertools.pairwise(starts)]
