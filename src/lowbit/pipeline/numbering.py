"""Numbers of pipelines within a process group, and channels of their messages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lowbit.pipeline.layouts import Layouts
from lowbit.wire.tags import PIPELINES

PHASES = 3  # of a pipeline that begins with a warm-up (`StepKind.phase`): message sizes depend on the phase

# For each pipeline that this process has begun in a group: its length, and how many of its stages are still to come.
_pipelines: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[int, int]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Configuration:
    """Layouts and channels of the messages of a pass.

    Attributes:
        number: position among the pipeline's configurations, in the order in which they were agreed on.
        layouts: by stage of this rank, then by micro-batch.
        most_tensors: most that cross a boundary together. phases: of future steps.
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


def pipeline_number(group: dist.ProcessGroup, num_stages: int, ranks: int) -> int:
    """Number the pipeline of a new stage: the first one of this length that still lacks stages here, or a new one.

    Ranks that begin their pipelines in the same order get the same numbers, even if they disagree about a length, so
    that their agreement can report it. RuntimeError if the group has no channels left for another pipeline.
    """
    begun = _pipelines.setdefault(group, [])
    for number, (length, missing) in enumerate(begun):
        if length == num_stages and missing:
            begun[number] = (length, missing - 1)
            return number
    PIPELINES.channels(len(begun))
    begun.append((num_stages, max(1, num_stages // ranks) - 1))
    return len(begun) - 1
