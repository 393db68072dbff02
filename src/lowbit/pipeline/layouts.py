"""Layouts (tensors without memory) of what crosses a boundary, and messages with them.

They are JSON of a fixed size, not pickled: a peer must not decide which code runs or how much memory is taken.
"""

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit.escape import one_line
from lowbit.wire.errors import PeerError
from lowbit.wire.tags import LAYOUTS, PIPELINES, tag

MESSAGE_BYTES = 1 << 14
"""Bytes of the message; shorter texts are padded with blanks. It has room for about 130 tensors."""

_TAG = tag(LAYOUTS.first, MESSAGE_BYTES)

MOST_ELEMENTS = 1 << 40
"""Largest tensor, and largest distance between its first and last element."""

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Constant(Tensor):
    """Layout of a constant: a floating tensor that depends on no parameter, such as a mask or a table of cosines."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore (results are plain tensors)


@dataclass(frozen=True)
class Layouts:
    """Layouts of the tensors that cross the two sides of a stage with a micro-batch."""

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()


def layout_of(x: Any) -> Tensor:
    """Return the layout in which a tensor arrives: its own, or that of a dense copy if elements overlap or have gaps.

    TypeError: not a tensor, or one that is not dense, or a DTensor, whose mesh does not travel.
    """
    if isinstance(x, Constant):
        return x
    if not isinstance(x, Tensor) or hasattr(x, "placements"):
        raise TypeError(f"a {type(x).__name__} cannot cross between two stages; allowed: tensors")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"a {kind} tensor cannot cross between two stages; allowed: dense tensors")
    return _dense(x.shape, x.stride(), x.dtype).requires_grad_(x.requires_grad)


def mark_constants(layouts: Sequence[Tensor], learned: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return layouts with those of floating tensors marked whose counterparts in `learned` require no gradient."""
    return tuple(
        x.as_subclass(Constant) if x.is_floating_point() and not y.requires_grad else x
        for x, y in zip(layouts, learned, strict=True)
    )


@dataclass(frozen=True)
class Batch:
    """A call of `schedule.step` or `eval` on this rank, and its positional and keyword inputs by micro-batch.

    `fault`: why they could not be split; empty if they were.
    """

    training: bool
    micro_batches: int
    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    fault: str = ""

    def problem(self) -> str:
        """Describe what is wrong with the first stage's inputs; empty if nothing is."""
        count, allowed = self.micro_batches, "allowed: at least one sample for each"
        if self.fault:
            return f"the batch cannot be split into {count} micro-batches ({self.fault[:99]}); {allowed}"
        if len(self.args) != count:
            return f"the batch gives {len(self.args)} micro-batches, and the schedule has {count}; {allowed}"
        for i, args in enumerate(self.args):
            if any(isinstance(x, Tensor) and x.dim() and not len(x) for x in args):
                return f"micro-batch {i} of {count} is empty; {allowed}"
        return ""

    def keys(self) -> tuple[Any, ...]:
        """Return what layouts depend on: settings (training, autocast), and properties of each micro-batch's inputs."""
        kinds = {x.device.type for x in tree_leaves(self.args) if isinstance(x, Tensor)}
        cast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        layouts = [[layout_of(x) for x in args if isinstance(x, Tensor)] for args in self.args]
        named = [tree_leaves(sorted(kwargs.items())) for kwargs in self.kwargs]
        inputs = [(_key(inputs), _key(leaves)) for inputs, leaves in zip(layouts, named, strict=True)]
        return (self.training, *sorted(cast)), *inputs


