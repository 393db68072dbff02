"""Layouts of the tensors that cross a boundary: their shapes, strides, dtypes, and whether they require gradients.

Neighbours exchange them as JSON, in one message of a fixed size: PyTorch would pickle them, and a peer must not decide
which code runs or how much memory is taken. Here a layout is a tensor without memory, on the meta device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit.wire.errors import PeerError
from lowbit.wire.tags import LAYOUTS, tag

MESSAGE_BYTES = 1 << 14
"""Bytes of the message; shorter texts are padded with blanks. It has room for about 150 tensors."""

MOST_ELEMENTS = 1 << 40
"""Largest tensor, and largest distance between its first and last element."""

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


@dataclass(frozen=True)
class Layouts:
    """Layouts of the tensors that cross the two sides of a stage with a micro-batch."""

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()


def layout_of(x: Any) -> Tensor:
    """Return the layout in which a tensor arrives: its own, or that of a dense copy if elements overlap or have gaps.

    So an expanded tensor arrives in memory of its full size, and a slice of a large one in memory of its own size.

    Raises:
        TypeError: not a tensor, or one that is not dense, or a DTensor, whose mesh does not travel.
    """
    if not isinstance(x, Tensor) or hasattr(x, "placements"):
        raise TypeError(f"a {type(x).__name__} cannot cross between two stages; allowed: tensors")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"a {kind} tensor cannot cross between two stages; allowed: dense tensors")
    return _dense(x.shape, x.stride(), x.dtype).requires_grad_(x.requires_grad)


@dataclass(frozen=True)
class Batch:
    """Arguments of a call of `schedule.step` or `schedule.eval` on this rank.

    Attributes:
        training: whether gradients are computed.
        micro_batches: their number in the schedule.
        args: positional inputs by micro-batch; empty tuples on a rank without the first stage.
        kwargs: keyword inputs by micro-batch, of any stage.
    """

    training: bool
    micro_batches: int
    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]

    def problem(self) -> str:
        """Describe what is wrong with the first stage's inputs; empty if nothing is."""
        count, allowed = self.micro_batches, "allowed: at least one sample for each"
        if len(self.args) != count:
            return f"the batch gives {len(self.args)} micro-batches, and the schedule has {count}; {allowed}"
        for i, args in enumerate(self.args):
            if any(isinstance(x, Tensor) and x.dim() and not len(x) for x in args):
                return f"micro-batch {i} of {count} is empty; {allowed}"
        return ""

    def mode(self) -> tuple[Any, ...]:
        """Return the settings, other than inputs, that layouts depend on: training or not, and autocast's dtypes."""
        kinds = {x.device.type for x in tree_leaves(self.args) if isinstance(x, Tensor)}
        cast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        return self.training, *sorted(cast)

    def keys(self) -> list[tuple[Any, Any]]:
        """Return what layouts depend on, by micro-batch: properties of its positional and of its keyword inputs."""
        given = [[layout_of(x) for x in args if isinstance(x, Tensor)] for args in self.args]
        named = [tree_leaves(sorted(kwargs.items())) for kwargs in self.kwargs]
        return [(_key(layouts), _key(leaves)) for layouts, leaves in zip(given, named, strict=True)]


def send_layouts(
    layouts: Sequence[Tensor], group: dist.ProcessGroup | None, peer: int, device: torch.device, timeout: float
) -> None:
    """Send layouts of tensors to a peer, which must call `receive_layouts`; return once they are sent.

    Args:
        layouts: the tensors, or others like them.
        group: the process group; peer: rank in it; device: where tensors must be for the group to carry them.
        timeout: seconds to wait for the peer, if the backend supports a limit (Gloo).

    Raises:
        RuntimeError: the peer ended, or did not receive it in time.
        ValueError: more tensors than the message has room for.
    """
    text = json.dumps([_stated(layout) for layout in layouts]).encode()
    if len(text) > MESSAGE_BYTES:
        raise ValueError(
            f"the layouts of {len(layouts)} tensors between two stages are {len(text)} bytes of text; "
            f"allowed: {MESSAGE_BYTES}"
        )
    message = torch.frombuffer(bytearray(text.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
    _run(dist.isend, message.to(device), group, peer, timeout)


def receive_layouts(group: dist.ProcessGroup | None, peer: int, device: torch.device, timeout: float) -> list[Tensor]:
    """Receive the layouts that a peer sent by `send_layouts`.

    Raises:
        PeerError: the peer sent something else. RuntimeError: it ended, or sent nothing in time.
    """
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    _run(dist.irecv, message, group, peer, timeout)
    try:
        return parse(message.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise PeerError(f"rank {peer} sent something other than layouts of tensors: {error}", peer) from None


def parse(text: bytes) -> list[Tensor]:
    """Parse the layouts in a message.

    Raises:
        ValueError: the message does not describe valid layouts.
    """
    stated = json.loads(text)
    if not isinstance(stated, list):
        raise ValueError(f"{str(stated)[:80]!r} is not a list")
    return [_tensor(layout) for layout in stated]


def _key(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, x.stride(), x.requires_grad) for x in values if isinstance(x, Tensor))


def _stated(layout: Tensor) -> dict[str, Any]:
    return {
        "shape": list(layout.shape),
        "stride": list(layout.stride()),
        "dtype": str(layout.dtype).removeprefix("torch."),
        "requires_grad": layout.requires_grad,
    }


def _tensor(stated: Any) -> Tensor:
    match stated:
        case {"shape": [*shape], "stride": [*stride], "dtype": str(dtype), "requires_grad": bool(grad)} if (
            len(stated) == 4
            and dtype in _DTYPES
            and all(type(n) is int and 0 <= n <= MOST_ELEMENTS for n in (*shape, *stride))
            and _can_be(shape, stride)
            and (not grad or _DTYPES[dtype].is_floating_point or _DTYPES[dtype].is_complex)
        ):
            return _dense(shape, stride, _DTYPES[dtype]).requires_grad_(grad)
    raise ValueError(f"{str(stated)[:200]} is not the layout of a tensor")


def _dense(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a layout whose elements neither overlap nor have gaps; strides that already fit are kept."""
    return torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


def _can_be(shape: Sequence[int], stride: Sequence[int]) -> bool:
    if len(shape) != len(stride) or math.prod(n or 1 for n in shape) > MOST_ELEMENTS:
        return False
    return sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n) < MOST_ELEMENTS


def _run(send_or_receive: Callable[..., Any], message: Tensor, group: Any, peer: int, timeout: float) -> None:
    """Run one message as a batch, as PyTorch does: with NCCL, a message outside a batch would open a new connection."""
    limit = (timedelta(seconds=timeout),) if message.device.type == "cpu" else ()
    one_tag = tag(LAYOUTS.first, MESSAGE_BYTES)
    operation = dist.P2POp(send_or_receive, message, group=group, group_peer=peer, tag=one_tag)
    for work in dist.batch_isend_irecv([operation]):
        work.wait(*limit)
