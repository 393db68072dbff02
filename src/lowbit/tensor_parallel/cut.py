"""`tensor_parallel_`: cuts a whole model over real ranks by its own plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from lowbit.collectives.calls import TIMEOUT
from lowbit.tensor_parallel import op
from lowbit.tensor_parallel.experts import Cut, cuts_of, local_parameters, partial_on_rank
from lowbit.tensor_parallel.plan import (
    EXPERTS,
    GATHERED,
    Plan,
    check_heads,
    is_row,
    plan_of,
    rules_of,
    style_of,
)
from lowbit.tensor_parallel.reduce import SumSettings, check_inference
from lowbit.tensor_parallel.rowwise import LayerSum, local, sum_forward
from lowbit.tensor_parallel.sums import planned_sums, real_sums
from lowbit.wire.pytorch import default_group


def tensor_parallel_(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, plan: Plan | None = None
) -> nn.Module:
    """Cut a whole model over the ranks of a group, in place, for inference.

    Use it for models in memory, or if `from_pretrained(folder, tp_plan="auto")`, which needs the package accelerate, is
    not possible. Each rank keeps its part of every weight in the plan as a `DTensor`; embeddings stay whole. Partial
    sums are added up by PyTorch's own all-reduce in the model's dtype, until `low_bit_` installs a format: for n
    elements of 2 bytes each of W ranks sends 4 (W - 1) / W n bytes. With two ranks results are those of
    `emulate_tensor_parallel_`, on CPU bit for bit; with more the order of the additions differs.

    Args:
        model: whole, with the same weights on all ranks; they are not sent.
        group: the ranks; None: the default group. plan: overrides the model's own.

    Returns:
        The model.

    Raises:
        ValueError: no plan, heads that cannot be divided evenly, a model that is cut already.
    """
    group = group or default_group()
    ranks = dist.get_world_size(group)
    if real_sums(model):
        raise ValueError("model is on tensor-parallel ranks already; allowed: a whole model")
    rules = rules_of(model, plan)
    planned, sums = plan_of(model, rules), planned_sums(model, rules)
    check_heads(model, ranks, planned)
    cuts = {
        name: cuts_of(name, module, rules, ranks)
        for name, module in model.named_modules()
        if style_of(name, rules) == "local_params" or (name in planned and planned[name][1] in EXPERTS)
    }
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for name, own in cuts.items():
        module = model.get_submodule(name)
        for key, cut in own.items():
            _cut(module, key, mesh, cut)
        if name not in planned:
            module.__dict__["forward"] = _local_forward(module)
    for name, (module, style) in planned.items():
        if isinstance(module, nn.Linear) and not is_row(style):
            _cut(module, "weight", mesh, Cut(0))
            if module.bias is not None:
                _cut(module, "bias", mesh, Cut(0))
            module.__dict__["forward"] = _column_forward(name, module, group, style in GATHERED)
        elif name in sums:
            if isinstance(module, nn.Linear):
                _cut(module, "weight", mesh, Cut(1))
            partial = None if isinstance(module, nn.Linear) else partial_on_rank(module, style, dist.get_rank(group))
            summed = replace(sums[name], group=group, partial=partial)
            layer_sum = LayerSum(
                name=name, width=summed.width, device=summed.device, codec=None, settings=SumSettings(), ranks=ranks,
                group=group,
            )  # fmt: skip
            module.__dict__["forward"] = sum_forward(summed, layer_sum)
    return model


def _cut(layer: nn.Module, name: str, mesh: DeviceMesh, cut: Cut) -> None:
    whole = getattr(layer, name)
    part = distribute_tensor(whole.detach(), mesh, [cut.placement()], src_data_rank=None)
    part = part.clone()  # a view would keep the whole weight in memory
    layer.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _local_forward(module: nn.Module) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module):
            return own(*args, **kwargs)

    return forward


def _column_forward(
    name: str, layer: nn.Linear, group: dist.ProcessGroup, gathered: bool
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        check_inference(name, x, layer.weight)
        bias = None if layer.bias is None else local(layer.bias)
        y = F.linear(x, local(layer.weight), bias)
        return _gather(y, layer.out_features, group) if gathered else y

    return forward


def _gather(y: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' outputs side by side; the last ranks may have fewer than the others."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return y
    length = -(-width // ranks)
    padded = F.pad(y, (0, length - y.shape[-1])).contiguous()
    parts = op.tp_all_gather(padded, group.group_name, TIMEOUT)
    return torch.cat(parts.unbind(), -1)[..., :width]
