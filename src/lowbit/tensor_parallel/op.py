"""`lowbit::tp_all_reduce_`: the sum of a layer over the ranks as one operator, opaque to graphs.

`torch.compile` traces the code before and after it. Its implementation decides whether to code, counts traffic and
samples drift, so that new thresholds or another way of counting need no new graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.tensor_parallel.reduce import Traffic
from lowbit.wire import pytorch

_boundaries: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""`LayerSum`s, `InputGather`s, and functions of `counting`, by number."""
_numbers = itertools.count()


def register(boundary: object) -> int:
    """Return the number under which operators know a boundary for as long as it lives."""
    number = next(_numbers)
    _boundaries[number] = boundary
    return number


@torch.library.custom_op("lowbit::tp_all_reduce_", mutates_args=("x",))
def tp_all_reduce_(x: Tensor, boundary: int, group: str) -> None:
    """Replace a partial sum by that of all ranks, coded where that is faster. For inference.

    Args:
        x: (..., E), contiguous. boundary: the `number` of a `LayerSum`. group: name of the process group.
    """
    _boundaries[boundary].reduce_(x, _group(group))


@torch.library.custom_op("lowbit::tp_linear", mutates_args=())
def tp_linear(x: Tensor, weight: Tensor, whole: Tensor, boundary: int, group: str) -> Tensor:
    """Return the whole output of a row-wise layer: `InputGather.linear`. For inference."""
    return _boundaries[boundary].linear(x, weight, whole, _group(group))


@tp_linear.register_fake
def _(x: Tensor, weight: Tensor, whole: Tensor, boundary: int, group: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("lowbit::tp_all_gather", mutates_args=())
def tp_all_gather(x: Tensor, group: str, timeout: float) -> Tensor:
    """Return the `x` of all ranks, (ranks, *x.shape), in the dtype of `x`: each rank sends (ranks - 1) times its bytes.

    `timeout`: seconds, as in `SumSettings`.
    """
    process_group = _group(group)
    parts = x.new_empty((process_group.size(), *x.shape))
    work = pytorch.gather(parts.view(-1), x.contiguous().view(-1), process_group, async_op=True)
    pytorch.finish(work, process_group, timeout)
    return parts


@tp_all_gather.register_fake
def _(x: Tensor, group: str, timeout: float) -> Tensor:
    return x.new_empty((_group(group).size(), *x.shape))


@torch.library.custom_op("lowbit::tp_count", mutates_args=("y",))
def _tp_count(y: Tensor, counter: int) -> None:
    """Count `y`, which is not changed, but declared as changed so that compiled graphs keep the call."""
    _boundaries[counter](y)


def counting(own: Callable[..., Tensor], traffic: Traffic, ranks: int, *, gathers: bool) -> Callable[..., Tensor]:
    """Make a forward that counts the output of another one, such as that of an embedding cut by the vocabulary.

    `gathers`: the ranks' outputs are gathered; otherwise they are added up.
    """

    def count(y: Tensor) -> None:
        nbytes = y.numel() * y.element_size()
        if gathers:
            traffic.other_bytes += nbytes // ranks
        else:
            traffic.plain += y.numel()
            traffic.plain_bytes += nbytes

    number = register(count)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        y = own(*args, **kwargs)
        if ranks > 1:
            _tp_count(y, number) if torch.compiler.is_compiling() else count(y)
        return y

    return forward


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore
