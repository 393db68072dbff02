"""Derives which layers of a model tensor parallelism cuts, and how, from the model's own plan."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
GATHERED = ("colwise_rep", "colwise_gather_output")
ROW = ("rowwise",)
ROW_OF_WHOLE_INPUT = ("rowwise_rep", "rowwise_split_input")
"""Styles of Hugging Face plans. Column-wise: the weight is cut by outputs, which some styles gather. Row-wise: it is
cut by inputs, and a rank gets its own part of the input, or the whole input."""
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts", "all_reduce")
"""Modules with parameters of their own in the plan, whose outputs are partial sums: each rank has a part of every
expert, some of the experts, or a part of a shared one."""
EMBEDDING = "embedding_rowwise"
"""Style of an embedding cut by the vocabulary: also a sum, but all ranks except one add zeros."""
_EXACT = (
    "embedding_colwise", "replicated_with_grad_allreduce", "replicate", "local_params", "mla_kv_a_proj",
)  # fmt: skip
"""Styles that do not change results, not even in the last bit."""

_BERT = {
    **{f"*encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "*encoder.layer.*.intermediate.dense": "colwise",
    "*encoder.layer.*.output.dense": "rowwise",  # of attention and of the feed-forward layer
}
_DISTILBERT = {
    **{f"*transformer.layer.*.attention.{name}_lin": "colwise" for name in "qkv"},
    "*transformer.layer.*.attention.out_lin": "rowwise",
    "*transformer.layer.*.ffn.lin1": "colwise",
    "*transformer.layer.*.ffn.lin2": "rowwise",
}
_NOMIC = {
    **{f"*layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "*layers.*.self_attn.o_proj": "rowwise",
    **{f"*layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "*layers.*.mlp.down_proj": "rowwise",
}
ENCODERS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
    "distilbert": _DISTILBERT,
    "nomic_bert": _NOMIC,
}
"""Plans for encoders, which Hugging Face has without one, by `model_type`. The embeddings, the pooler and the head of
the masked language model stay whole."""

Plan = Mapping[str, str]
"""Style by name of a module or parameter, in which `*` stands for the number of a layer."""


def rules_of(model: nn.Module, plan: Plan | None = None) -> dict[str, str]:
    """Return the plan, or else the model's own; raise ValueError if it has none."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    rules = dict(plan if plan is not None else getattr(model, "_tp_plan", None) or ENCODERS.get(kind, {}))
    if not rules:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan; allowed: a model with one (Llama, Qwen, Mistral, "
            "Gemma, ... of Hugging Face), or plan={'layers.*.mlp.down_proj': 'rowwise', ...}"
        )
    return rules


def plan_of(model: nn.Module, plan: Plan | None = None) -> dict[str, tuple[nn.Module, str]]:
    """Return module and style by module name, in the order of the model's modules, without styles that change nothing.

    Raises:
        ValueError: no plan, an unknown style, a module that does not fit its style, or no sum.
    """
    rules = rules_of(model, plan)
    planned: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        style = style_of(name, rules)
        if style is None:
            _check_parameters(name, module, rules)
        if style is None or style in _EXACT:
            continue
        if style in COLUMN or is_row(style):
            check_linear(name, module)
        elif style not in (*EXPERTS, EMBEDDING):
            known = ", ".join((*COLUMN, *ROW, *ROW_OF_WHOLE_INPUT, *EXPERTS, EMBEDDING, *_EXACT))
            raise ValueError(f"{name} has the style {style!r}; allowed: {known}")
        elif style in EXPERTS and isinstance(module, nn.Linear):
            raise ValueError(f"{name} has the style {style!r} and is a Linear; allowed: {', '.join((*COLUMN, *ROW))}")
        planned[name] = (module, style)
    if not any(is_sum(style) for _, style in planned.values()):
        raise ValueError(
            f"no module of {type(model).__name__} is row-wise parallel by the plan {rules}; allowed: at least one"
        )
    return planned


def _check_parameters(name: str, module: nn.Module, rules: Plan) -> None:
    """Raise ValueError if a module without a style has parameters that the plan cuts: its output is unknown."""
    for key, _ in module.named_parameters(prefix=name, recurse=False):
        style = style_of(key, rules)
        if style not in (None, *_EXACT):
            raise ValueError(
                f"{key} has the style {style!r}, but {name} ({type(module).__name__}) has none that defines its "
                f"output; allowed: {', '.join((*EXPERTS, 'local_params'))}"
            )


def style_of(name: str, rules: Plan) -> str | None:
    """Return the style of a module or parameter from the rule with its name, else from the first that matches."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    if generic in rules:
        return rules[generic]
    return next((style for rule, style in rules.items() if fnmatch.fnmatchcase(name, rule)), None)


def check_linear(name: str, module: nn.Module) -> None:
    """Raise ValueError unless a module is a `Linear` whose weight can be cut here."""
    if type(module) is not nn.Linear:
        raise ValueError(
            f"{name} is {type(module).__name__}; allowed for tensor parallelism here: torch.nn.Linear{_ON_RANKS}"
        )
    if is_quantized(module.weight):
        kind = type(module.weight.data).__name__
        raise ValueError(f"{name} has quantized weights ({kind}); allowed in a whole model: floats{_ON_RANKS}")


_ON_RANKS = " (quantized layers: calibrate and run them on real ranks, as Transformers shards them)"


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is not a plain tensor of floats."""
    return type(weight.data) is not Tensor or not weight.is_floating_point() or weight.element_size() < 2


def is_row(style: str) -> bool:
    """Whether a `Linear` of this style computes partial sums."""
    return style in (*ROW, *ROW_OF_WHOLE_INPUT)


def is_sum(style: str) -> bool:
    """Whether the outputs of a module of this style are partial sums that can be coded."""
    return is_row(style) or style in EXPERTS


def is_cut_by_input(module: nn.Module) -> bool:
    """Whether the weight of a `Linear` is a `DTensor` of which each rank holds the columns of some inputs."""
    weight = getattr(module, "weight", None) if isinstance(module, nn.Linear) else None
    return isinstance(weight, DTensor) and weight.placements in ((Shard(1),), (Shard(-1),))


def text_config(model: nn.Module) -> Any:
    """Return the Hugging Face config of the model's language model; None without a config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_heads(model: nn.Module, ranks: int, planned: Mapping[str, tuple[nn.Module, str]]) -> None:
    """Raise ValueError unless the heads that the plan cuts can be divided evenly among the ranks."""
    if not any(style == "colwise" and "att" in name for name, (_, style) in planned.items()):
        return
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
