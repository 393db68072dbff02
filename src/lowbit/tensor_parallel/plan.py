"""Derives from a model's own plan which layers and parameters tensor parallelism cuts, and how."""

import contextlib
import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

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
_EXACT = ("embedding_colwise", "replicated_with_grad_allreduce", "replicate", "local_params", "mla_kv_a_proj")
"""Styles that do not change results, not even in the last bit."""

_ON_RANKS = " (quantized layers: calibrate and run them on real ranks, as Transformers shards them)"

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
        for key, _ in module.named_parameters(prefix=name, recurse=False) if style is None else ():
            if (cut := style_of(key, rules)) not in (None, *_EXACT):
                raise ValueError(
                    f"{key} has the style {cut!r}, but {name} ({type(module).__name__}) has none that defines its "
                    f"output; allowed: {', '.join((*EXPERTS, 'local_params'))}"
                )
        if style is None or style in _EXACT:
            continue
        if style in COLUMN or is_row(style):
            if type(module) is not nn.Linear:
                kind = type(module).__name__
                raise ValueError(f"{name} is {kind}; allowed for tensor parallelism here: torch.nn.Linear{_ON_RANKS}")
            if is_quantized(module.weight):
                kind = type(module.weight.data).__name__
                raise ValueError(f"{name} has quantized weights ({kind}); allowed in a whole model: floats{_ON_RANKS}")
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


def style_of(name: str, rules: Plan) -> str | None:
    """Return the style of a module or parameter from the rule with its name, else from the first that matches."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    if generic in rules:
        return rules[generic]
    return next((style for rule, style in rules.items() if fnmatch.fnmatchcase(name, rule)), None)


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


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a `DTensor`, any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def shards(x: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Cut a tensor as `DTensor` does: equal parts, but the last ones may be smaller or empty."""
    size = x.shape[dim]
    length = -(-size // ranks) if size else 0
    starts = [min(rank * length, size) for rank in range(ranks + 1)]
    return [x.narrow(dim, a, b - a) for a, b in itertools.pairwise(starts)]


BIAS = "down_proj_bias"
"""Biases of the experts' last product. Only the first rank may add them, or the sum would contain them repeatedly."""


class Cut(NamedTuple):
    """How a parameter is divided among the ranks: each of `blocks` blocks of a dimension into equal parts."""

    dim: int
    blocks: int = 1

    def placement(self) -> Placement:
        return Shard(self.dim) if self.blocks == 1 else _StridedShard(self.dim, split_factor=self.blocks)

    def parts(self, x: Tensor, ranks: int) -> list[Tensor]:
        """Return the ranks' parts of a tensor, in memory of their own."""
        blocks = [block.chunk(ranks, self.dim) for block in x.chunk(self.blocks, self.dim)]
        return [torch.cat([block[rank] for block in blocks], self.dim).clone() for rank in range(ranks)]


def cuts_of(name: str, module: nn.Module, rules: Plan, ranks: int) -> dict[str, Cut]:
    """Return how the module's own parameters are cut, by parameter name; those that all ranks hold whole are absent."""
    cuts: dict[str, Cut] = {}
    for key, parameter in module.named_parameters(recurse=False):
        style = style_of(f"{name}.{key}", rules)
        if style is None:
            continue
        dims = parameter.dim()
        outputs = max(dims - 2, 0)
        known = {  # as Transformers cuts; None: not at all
            "colwise": Cut(outputs),
            "rowwise": Cut(dims - 1),
            "packed_colwise": Cut(outputs, 1 if dims == 1 else 2),
            "packed_rowwise": None if dims == 1 else Cut(dims - 1, 2),
            "grouped_gemm": Cut(0),
            "replicate": None,
        }
        if style not in known:
            raise ValueError(f"{name}.{key} has the style {style!r}; allowed for a parameter: {', '.join(known)}")
        if (cut := known[style]) is None:
            continue
        size = parameter.shape[cut.dim]
        if size % (ranks * cut.blocks):
            raise ValueError(
                f"{name}.{key} has size {size} and is cut over {ranks} ranks; allowed: a multiple of "
                f"{ranks * cut.blocks}"
            )
        cuts[key] = cut
    return cuts


def check_experts(name: str, module: nn.Module, style: str) -> None:
    """Raise ValueError if the ranks' outputs are not partial sums."""
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{name} ({type(module).__name__}, style {style!r}) normalizes each expert's output, so that the outputs "
            "of the ranks are not partial sums; allowed: experts without a norm of their outputs"
        )


def width_of(model: nn.Module, module: nn.Module) -> int:
    """Return the number of features of a module's output."""
    for owner, key in ((module, "out_features"), (module, "hidden_dim"), (module, "hidden_size")):
        if isinstance(width := getattr(owner, key, None), int):
            return width
    return int(text_config(model).hidden_size)


@contextlib.contextmanager
def parameters_of_rank(module: nn.Module, parts: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute with these instead of its own parameters, for this block."""
    own = {name: module._parameters[name] for name in parts}
    module._parameters.update(parts)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


@contextlib.contextmanager
def bias_of_first_rank(module: nn.Module, rank: int) -> Iterator[None]:
    """Let the experts' last bias be zero on all ranks except the first, for this block, if the ranks hold it whole."""
    bias = module._parameters.get(BIAS)
    whole = bias is not None and not (isinstance(bias, DTensor) and any(hasattr(p, "dim") for p in bias.placements))
    if bias is None or not whole or rank == 0:
        yield
        return
    with parameters_of_rank(module, {BIAS: torch.zeros_like(local(bias))}):
        yield


@contextlib.contextmanager
def experts_of_rank(module: nn.Module, count: int) -> Iterator[None]:
    """Let an expert layer compute with this many experts, for this block, as Transformers sets it on a rank."""
    before = {key: getattr(module, key) for key in ("num_experts", "_is_expert_parallel") if hasattr(module, key)}
    module.num_experts, module._is_expert_parallel = count, True  # type: ignore[assignment]
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(module, key, value)


def routes_of_rank(top_k_index: Tensor, top_k_weights: Tensor, count: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return indices and weights of one rank's experts; those of other ranks get the index `count` and weight 0."""
    elsewhere = torch.div(top_k_index, count, rounding_mode="floor") != rank
    return torch.where(elsewhere, count, top_k_index % count), top_k_weights.masked_fill(elsewhere, 0.0)


def partial_on_rank(module: nn.Module, style: str, rank: int) -> Callable[..., Tensor]:
    """Make a forward that computes with this rank's parts of a module's parameters, which are `DTensor`s.

    Other modules than experts compute by their own forward: rank 0 leaves biases as they are.
    """
    own = module.forward

    def partial(*args: Any, **kwargs: Any) -> Tensor:
        with parameters_of_rank(module, {name: local(p) for name, p in module.named_parameters(recurse=False)}):
            return compute(module, own, style, rank, args, kwargs)

    return partial


def compute(
    module: nn.Module, own: Any, style: str, rank: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Return the partial sum of experts, by their own forward, when their parameters are those of a rank."""
    if style != "ep_dispatch_experts":
        with bias_of_first_rank(module, rank):
            return own(*args, **kwargs)
    x, index, weights = args
    count = len(next(module.parameters(recurse=False)))
    with experts_of_rank(module, count):
        return own(x, *routes_of_rank(index, weights, count, rank))
