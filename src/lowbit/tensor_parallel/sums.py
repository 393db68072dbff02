"""Lists the sums of a model over tensor-parallel ranks, for all code that encodes, counts, observes or names them."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lowbit.tensor_parallel.plan import (
    COLUMN,
    EMBEDDING,
    GATHERED,
    Plan,
    bias_of_first_rank,
    check_experts,
    is_cut_by_input,
    is_quantized,
    is_sum,
    local,
    plan_of,
    routes_of_rank,
    width_of,
)

SUM = "lowbit_model_sum"
"""Attribute of a forward that adds up partial sums in this library: its `ModelSum`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSum:
    """A module whose outputs on the tensor-parallel ranks are partial sums.

    Args:
        name, module, style: of the module; the style as in a plan. width: features of a partial sum.
        group: the ranks; None in a whole model.
        partial: computes this rank's partial sum; None for a plain `Linear`, and in a whole model.
        finish: computes what follows the sum, such as a bias or a cast.
    """

    name: str
    module: nn.Module
    style: str
    width: int
    group: dist.ProcessGroup | None = None
    partial: Callable[..., Tensor] | None = None
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        tensors: Iterator[Tensor] = iter((*self.module.parameters(), *self.module.buffers()))
        return next(tensors).device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the partial sums: that of the module's weights, or bfloat16 if these are quantized."""
        dtypes = (p.dtype for p in self.module.parameters())
        return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


def model_sums(model: nn.Module, plan: Plan | None = None) -> dict[str, ModelSum]:
    """Return the sums of a model that can be coded, by module name, in the order of the modules.

    In a model on real tensor-parallel ranks they are those of its layers: row-wise layers, with plain or quantized
    weights, and expert layers. In a whole model they are those of the plan.

    Raises:
        ValueError: no plan; a module or style that is unknown, or that returns something other than partial sums.
    """
    if sums := real_sums(model):
        return sums
    return planned_sums(model, plan)


def planned_sums(model: nn.Module, plan: Plan | None = None) -> dict[str, ModelSum]:
    """Return the sums of a whole model by the plan; ValueError as `model_sums`."""
    sums: dict[str, ModelSum] = {}
    for name, (module, style) in plan_of(model, plan).items():
        if is_sum(style):
            check_experts(name, module, style)
            sums[name] = ModelSum(name=name, module=module, style=style, width=width_of(model, module))
    return sums


def real_sums(model: nn.Module) -> dict[str, ModelSum]:
    """Return the sums of a model on real tensor-parallel ranks; none if it is whole. ValueError as `model_sums`."""
    sums: dict[str, ModelSum] = {}
    for name, module in model.named_modules():
        if isinstance(found := getattr(module.__dict__.get("forward"), SUM, None), ModelSum):
            sums[name] = found
            continue
        installed = style_on(name, module)
        if isinstance(module, nn.Linear) and is_cut_by_input(module) and _is_plain(name, module, installed):
            assert isinstance(module.weight, DTensor)
            group = module.weight.device_mesh.get_group()
            sums[name] = ModelSum(name=name, module=module, style="rowwise", width=module.out_features, group=group)
        elif installed is None:
            _check_known(name, module)
        elif installed.kind in SUMS:
            partial, finish = _parts_of(installed)
            sums[name] = ModelSum(
                name=name, module=module, style=installed.kind, width=width_of(model, module), group=installed.group,
                partial=partial, finish=finish,
            )  # fmt: skip
    return sums


def _is_plain(name: str, module: nn.Linear, installed: "Style | None") -> bool:
    """Whether this library can compute the partial sum itself; quantized layers do it as Transformers lets them."""
    if type(module).__module__.startswith("bitsandbytes"):
        raise ValueError(
            f"{name} is {type(module).__name__} of bitsandbytes, which Transformers cuts over ranks but cannot run "
            "there; allowed: weights of floats, or quantized by torchao"
        )
    assert isinstance(module.weight, DTensor)
    return installed is None or not is_quantized(module.weight.to_local())


def _check_known(name: str, module: nn.Module) -> None:
    """Raise ValueError for a layer of experts that is cut without a known style: its output is unknown."""
    for key, parameter in module.named_parameters(recurse=False):
        cut = isinstance(parameter, DTensor) and any(hasattr(p, "dim") for p in parameter.placements)
        if cut and parameter.dim() > 2 and not isinstance(module, nn.modules.conv._ConvNd):
            raise ValueError(
                f"{name} ({type(module).__name__}) has the parameter {key} cut over ranks, but no style of "
                f"Transformers that defines its output; allowed: {', '.join(SUMS)}"
            )


