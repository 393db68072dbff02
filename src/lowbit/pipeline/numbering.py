"""Which pipeline a stage belongs to, where a process group has several."""

from __future__ import annotations

import weakref

import torch.distributed as dist

# Of each pipeline that this process has begun in a group: its length, and how many of its stages are to be made yet.
_pipelines: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[int, int]]]
_pipelines = weakref.WeakKeyDictionary()


def pipeline_number(group: dist.ProcessGroup, num_stages: int, ranks: int) -> int:
    """Which of the group's pipelines a stage belongs to: the first of this length that lacks one here, or a new one.

    Ranks that begin their pipelines in the same order count alike, even where they disagree about a length, so that
    they meet and can say so.
    """
    begun = _pipelines.setdefault(group, [])
    for number, (length, missing) in enumerate(begun):
        if length == num_stages and missing:
            begun[number] = (length, missing - 1)
            return number
    begun.append((num_stages, max(1, num_stages // ranks) - 1))
    return len(begun) - 1
