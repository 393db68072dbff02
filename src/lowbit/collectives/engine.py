"""The engine's collectives on flat tensors, under the names that this version of PyTorch does not warn about."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# New in 2.13; what 2.11 has instead does the same.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single"
_SCATTER = _SCATTER if hasattr(dist, _SCATTER) else "reduce_scatter_tensor"


def gather(out: Tensor, x: Tensor, group: Any, *, async_op: bool = False) -> dist.Work | None:
    """Everybody's `x`, one after the other, in `out`."""
    return getattr(dist, _GATHER)(out, x, group=group, async_op=async_op)


def sum_scatter(out: Tensor, x: Tensor, group: Any) -> None:
    """This rank's share of the sum of everybody's `x` in `out`."""
    getattr(dist, _SCATTER)(out, x, group=group)
