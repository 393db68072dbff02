"""Gradients of sharded parameters (DTensor): FSDP2 and tensor-parallel layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, without a copy; other tensors as they are."""
    return getattr(x, "_local_tensor", x)


def as_shard(x: Tensor, parameter: Tensor) -> Tensor:
    """Wrap a tensor of the local shard's shape as a DTensor like the parameter; unchanged for plain parameters."""
    if not hasattr(parameter, "_local_tensor"):
        return x
    from torch.distributed.tensor import DTensor

    # Not `from_local`, which makes a view: `x` must keep its tensor subclass.
    spec: Any = parameter._spec  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor(x, spec, requires_grad=False)  # pyright: ignore


def placed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Redistribute the gradient to the parameter's placements; partial sums over ranks are added up."""
    if not hasattr(parameter, "_local_tensor"):
        return gradient
    placements: Any = parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    if not hasattr(gradient, "_local_tensor"):
        from torch.distributed.tensor import DTensor, Replicate

        gradient = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if gradient.placements == placements:  # pyright: ignore[reportAttributeAccessIssue]
        return gradient
    with torch.no_grad():
        return gradient.redistribute(mesh, placements)  # pyright: ignore[reportAttributeAccessIssue]


def sums_of(parameter: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return a sharded parameter's mesh and the dimensions over which it is sharded; None and () for others."""
    if not hasattr(parameter, "_local_tensor"):
        return None, ()
    placements: Any = parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return mesh, tuple(d for d, placement in enumerate(placements) if not placement.is_replicate())


def total(parts: list[Tensor], mesh: Any, dimensions: tuple[int, ...]) -> float:
    """Sum these numbers, then over the ranks along these dimensions of the mesh."""
    number = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
    if dimensions:
        number = number.to(mesh.device_type)
        for dimension in dimensions:
            dist.all_reduce(number, group=mesh.get_group(dimension))
    return float(number)
