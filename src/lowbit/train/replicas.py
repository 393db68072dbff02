"""Data parallelism: equal pipelines, each training on its own share of every batch.

With P ranks in a pipeline, rank r of the run has place r mod P in replica r div P.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import Codec
from lowbit.collectives import Pending, all_reduce, all_reduce_bytes
from lowbit.collectives.reduce import check_summable
from lowbit.gradients.average import average_bytes
from lowbit.train.boundaries import codec_of
from lowbit.train.config import GradientsConfig
from lowbit.train.gradients import Gradients, travels_as_stored
from lowbit.train.metrics import Work
from lowbit.wire.pytorch import new_group

_WARM = 1 << 10  # elements to encode once, which compiles kernels before a peer waits


def all_reduce_codec(config: GradientsConfig) -> Codec:
    """Return the codec of gradients that are averaged over replicas.

    Raises:
        ConfigError: the codec's name or argument is invalid, or its tensors cannot be summed.
    """
    return codec_of("gradients.all_reduce", config.all_reduce, check_summable)


class ReplicaGroups:
    """This rank's place among the pipelines, and its process groups; every rank makes one at the same time.

    Args:
        ranks: ranks of a pipeline; count: number of pipelines. codec: for gradients between them.
        side: a group of all ranks for everything except the training traffic; a single pipeline uses it.

    Attributes:
        index: number of this rank's pipeline; place: of this rank in it.
        pipeline: group of the pipeline for training traffic; side: for everything else.
        across: group of the ranks with this place in all pipelines; None: there is one pipeline.
    """

    def __init__(
        self,
        ranks: int,
        count: int,
        *,
        codec: Codec,
        timeout: float,
        side: dist.ProcessGroup | None = None,
        checksums: bool = True,
    ) -> None:
        self.ranks, self.count = ranks, count
        self.index, self.place = divmod(dist.get_rank(), ranks)
        self.pipeline: dist.ProcessGroup | None = None  # None: the default group
        self._codec, self.timeout, self._checksums = codec, timeout, checksums
        self.across: dist.ProcessGroup | None = None
        self._sent_bytes = self._sent_elements = 0.0
        if count == 1:
            self.side = side
            return
        pipelines = [self.members(i) for i in range(count)]
        self.pipeline = _own_group(pipelines, timeout)
        self.side = _own_group(pipelines, timeout)
        self.across = _own_group([list(range(place, ranks * count, ranks)) for place in range(ranks)], timeout)
        x = torch.zeros(_WARM)
        payload = codec.encode(x)
        for accumulate in (False, True):
            codec.decode(payload, shape=x.shape, out=x, accumulate=accumulate)

    def members(self, index: int) -> list[int]:
        """Return the ranks of a pipeline."""
        return list(range(index * self.ranks, (index + 1) * self.ranks))

    @property
    def others(self) -> list[int]:
        """The ranks with the same place in other pipelines."""
        return [self.members(index)[self.place] for index in range(self.count) if index != self.index]

    def share(self, ids: Tensor) -> Tensor:
        """Return this pipeline's share of a step's sample ids."""
        return ids.chunk(self.count)[self.index]

    def _average(self, flat: Tensor) -> Pending | None:
        """Start to replace one-dimensional float32 gradients by their mean over all pipelines."""
        self._sent_bytes += all_reduce_bytes(
            flat.numel(), self._codec, rank=self.index, ranks=self.count, checksums=self._checksums
        )
        self._sent_elements += 2 * (self.count - 1) / self.count * flat.numel()
        return all_reduce(
            flat, self._codec, self.across, "avg",
            async_op=True, timeout=self.timeout, checksums=self._checksums,
        )  # fmt: skip

    def average_all(self, gradients: Gradients) -> None:
        """Replace gradients by their means over all pipelines; send those as stored that have the messages' format."""
        storage = gradients.storage
        if storage is None or not travels_as_stored(storage.codec, self._codec):
            gradients.average(self._average)
            return
        storage.average(self.across, timeout=self.timeout, checksums=self._checksums)
        shapes = [p.shape for p in gradients.parameters if p.grad is not None]
        self._sent_bytes += average_bytes(
            shapes, storage.codec, count=storage.count, rank=self.index, ranks=self.count, checksums=self._checksums
        )
        self._sent_elements += 2 * (self.count - 1) / self.count * sum(shape.numel() for shape in shapes)

    def note_traffic(self, work: Work) -> None:
        """Add the gradient traffic that this rank has sent since the last call."""
        work.gradient_bytes += self._sent_bytes
        work.gradient_elements += self._sent_elements
        self._sent_bytes = self._sent_elements = 0.0


def _own_group(memberships: list[list[int]], timeout: float) -> dist.ProcessGroup:
    """Make several groups, as every rank must, and return the one that this rank is in."""
    groups = [new_group(members, timeout=timeout) for members in memberships]
    return next(group for group in groups if group is not None)
