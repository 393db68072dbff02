"""`tensor_parallel_`: a whole model, cut over real ranks by its own plan."""

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
from lowbit.tensor_parallel.plan import Plan, check_heads, is_row, parallel_boundaries, plan_of
from lowbit.tensor_parallel.reduce import Settings, check_inference
from lowbit.tensor_parallel.rowwise import local, row_forward

_GATHERED = ("colwise_rep", "colwise_gather_output")


def tensor_parallel_(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, plan: Plan | None = None
) -> nn.Module:
    """Cut a whole model over the ranks of a group, in place, for inference.

    For models that are in memory already, and where `from_pretrained(folder, tp_plan="auto")` cannot be had: it needs
    the package accelerate. Each rank keeps its part of every weight that the plan names, as a `DTensor`;
    embeddings stay whole. Partial sums are gathered in the model's dtype and added up in float32 in the order of the
    ranks, until `low_bit_` has them coded; results are those of `emulate_tensor_parallel_`, on CPU bit for bit.

    Args:
        model: whole, with the same weights on all ranks; they are not sent.
        group: the ranks; None: the default group. plan: overrides the model's own.

    Returns:
        The model.

    Raises:
        ValueError: no plan, heads that cannot be shared out evenly, a model that is cut already.
    """
    group = group or default_group()
    ranks = dist.get_world_size(group)
    if parallel_boundaries(model):
        raise ValueError("model is on tensor-parallel ranks already; allowed: a whole one")
    check_heads(model, ranks)
    styles = plan_of(model, plan)
    device = next(model.parameters()).device
    mesh = DeviceMesh.from_group(group, device.type)
    for name, style in styles.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        if is_row(style):
            _cut(module, "weight", mesh, 1)
            module.__dict__["forward"] = row_forward(name, module, None, group, Settings())
        else:
            _cut(module, "weight", mesh, 0)
            if module.bias is not None:
                _cut(module, "bias", mesh, 0)
            module.__dict__["forward"] = _column_forward(name, module, group, style in _GATHERED)
    return model


def _cut(module: nn.Linear, name: str, mesh: DeviceMesh, dim: int) -> None:
    whole = getattr(module, name)
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    part = part.clone()  # this rank's part alone stays in memory
    module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _column_forward(
    name: str, module: nn.Linear, group: dist.ProcessGroup, gathered: bool
) -> Callable[[Tensor], Tensor]:
    """A forward for a column-wise module: this rank's outputs, or those of all ranks."""

    def forward(x: Tensor) -> Tensor:
        check_inference(name, x, module.weight)
        bias = None if module.bias is None else local(module.bias)
        y = F.linear(x, local(module.weight), bias)
        return _gather(y, module.out_features, group) if gathered else y

    return forward


def _gather(y: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    """Everybody's outputs side by side; the last ranks may have fewer than the others."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return y
    length = -(-width // ranks)
    padded = F.pad(y, (0, length - y.shape[-1]))
    parts = y.new_empty((ranks, *padded.shape))
    work = pytorch.gather(parts.view(-1), padded.contiguous().view(-1), group, async_op=True)
    pytorch.finish(work, group, Settings().timeout)
    return torch.cat(list(parts), -1)[..., :width]