def send_layouts(layouts: Sequence[Tensor], group: dist.ProcessGroup, peer: int, timeout: float) -> None:
    """Send layouts of tensors to a peer, which must call `receive_layouts`; ValueError: too many for the message."""
    stated = [
        {"shape": [*x.shape], "stride": [*x.stride()], "dtype": _NAMES[x.dtype], "requires_grad": x.requires_grad}
        | {"constant": isinstance(x, Constant)}
        for x in layouts
    ]
    text = json.dumps(stated).encode()
    if len(text) > MESSAGE_BYTES:
        raise ValueError(
            f"the layouts of {len(layouts)} tensors between two stages are {len(text)} bytes of text; "
            f"allowed: {MESSAGE_BYTES}"
        )
    message = torch.frombuffer(bytearray(text.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
    group.send([message], peer, _TAG).wait(timedelta(seconds=timeout))


def receive_layouts(group: dist.ProcessGroup, peer: int, name: str, timeout: float) -> list[Tensor]:
    """Receive what a peer sent by `send_layouts`; PeerError: it sent something else; RuntimeError: nothing in time."""
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    group.recv([message], peer, _TAG).wait(timedelta(seconds=timeout))
    try:
        return parse(message.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise PeerError(f"{name} sent something other than layouts of tensors: {error}", peer) from None


def parse(text: bytes) -> list[Tensor]:
    """Parse the layouts in a message; ValueError if it does not describe valid ones."""
    stated = json.loads(text)
    if not isinstance(stated, list):
        raise ValueError(f"{str(stated)[:80]!r} is not a list")
    return [_tensor(layout) for layout in stated]


def _key(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, x.stride(), x.requires_grad) for x in values if isinstance(x, Tensor))


def _tensor(stated: Any) -> Tensor:
    match stated:
        case {
            "shape": [*shape],
            "stride": [*stride],
            "dtype": str(dtype),
            "requires_grad": bool(grad),
            "constant": bool(constant),
        } if (
            len(stated) == 5
            and dtype in _DTYPES
            and all(type(n) is int and 0 <= n <= MOST_ELEMENTS for n in (*shape, *stride))
            and _can_be(shape, stride)
            and (not grad or _DTYPES[dtype].is_floating_point or _DTYPES[dtype].is_complex)
            and (not constant or (_DTYPES[dtype].is_floating_point and not grad))
        ):
            layout = _dense(shape, stride, _DTYPES[dtype]).requires_grad_(grad)
            return layout.as_subclass(Constant) if constant else layout
    raise ValueError(f"{one_line(str(stated), 200)} is not the layout of a tensor")


def _dense(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    # Strides are kept if elements neither overlap nor have gaps.
    return torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


def _can_be(shape: Sequence[int], stride: Sequence[int]) -> bool:
    if len(shape) != len(stride) or math.prod(n or 1 for n in shape) > MOST_ELEMENTS:
        return False
    return sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n) < MOST_ELEMENTS


# For each pipeline that this process has begun in a group: its length, and the stages that it has here.
_pipelines: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[int, set[int]]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Configuration:
    """Layouts and channels of the messages of a pass.

    Attributes:
        number: position among the pipeline's configurations, in the order in which they were agreed on.
        layouts: by stage of this rank, then by micro-batch.
        most_tensors: most that cross a boundary together. phases: kinds of steps whose sizes differ (`StepKind.phase`):
            2 if the warm-up is not over, 3 if token anchors are renewed.
    """

    number: int
    training: bool
    micro_batches: int
    layouts: Mapping[int, Sequence[Layouts]]
    first_channel: int
    most_tensors: int
    phases: int

    def channel(self, boundary: int, backward: bool, phase: int, micro_batch: int, index: int) -> int:
        lane = (boundary * 2 + backward) * self.phases + phase % self.phases
        return self.first_channel + (lane * self.micro_batches + micro_batch) * self.most_tensors + index

    def channels(self, boundaries: int) -> int:
        return boundaries * 2 * self.phases * self.micro_batches * self.most_tensors


def pipeline_number(group: dist.ProcessGroup, stage: int, num_stages: int, ranks: int) -> int:
    """Number the pipeline of a new stage: the first of this length that lacks it and has room here, or a new one.

    Ranks that begin their pipelines in the same order get the same numbers, even if they disagree about a length, so
    that their agreement can report it. RuntimeError if the group has no channels left.
    """
    begun, room = _pipelines.setdefault(group, []), max(1, num_stages // ranks)
    for number, (length, stages) in enumerate(begun):
        if length == num_stages and stage not in stages and len(stages) < room:
            stages.add(stage)
            return number
    PIPELINES.channels(len(begun))
    begun.append((num_stages, {stage}))
    return len(begun) - 1
