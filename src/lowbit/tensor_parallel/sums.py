"""Lists the sums of a model over tensor-parallel ranks, for all code that encodes, counts, observes or names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lowbit.tensor_parallel import engine
from lowbit.tensor_parallel.experts import check_experts, width_of
from lowbit.tensor_parallel.plan import (
    COLUMN,
    EMBEDDING,
    GATHERED,
    Plan,
    is_cut_by_input,
    is_quantized,
    is_sum,
    plan_of,
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
        """Device of the partial sums."""
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
    """Return the sums of a whole model by the plan.

    Raises:
        ValueError: as `model_sums`.
    """
    sums: dict[str, ModelSum] = {}
    for name, (module, style) in plan_of(model, plan).items():
        if is_sum(style):
            check_experts(name, module, style)
            sums[name] = ModelSum(name=name, module=module, style=style, width=width_of(model, module))
    return sums


def real_sums(model: nn.Module) -> dict[str, ModelSum]:
    """Return the sums of a model on real tensor-parallel ranks that can be coded; none if the model is whole.

    Raises:
        ValueError: a module that is cut over ranks in a way from which its output cannot be determined.
    """
    sums: dict[str, ModelSum] = {}
    for name, module in model.named_modules():
        if isinstance(found := getattr(module.__dict__.get("forward"), SUM, None), ModelSum):
            sums[name] = found
            continue
        installed = engine.installed(name, module)
        if isinstance(module, nn.Linear) and is_cut_by_input(module) and _is_plain(name, module, installed):
            assert isinstance(module.weight, DTensor)
            group = module.weight.device_mesh.get_group()
            sums[name] = ModelSum(name=name, module=module, style="rowwise", width=module.out_features, group=group)
        elif installed is None:
            _check_known(name, module)
        elif (parts := engine.partial_sum(installed)) is not None:
            sums[name] = ModelSum(
                name=name, module=module, style=installed.kind, width=width_of(model, module), group=installed.group,
                partial=parts.partial, finish=parts.finish,
            )  # fmt: skip
    return sums


def _is_plain(name: str, module: nn.Linear, installed: engine.Style | None) -> bool:
    """Whether this library can compute the partial sum itself; quantized layers do it as Transformers lets them.

    Raises:
        ValueError: a layer of bitsandbytes, which cannot compute with a part of its weight.
    """
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
                f"Transformers that defines its output; allowed: {', '.join(engine.SUMS)}"
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
        installed = engine.installed(name, module)
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
