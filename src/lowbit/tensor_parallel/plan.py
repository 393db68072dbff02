"""Which modules of a model tensor parallelism cuts, and how, from the model's own plan."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
ROW = ("rowwise",)
ROW_OF_WHOLE_INPUT = ("rowwise_rep", "rowwise_split_input")
"""Styles of Hugging Face plans: weights cut by outputs; by inputs, fed by such outputs; by inputs, fed the whole."""
OURS = "low_bit"
"""The style of a whole model whose sums travel in few bits begins with this."""
_EXACT = ("embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate")
"""Styles that do not change what is computed, not even in the last bit."""

Plan = Mapping[str, str]
"""Style by the name of a module, in which `*` stands for a layer's number."""


def plan_of(model: nn.Module, plan: Plan | None = None) -> dict[str, str]:
    """Style by module name, in the order of the model's modules; without what leaves results as they are.

    Args:
        model: a Hugging Face model, which brings its own plan, or any module with one.
        plan: overrides the model's.

    Raises:
        ValueError: no plan, a style that is not known here, a module of another kind than `Linear`, or no row-wise
            module.
    """
    rules = dict(plan if plan is not None else getattr(model, "_tp_plan", None) or {})
    if not rules:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan; allowed: a model with one (Llama, Qwen, Mistral, "
            "Gemma, ... of Hugging Face), or plan={'layers.*.mlp.down_proj': 'rowwise', ...}"
        )
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        style = next((s for rule, s in rules.items() if fnmatch.fnmatchcase(name, rule)), None)
        if style is None or style in _EXACT or style.startswith(OURS):
            continue
        if style not in COLUMN and not is_row(style):
            known = ", ".join((*COLUMN, *ROW, *ROW_OF_WHOLE_INPUT, *_EXACT))
            raise ValueError(f"{name} has the style {style!r}; allowed: {known}")
        check_linear(name, module)
        found[name] = style
    if not any(map(is_row, found.values())):
        raise ValueError(
            f"no module of {type(model).__name__} is row-wise parallel by the plan {rules}; allowed: at least one"
        )
    return found


def is_row(style: str) -> bool:
    """Whether a module of this style leaves partial sums."""
    return style in (*ROW, *ROW_OF_WHOLE_INPUT)


def rowwise_layers(model: nn.Module, plan: Plan | None = None) -> dict[str, nn.Linear]:
    """The row-wise modules, in whose outputs the ranks' partial sums are added up, by name.

    Of a model that is tensor parallel already, what its weights say; else what its plan says.

    Raises:
        ValueError: as `plan_of`.
    """
    real = sharded_rowwise_layers(model)
    if real:
        return real
    modules = dict(model.named_modules())
    names = [name for name, style in plan_of(model, plan).items() if is_row(style)]
    return {name: check_linear(name, modules[name]) for name in names}


def sharded_rowwise_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The row-wise modules of a model on real tensor-parallel ranks; none if it is whole."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_cut_by_input(module)
    }


def is_cut_by_input(module: nn.Linear) -> bool:
    """Whether the weight is a `DTensor` of which each rank holds some inputs' columns."""
    weight = module.weight
    return isinstance(weight, DTensor) and weight.placements in ((Shard(1),), (Shard(-1),))


def check_linear(name: str, module: nn.Module) -> nn.Linear:
    """The module, if it is a plain `Linear`.

    Raises:
        ValueError: it is something else.
    """
    if type(module) is not nn.Linear:
        raise ValueError(f"{name} is {type(module).__name__}; allowed for tensor parallelism here: torch.nn.Linear")
    return module


def check_heads(model: nn.Module, ranks: int) -> None:
    """Raise unless every rank gets whole heads, of queries as of keys.

    Raises:
        ValueError: the model's heads cannot be shared out evenly.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(f"ranks is {ranks} and the model has {key} {heads}; allowed: a divisor of it")


def shards(x: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """The parts of a tensor that each rank holds, as `DTensor` cuts it: even but for the last ones, maybe empty."""
    size = x.shape[dim]
    length = -(-size // ranks) if size else 0
    starts = [min(rank * length, size) for rank in range(ranks + 1)]
    return [x.narrow(dim, a, b - a) for a, b in itertools.pairwise(starts)]
