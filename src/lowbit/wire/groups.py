"""Process groups: the default one, new ones, foreign ones, and counters that agree on all ranks of a group.

PyTorch's functions refuse a foreign group, which `torch.distributed` has not made, such as torchft's; its own methods
work. It has its own store and rank numbers, and may exist without a default group.
"""

from __future__ import annotations

import weakref
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

_counters: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def default_group() -> dist.ProcessGroup:
    """The default process group; RuntimeError before `torch.distributed.init_process_group`."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    return group


def plain(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that carries the bytes: the default one for None, the inner one of a wrapper such as torchft's.

    TypeError: a backend, or not a group. ValueError: a wrapper that is not connected, or a group without a store here.
    """
    group = group or default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; allowed: a ProcessGroup, such as torch.distributed.new_group returns")
    if is_known(group):
        return group
    given = group
    try:
        # torchft's wrappers keep it as `parent`, and replace it after each change of the members.
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
    """Whether `torch.distributed` has made the group, so that its functions accept it."""
    return group is dist.group.WORLD or group in dist.distributed_c10d._world.pg_map


def job_ranks(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of the group's members; in a foreign group, their ranks in the group."""
    return dist.get_process_group_ranks(group) if is_known(group) else list(range(group.size()))


def rank_names(group: dist.ProcessGroup) -> list[str]:
    """Names of the ranks of a group for errors, by `job_ranks`."""
    return [f"rank {rank}" for rank in job_ranks(group)]


def next_round(group: dist.ProcessGroup, name: str) -> int:
    """Return 0, 1, 2, ... for successive calls with a name; equal on ranks that make the same calls."""
    counter = _counters.setdefault(group, Counter())
    counter[name] += 1
    return counter[name] - 1


def new_group(ranks: list[int] | None = None, *, timeout: float) -> dist.ProcessGroup | None:
    """Make a process group of these ranks (None: all); every rank calls this. None on ranks outside the group."""
    # The run's time limit, because PyTorch's default is 30 minutes.
    group = dist.new_group(ranks=ranks, timeout=timedelta(seconds=0.8 * timeout))
    return group if isinstance(group, dist.ProcessGroup) else None
