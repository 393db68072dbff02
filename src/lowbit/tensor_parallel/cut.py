"""`tensor_parallel_`: cut a whole model over real ranks by its own plan."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lowbit.ranks import pytorch
from lowbit.ranks.groups import default_group
from lowbit.tensor_parallel.encoders import check_real_ranks
from lowbit.tensor_parallel.plan import Plan, check_heads, is_row, plan_of, sharded_rowwise_layers
from lowbit.tensor_parallel.reduce import SumSettings, check_inference
from lowbit.tensor_parallel.rowwise import LayerSum, local, row_forward

_GATHERED = ("colwise_rep", "colwise_gather_output")


def tensor_parallel_(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, plan: Plan | None = None
) -> nn.Module:
    """Cut a whole model over the ranks of a group, in place, for inference.

    For models in memory, and where `from_pretrained(folder, tp_plan="auto")` is not possible: it needs the package
    accelerate. Each rank keeps its part of every weight in the plan as a `DTensor`; embeddings stay whole. Partial sums
    are gathered in the model's dtype and added up in float32 in the order of the ranks, until `low_bit_` installs a
    format; results are those of `emulate_tensor_parallel_`, on CPU bit for bit.

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
    if sharded_rowwise_layers(model):
        raise ValueError("model is on tensor-parallel ranks already; allowed: a whole model")
    check_heads(model, ranks)
    check_real_ranks(model)
    planned = plan_of(model, plan)
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for name, (layer, style) in planned.items():
        if is_row(style):
            _cut(layer, "weight", mesh, 1)
            layer_sum = LayerSum(name=name, layer=layer, codec=None, settings=SumSettings(), ranks=ranks, group=group)
            layer.__dict__["forward"] = row_forward(layer_sum, group)
        else:
            _cut(layer, "weight", mesh, 0)
            if layer.bias is not None:
                _cut(layer, "bias", mesh, 0)
            layer.__dict__["forward"] = _column_forward(name, layer, group, style in _GATHERED)
    return model


def _cut(layer: nn.Linear, name: str, mesh: DeviceMesh, dim: int) -> None:
    whole = getattr(layer, name)
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    part = part.clone()  # a view would keep the whole weight in memory
    layer.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _column_forward(
    name: str, layer: nn.Linear, group: dist.ProcessGroup, gathered: bool
) -> Callable[[Tensor], Tensor]:
    """Make a forward for a column-wise layer, which returns this rank's outputs, or those of all ranks."""

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
    parts = y.new_empty((ranks, *padded.shape))
    work = pytorch.gather(parts.view(-1), padded.view(-1), group, async_op=True)
    pytorch.finish(work, group, SumSettings().timeout)
    return torch.cat(list(parts), -1)[..., :width]
