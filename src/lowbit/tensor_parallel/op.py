"""`lowbit::tp_all_reduce`: the sum of a layer over the ranks as one operator, opaque to graphs.

`torch.compile` traces up to it and from it on. Whether few bits are worth it, traffic, drift and the bytes themselves
are its implementation's business, so that thresholds measured anew, or formats counted in another way, need no new
graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.tensor_parallel.reduce import no_gradient
from lowbit.wire import pytorch

_boundaries: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""`LayerSum`s and `InputGather`s by number."""
_numbers = itertools.count()


def register(boundary: object) -> int:
    """Return the number under which operators know a boundary for as long as it lives."""
    number = next(_numbers)
    _boundaries[number] = boundary
    return number


@torch.library.custom_op("lowbit::tp_all_reduce", mutates_args=())
def tp_all_reduce(x: Tensor, boundary: int, group: str) -> Tensor:
    """Return the sum of all ranks' `x`, coded where that is faster. For inference.

    Bytes on the wire are those of `lowbit.tensor_parallel.reduce.sum_over_ranks`. It copies `x` first (measured on a
    CPU with 2048 rows of 4096 bfloat16 features: 4 ms); `tp_all_reduce_` does not.

    Args:
        x: a partial sum (..., E). boundary: number of a `LayerSum`, its `number`. group: name of the process group.

    Raises:
        RuntimeError: a gradient of `x` is asked for.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    _reduce_(total, boundary, group)
    return total


@tp_all_reduce.register_fake
def _(x: Tensor, boundary: int, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("lowbit::tp_all_reduce_", mutates_args=("x",))
def tp_all_reduce_(x: Tensor, boundary: int, group: str) -> None:
    """`tp_all_reduce`, which replaces `x`, contiguous, by the sum."""
    _reduce_(x, boundary, group)


def _reduce_(x: Tensor, boundary: int, group: str) -> None:
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

    `timeout`: seconds, as of `SumSettings`.
    """
    known = _group(group)
    parts = x.new_empty((known.size(), *x.shape))
    work = pytorch.gather(parts.view(-1), x.contiguous().view(-1), known, async_op=True)
    pytorch.finish(work, known, timeout)
    return parts


@tp_all_gather.register_fake
def _(x: Tensor, group: str, timeout: float) -> Tensor:
    return x.new_empty((_group(group).size(), *x.shape))


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def _forbid(ctx: Any, inputs: tuple[Tensor, int, str], output: object) -> None:
    raise RuntimeError(no_gradient(_boundaries[inputs[1]].name))


tp_all_reduce.register_autograd(lambda ctx, grad: None, setup_context=_forbid)
