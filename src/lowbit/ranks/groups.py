"""Process groups: the default one, new ones, and numbers that all ranks of a group count alike."""

from __future__ import annotations

import weakref
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

_counters: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        RuntimeError: `torch.distributed.init_process_group` has not been called.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    return group


def rank_names(group: dist.ProcessGroup) -> list[str]:
    """Names of the ranks of a group for errors, by their numbers in the whole job."""
    return [f"rank {rank}" for rank in dist.get_process_group_ranks(group)]


def next_round(group: dist.ProcessGroup, name: str) -> int:
    """0, 1, 2, ... for successive calls with a name: ranks that make the same calls count alike."""
    counter = _counters.setdefault(group, Counter())
    counter[name] += 1
    return counter[name] - 1


def new_group(ranks: list[int] | None = None, *, timeout: float) -> dist.ProcessGroup | None:
    """A process group of these ranks (None: all), to be called on every rank; None where this rank is not in it.

    `timeout`: of the run, in seconds. PyTorch would give the group 30 minutes.
    """
    group = dist.new_group(ranks=ranks, timeout=timedelta(seconds=0.8 * timeout))
    return group if isinstance(group, dist.ProcessGroup) else None
