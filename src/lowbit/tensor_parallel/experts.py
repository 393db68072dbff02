"""Expert layers: a rank's part of their parameters, and what it computes with this part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lowbit.tensor_parallel.plan import Plan, style_of, text_config

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
        if style is None or (cut := _cut_of(f"{name}.{key}", style, parameter.dim())) is None:
            continue
        size = parameter.shape[cut.dim]
        if size % (ranks * cut.blocks):
            raise ValueError(
                f"{name}.{key} has size {size} and is cut over {ranks} ranks; allowed: a multiple of "
                f"{ranks * cut.blocks}"
            )
        cuts[key] = cut
    return cuts


def _cut_of(name: str, style: str, dims: int) -> Cut | None:
    """Return how Transformers cuts a parameter of `dims` dimensions by this style; None: not at all."""
    outputs = max(dims - 2, 0)
    cuts = {
        "colwise": Cut(outputs),
        "rowwise": Cut(dims - 1),
        "packed_colwise": Cut(outputs, 1 if dims == 1 else 2),
        "packed_rowwise": None if dims == 1 else Cut(dims - 1, 2),
        "grouped_gemm": Cut(0),
        "replicate": None,
    }
    if style not in cuts:
        raise ValueError(f"{name} has the style {style!r}; allowed for a parameter: {', '.join(cuts)}")
    return cuts[style]


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
    zeros = torch.zeros_like(bias.to_local() if isinstance(bias, DTensor) else bias)
    with parameters_of_rank(module, {BIAS: zeros}):
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
    """Make a function that computes experts with this rank's parts of their parameters, which are `DTensor`s."""
    own = module.forward

    def partial(*args: Any, **kwargs: Any) -> Tensor:
        with local_parameters(module):
            return compute(module, own, style, rank, args, kwargs)

    return partial


@contextlib.contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Let a module compute with this rank's parts of its own parameters, for this block."""
    parts = {name: p.to_local() for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
    with parameters_of_rank(module, parts):
        yield


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
