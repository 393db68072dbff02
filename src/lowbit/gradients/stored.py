"""One parameter's gradient as a payload; shards of DTensors (FSDP2, tensor parallel); portions of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.codecs.base import Summable
from lowbit.codecs.checks import FLOATS


@dataclass(slots=True)
class Stored:
    """A parameter's gradient: the decoded `payload` times `factor`, if `held`; otherwise there is none.

    For a sharded parameter (DTensor), it is the gradient of the local shard.
    """

    name: str
    payload: Tensor | None = None
    factor: float = 1.0
    held: bool = False
    view: Tensor | None = None
    """The `StoredGradient` that shows it."""

    def value(self, codec: Summable, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if not self.held or self.payload is None:
            return None
        if self.factor == 1:
            return codec.decode(self.payload, shape=shape, dtype=dtype)
        # A sum may overflow float16 while its mean does not.
        return codec.decode(self.payload, shape=shape).mul_(self.factor).to(dtype)

    def drop(self) -> None:
        """Drop the gradient; the payload's memory is kept for the next one."""
        self.held, self.factor, self.view = False, 1.0, None

    def write(self, codec: Summable, part: Tensor) -> None:
        """Write the gradient to a float32 tensor of zeros with the parameter's shape."""
        if self.held and self.payload is not None:
            codec.decode(self.payload, shape=part.shape, out=part)
            if self.factor != 1:
                part.mul_(self.factor)

    def replace(self, codec: Summable, gradient: Tensor, device: torch.device) -> None:
        """Store another gradient, on the parameter's current device."""
        self.payload = codec.encode(gradient, out=self._room(device))
        self.factor, self.held = 1.0, True

    def add(self, codec: Summable, gradient: Tensor, device: torch.device) -> None:
        """Add to the stored gradient, or store this one if there is none."""
        room = self._room(device)
        if not self.held or room is None:
            self.payload = codec.encode(gradient, out=room)
        elif self.factor == 1:
            codec.add(room, gradient)
        else:
            total = codec.decode(room, shape=gradient.shape).mul_(self.factor)
            codec.encode(total.add_(gradient), out=room)
        self.factor, self.held = 1.0, True

    def prepare(self, codec: Summable, shape: torch.Size, device: torch.device, factors: Sequence[float]) -> float:
        """Prepare the payload for a mean over ranks with these factors; return the mean's factor.

        That is the common one or, if they differ, 1, after this rank's payload was encoded anew.
        """
        if self._room(device) is None:
            self.payload = torch.zeros(codec.nbytes(shape), dtype=torch.uint8, device=device)
        if factors.count(factors[0]) == len(factors):
            return factors[0]
        value = self.value(codec, shape, torch.float32)
        if value is not None:
            self.replace(codec, value, device)
        return 1.0

    def _room(self, device: torch.device) -> Tensor | None:
        if self.payload is not None and self.payload.device != device:
            self.payload = self.payload.to(device)
        return self.payload


def named(parameters: nn.Module | Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with their names, or positions; each once. TypeError for a `DistributedDataParallel`."""
    if isinstance(parameters, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "parameters is a DistributedDataParallel, which keeps full-precision gradients of its own; "
            "allowed: the module inside, and average of the storage"
        )
    if isinstance(parameters, nn.Module):
        pairs = list(parameters.named_parameters())
    else:
        pairs = [(str(i), p) for i, p in enumerate(parameters)]
    return list({p: (name, p) for name, p in reversed(pairs)}.values())[::-1]


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise a TypeError for a parameter whose dtype codecs do not support, or in Megatron's DDP."""
    if parameter.dtype not in FLOATS:
        raise TypeError(f"parameter {name!r} has dtype {parameter.dtype}; allowed: {', '.join(map(str, FLOATS))}")
    if hasattr(parameter, "main_grad"):
        raise TypeError(
            f"parameter {name!r} has a main_grad, a full-precision gradient of Megatron's DistributedDataParallel; "
            "allowed: a model without that wrapper, and average of the storage"
        )


def portions(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Split parameters into successive ones on one device, with at most `limit` elements or a single parameter."""
    grouped: list[list[nn.Parameter]] = []
    filled = limit
    for parameter in parameters:
        if not grouped or grouped[-1][0].device != parameter.device or filled + local(parameter).numel() > limit:
            grouped.append([])
            filled = 0
        grouped[-1].append(parameter)
        filled += local(parameter).numel()
    return grouped


def parts(flat: Tensor, portion: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter's part of a flat tensor, in the shape of its local shard."""
    for parameter, part in zip(portion, flat.split([local(p).numel() for p in portion]), strict=True):
        yield parameter, part.view(local(parameter).shape)


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