def counted(model: nn.Module, plan: Plan | None = None) -> list[tuple[nn.Module, bool]]:
    """Return the modules whose traffic is counted and not coded; `plan` for a whole model.

    True: the ranks' outputs are gathered (an output matrix). False: they are added up (an embedding that is cut by the
    vocabulary).
    """
    if plan is not None:
        styles = dict(plan_of(model, plan).values())
        return [(module, style in COLUMN) for module, style in styles.items() if style in (EMBEDDING, *GATHERED)]
    modules: list[tuple[nn.Module, bool]] = []
    for name, module in model.named_modules():
        installed = style_on(name, module)
        if installed is not None and installed.kind in ("embedding", "gather"):
            modules.append((module, installed.kind == "gather"))
        elif installed is None and isinstance(module, nn.Embedding):
            weight: object = module.weight
            if isinstance(weight, DTensor) and weight.placements == (Shard(0),):
                modules.append((module, False))
    return modules


def group_of(sums: dict[str, ModelSum]) -> dist.ProcessGroup:
    """Return the ranks that share these sums."""
    group = next(iter(sums.values())).group
    assert group is not None
    return group


def mark(forward: Callable[..., Any], model_sum: ModelSum) -> Callable[..., Any]:
    """Record on a forward which sum it computes."""
    setattr(forward, SUM, model_sum)
    return forward


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
        style: the object. mesh: the ranks. own: the module's forward without the style.
    """

    name: str
    module: nn.Module
    kind: str
    style: Any
    mesh: Any
    own: Callable[..., Any]

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group() if self.mesh.ndim == 1 else self.mesh.get_group("tp")


def style_on(name: str, module: nn.Module) -> Style | None:
    """Return the style on a module, or None; ValueError for an unknown style."""
    forward = module.__dict__.get("forward")
    if not inspect.isfunction(forward) or not forward.__module__.startswith("transformers.distributed"):
        return None
    state = dict(inspect.getclosurevars(forward).nonlocals)
    style, mesh = state.get("self"), state.get("mesh", state.get("ep_mesh"))
    kind = type(style).__name__ if style is not None else forward.__qualname__.partition(".")[0]
    role = _KINDS.get(kind)
    if role == "whole":
        return Style(name=name, module=module, kind=role, style=style, mesh=mesh, own=forward)
    own = state.get("original_forward", state.get("implementation"))
    if style is None or role is None or mesh is None or own is None:
        raise ValueError(
            f"{name} ({type(module).__name__}) has the tensor-parallel style {kind} of Transformers, and it is unknown "
            f"whether its output is a sum; allowed: {', '.join(_KINDS)}"
        )
    layout = getattr(style, "output_layouts", None)
    if (role == "column" and isinstance(layout, Replicate)) or (role == "embedding" and style.shard_dim != 0):
        role = "gather"
    return Style(name=name, module=module, kind=role, style=style, mesh=mesh, own=own)


def _parts_of(style: Style) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor] | None]:
    """Return the two parts of a forward: what a rank computes before the style's all-reduce, and what follows it."""
    module, mesh, rank = style.module, style.mesh, dist.get_rank(style.group)

    def partial(*args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = style.style.transform_inputs_pre_forward(module, args, kwargs, mesh)
        with style.style.context_around_forward(module, mesh), bias_of_first_rank(module, rank):
            return local(style.own(*args, **kwargs))

    def finish(total: Tensor) -> Tensor:
        bias = module._parameters.get("bias")
        return total if bias is None else total + local(bias)

    if style.kind != "rowwise":
        check_experts(style.name, module, style.kind)
        return (_dispatched(style) if style.kind == "ep_dispatch_experts" else partial), None
    with torch.no_grad():
        on_local_tensors = style.style.should_use_local_tensors(module)
    if not on_local_tensors or not isinstance(style.style.output_layouts, Replicate):
        raise ValueError(
            f"{style.name} ({type(module).__name__}) is row-wise parallel, and its output is not a partial sum on each "
            "rank; allowed: layers that Transformers runs on local tensors, with a whole output on each rank"
        )
    return partial, finish


def _dispatched(style: Style) -> Callable[..., Tensor]:
    """Make the forward of a layer with whole experts on each rank: a sum if all ranks have the same tokens."""
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
        x, weights = local(hidden_states), local(top_k_weights)
        with style.style.context_around_forward(style.module, style.mesh):
            y = implementation.experts_forward(x, *routes_of_rank(top_k_index, weights, count, rank))
        return y.to(x.dtype)

    return partial
