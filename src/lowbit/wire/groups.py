"""Process groups: the default one, new ones, those of others, and numbers that all ranks of a group count alike.

A group of others is one that `torch.distributed` has not made, such as torchft's: PyTorch's functions refuse it, its
own methods work. It has a store and ranks of its own, and may be there without a default group.
"""

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


def plain(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that carries the bytes: the default one for None, the one inside for a wrapper such as torchft's.

    torchft's wrappers keep it as `parent`, another one after each change of the members.

    Raises:
        RuntimeError: None, and there is no default group.
        TypeError: a backend, or no group.
        ValueError: a wrapper that is not connected yet, or a group without a store, such as one in another process.
    """
    group = group or default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; allowed: a ProcessGroup, such as torch.distributed.new_group returns")
    if is_known(group):
        return group
    given = group
    try:
        while isinstance(inside := getattr(group, "parent", None), dist.ProcessGroup):
            group = inside
        group.get_group_store()
    except (AssertionError, RuntimeError):
        raise ValueError(
            f"group is {given!r}, which has no store in this process; allowed: a group of PyTorch's, or a connected "
            "wrapper around one, such as torchft's ProcessGroupGloo after the first quorum"
        ) from None
    return group


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether `torch.distributed` has made the group, so that its functions take it."""
    return group is dist.group.WORLD or group in dist.distributed_c10d._world.pg_map


def job_ranks(group: dist.ProcessGroup) -> list[int]:
    """Numbers of the group's ranks in the whole job; in a group of others, in the group."""
    return dist.get_process_group_ranks(group) if is_known(group) else list(range(group.size()))


def rank_names(group: dist.ProcessGroup) -> list[str]:
    """Names of the ranks of a group for errors, by `job_ranks`."""
    return [f"rank {rank}" for rank in job_ranks(group)]


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
