"""Which pipeline a stage belongs to, where a process group has several, and what its ranks are called."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist

MOST_PIPELINES = 64
"""Of a process group: each has tags of its own, since a message that was awaited in vain may still be."""

# Of each pipeline that this process has begun in a group: its length, and how many of its stages are to be made yet.
_pipelines: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[int, int]]]
_pipelines = weakref.WeakKeyDictionary()


def pipeline_number(group: dist.ProcessGroup, num_stages: int, ranks: int) -> int:
    """Which of the group's pipelines a stage belongs to: the first of this length that lacks one here, or a new one.

    Ranks that begin their pipelines in the same order count alike, even where they disagree about a length, so that
    they meet and can say so.

    Raises:
        RuntimeError: it would be one too many.
    """
    begun = _pipelines.setdefault(group, [])
    for number, (length, missing) in enumerate(begun):
        if length == num_stages and missing:
            begun[number] = (length, missing - 1)
            return number
    if len(begun) == MOST_PIPELINES:
        raise RuntimeError(
            f"this process group has had {MOST_PIPELINES} pipelines, and no more are allowed: "
            "make others in another group (torch.distributed.new_group)"
        )
    begun.append((num_stages, max(1, num_stages // ranks) - 1))
    return len(begun) - 1


def rank_names(group: dist.ProcessGroup, stages_of: Callable[[int], list[int]]) -> list[str]:
    """What errors call each rank of a group, by the job's count and the stages that it holds."""
    stages = map(stages_of, range(dist.get_world_size(group)))
    return [
        f"rank {rank} (stage{'s' * (len(held) > 1)} {', '.join(map(str, held))})"
        for rank, held in zip(dist.get_process_group_ranks(group), stages, strict=True)
    ]


def stage_names(group: dist.ProcessGroup, stages_of: Callable[[int], list[int]]) -> list[str]:
    """What errors call each stage, by the job's count of the ranks."""
    names = {
        stage: f"rank {name} (stage {stage})"
        for rank, name in enumerate(dist.get_process_group_ranks(group))
        for stage in stages_of(rank)
    }
    return [names[stage] for stage in sorted(names)]
