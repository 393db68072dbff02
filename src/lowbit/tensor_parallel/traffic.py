"""Count what a model sends beside its coded sums: embeddings cut by the vocabulary, and outputs that are gathered."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.tensor_parallel.reduce import Traffic

_counters: weakref.WeakValueDictionary[int, _Counter] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class _Counter:
    def __init__(self, traffic: Traffic, ranks: int, gathers: bool) -> None:
        self.traffic, self.ranks, self.gathers = traffic, ranks, gathers

    def count(self, y: Tensor) -> None:
        if self.ranks == 1:
            return
        nbytes = y.numel() * y.element_size()
        if self.gathers:
            self.traffic.other_bytes += nbytes // self.ranks
        else:
            self.traffic.plain += y.numel()
            self.traffic.plain_bytes += nbytes


@torch.library.custom_op("lowbit::tp_count", mutates_args=("y",))
def _tp_count(y: Tensor, counter: int) -> None:
    """Count `y`, which stays as it is; stated as changed, so that compiled graphs keep the call."""
    _counters[counter].count(y)


def counting(own: Callable[..., Tensor], traffic: Traffic, ranks: int, *, gathers: bool) -> Callable[..., Tensor]:
    """Make a forward that counts the output of another one.

    Args:
        own: the other. traffic: counts. ranks: how many.
        gathers: the ranks' outputs were put side by side, else added up.
    """
    counter = _Counter(traffic, ranks, gathers)
    number = next(_numbers)
    _counters[number] = counter

    def forward(*args: Any, _counter: _Counter = counter, **kwargs: Any) -> Tensor:
        y = own(*args, **kwargs)
        if torch.compiler.is_compiling():
            _tp_count(y, number)
        else:
            _counter.count(y)
        return y

    return forward
