"""Finds the styles that Hugging Face Transformers installed on the modules of a model that it cut over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lowbit.tensor_parallel.experts import bias_of_first_rank, check_experts, routes_of_rank

SUMS = ("rowwise", "moe_tp_experts", "ep_dispatch_experts", "all_reduce")
_KINDS = {
    "RowwiseParallel": "rowwise",
    "MoeExpertsParallel": "moe_tp_experts",
    "EpDispatchExpertsParallel": "ep_dispatch_experts",
    "AllReduceParallel": "all_reduce",
    "EmbeddingParallel": "embedding",
    "ColwiseParallel": "column",
    "PackedColwiseParallel": "column",
    "PackedRowwiseParallel": "column",
    "ReplicatedWithGradAllReduce": "whole",
    "MlaKvAProjParallel": "whole",
    "MoeIdentityParallel": "whole",
    "LocalParamsParallel": "whole",
    "TensorParallelLayer": "whole",
}
"""Kinds by the class of the style. "whole": works on a rank's own tensors and sends nothing."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """A style that Transformers installed on a module.

    Args:
        name, module: of the module. kind: one of `SUMS`, or "embedding", "column", "gather", "whole".
        style: the object. mesh: the ranks. own: the module's forward without the style. state: the rest of its closure.
    """

    name: str
    module: nn.Module
    kind: str
    style: Any
    mesh: Any
    own: Callable[..., Any]
    state: dict[str, Any]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.mesh.get_group() if self.mesh.ndim == 1 else self.mesh.get_group("tp")


class Parts(NamedTuple):
    """The two parts of a forward: what a rank computes before the sum, and what follows the sum."""

    partial: Callable[..., Tensor]
    finish: Callable[[Tensor], Tensor] | None


def installed(name: str, module: nn.Module) -> Style | None:
    """Return the style on a module; None if there is none.

    Raises:
        ValueError: an unknown style.
    """
    forward = module.__dict__.get("forward")
    if not inspect.isfunction(forward) or not forward.__module__.startswith("transformers.distributed"):
        return None
    state = dict(inspect.getclosurevars(forward).nonlocals)
    style, mesh = state.get("self"), state.get("mesh", state.get("ep_mesh"))
    kind = type(style).__name__ if style is not None else forward.__qualname__.partition(".")[0]
    role = _KINDS.get(kind)
    if role == "whole":
        return Style(name=name, module=module, kind=role, style=style, mesh=mesh, own=forward, state=state)
    own = state.get("original_forward", state.get("implementation"))
    if style is None or role is None or mesh is None or own is None:
        raise ValueError(
            f"{name} ({type(module).__name__}) has the tensor-parallel style {kind} of Transformers, and it is unknown "
            f"whether its output is a sum; allowed: {', '.join(_KINDS)}"
        )
    layout = getattr(style, "output_layouts", None)
    if (role == "column" and isinstance(layout, Replicate)) or (role == "embedding" and style.shard_dim != 0):
        role = "gather"
    return Style(name=name, module=module, kind=role, style=style, mesh=mesh, own=own, state=state)


def partial_sum(style: Style) -> Parts | None:
    """Return a module's forward on a rank without the style's all-reduce; None if it sends no sum to be coded.

    Raises:
        ValueError: it sends something other than sums to all ranks.
    """
    if style.kind == "rowwise":
        return _linear(style)
    if style.kind in ("moe_tp_experts", "all_reduce"):
        check_experts(style.name, style.module, style.kind)
        return Parts(_without_all_reduce(style), None)
    if style.kind == "ep_dispatch_experts":
        check_experts(style.name, style.module, style.kind)
        return _dispatched(style)
    return None


def _without_all_reduce(style: Style) -> Callable[..., Tensor]:
    module, mesh, rank = style.module, style.mesh, dist.get_rank(style.group)

    def partial(*args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = style.style.transform_inputs_pre_forward(module, args, kwargs, mesh)
        with style.style.context_around_forward(module, mesh), bias_of_first_rank(module, rank):
            y = style.own(*args, **kwargs)
        return y.to_local() if isinstance(y, DTensor) else y

    return partial


def _linear(style: Style) -> Parts:
    """Return the parts of a row-wise layer without a `DTensor` of floats, which Transformers runs on local tensors."""
    module = style.module
    with torch.no_grad():
        local = style.style.should_use_local_tensors(module)
    if not local or not isinstance(style.style.output_layouts, Replicate):
        raise ValueError(
            f"{style.name} ({type(module).__name__}) is row-wise parallel, and its output is not a partial sum on each "
            "rank; allowed: layers that Transformers runs on local tensors, with a whole output on each rank"
        )

    def finish(total: Tensor) -> Tensor:
        bias = module._parameters.get("bias")
        if bias is None:
            return total
        return total + (bias.to_local() if isinstance(bias, DTensor) else bias)

    return Parts(_without_all_reduce(style), finish)


def _dispatched(style: Style) -> Parts:
    """Return the parts of a layer with whole experts on each rank: a sum if all ranks compute with the same tokens."""
    implementation = style.own
    if getattr(implementation, "megamoe", None) is None:
        implementation = getattr(implementation, "all_reduce", None) or implementation
    if type(implementation).__name__ != "AllReduceEP":
        raise ValueError(
            f"{style.name} ({type(style.module).__name__}) sends tokens to the ranks of their experts "
            f"({type(style.own).__name__}) and returns no partial sums; allowed: "
            "DistributedConfig(ep_implementation='all_reduce'), or 'auto' with ep_size equal to tp_size"
        )
    count, rank = implementation.num_local_experts, implementation.ep_mesh.get_local_rank()

    def partial(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, weights = (t.to_local() if isinstance(t, DTensor) else t for t in (hidden_states, top_k_weights))
        with style.style.context_around_forward(style.module, style.mesh):
            y = implementation.experts_forward(x, *routes_of_rank(top_k_index, weights, count, rank))
        return y.to(x.dtype)

    return Parts(partial, None)
