"""Hold a rank's gradients between backward passes and the optimizer, and average them over equal pipelines.

They are held in `.grad` or in few bits. Each pipeline trains on its own share of every batch: with P ranks in a
pipeline, rank r of the run has place r mod P in replica r div P.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.codecs import Codec, Summable
from lowbit.collectives import Pending, all_reduce, all_reduce_bytes
from lowbit.gradients import GradientStorage
from lowbit.gradients.storage import BUCKET_BYTES, average_bytes
from lowbit.wire.pytorch import new_group
from lowbit_run.config import ConfigError
from lowbit_run.train import optim
from lowbit_run.train.boundaries import codec_of
from lowbit_run.train.config import FULL_PRECISION, GradientsConfig, TrainConfig
from lowbit_run.train.metrics import Work

_WARM = 1 << 10  # elements to encode once, which compiles kernels before a peer waits


def storage_codec(config: GradientsConfig) -> Codec | None:
    """Return the codec of stored gradients; None if they stay in `.grad`."""
    if config.storage == FULL_PRECISION:
        return None
    codec = codec_of("gradients.storage", config.storage)
    if not isinstance(codec, Summable):
        raise ConfigError(
            f"gradients.storage is {config.storage!r}, which keeps state between messages or cannot be summed; "
            "allowed: codecs without state"
        )
    return codec


class Gradients:
    """The phases of a step, for gradients in `.grad` and for stored ones.

    Args:
        codec: for stored gradients; None: `.grad`.
        others: parameters whose gradients are handed over to another rank (`in_full`). They are stored likewise, but
            take no part in averages over replicas and in the optimizer's step.
    """

    def __init__(self, parameters: list[nn.Parameter], codec: Codec | None, *, others: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.storage: GradientStorage | None = None
        if codec is not None:
            self.storage = GradientStorage([*self.parameters, *others], codec=codec)
            for parameter in self.parameters[:1]:  # compile kernels before a peer waits
                self.storage.codec.add(codec.encode(parameter), parameter)

    def finish(self, microbatches: int) -> None:
        """Take the mean over micro-batches, after the last backward pass; in `.grad`, the schedule does so."""
        if self.storage is not None:
            self.storage.absorb()
            self.storage.scale_(1 / microbatches)

    def average(self, reduce: Callable[[Tensor], Any]) -> None:
        """Replace all gradients by their means over replicas.

        Args:
            reduce: starts to replace a one-dimensional float32 tensor by its mean, and returns an object with `wait`.
                Two buckets are under way at a time.
        """
        if self.storage is not None:
            self.storage.all_reduce(reduce)
            return
        under_way: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        for bucket in self.buckets():
            flat = torch.cat([
                torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.reshape(-1).float()
                for p in bucket
            ])  # fmt: skip
            under_way.append((bucket, flat, reduce(flat)))
            if len(under_way) > 1:
                _take(*under_way.pop(0))
        for waiting in under_way:
            _take(*waiting)

    def buckets(self) -> Iterator[list[nn.Parameter]]:
        """Yield groups of parameters whose gradients in `.grad` are averaged together."""
        bucket: list[nn.Parameter] = []
        for parameter in self.parameters:
            bucket.append(parameter)
            if sum(p.numel() for p in bucket) * 4 >= BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    @contextlib.contextmanager
    def in_full(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Put these parameters' gradients into `.grad` for the `with` block, and store `.grad` again after it."""
        if self.storage is None:
            yield
            return
        selected = list(parameters)
        for parameter in selected:
            parameter.grad = self.storage.gradient(parameter)
        yield
        for parameter in selected:
            if parameter.grad is not None:
                self.storage.put(parameter, parameter.grad)

    def of(self, parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
        """Yield the gradients of the parameters that have one, one at a time."""
        if self.storage is not None:
            yield from (gradient for _, gradient in self.storage.gradients(parameters))
        else:
            yield from (p.grad for p in parameters if p.grad is not None)

    def clip(self, *, norm: float, limit: float) -> None:
        """Scale all gradients so that their norm over all ranks, now `norm`, is at most `limit` (0: never)."""
        if self.storage is None:
            optim.scale_(self.of(self.parameters), norm=norm, limit=limit)
        elif limit and norm > limit:
            self.storage.scale_(limit / norm)

    def drop(self) -> None:
        """Drop the gradients of a step that will be repeated."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.storage is not None:
            self.storage.zero_()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step and drop the gradients."""
        if self.storage is None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        else:
            self.storage.step(optimizer)
            self.storage.zero_()


def _take(bucket: list[nn.Parameter], flat: Tensor, pending: Any) -> None:  # a bucket's means into `.grad`
    pending.wait()
    for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(part.view_as(parameter))


class ReplicaGroups:
    """This rank's place among the pipelines, and its process groups; every rank makes one at the same time.

    Args:
        ranks: ranks of a pipeline. codec: for gradients between pipelines.
        side: a group of all ranks for everything except the training traffic; a single pipeline uses it.

    Attributes:
        count: number of pipelines. index: number of this rank's pipeline; place: of this rank in it.
        pipeline: group of the pipeline for training traffic; side: for everything else.
        across: group of the ranks with this place in all pipelines; None: there is one pipeline.
    """

    def __init__(self, config: TrainConfig, ranks: int, codec: Codec, side: dist.ProcessGroup | None) -> None:
        self.ranks, self.count = ranks, (count := config.pipeline.data_parallel)
        self.index, self.place = divmod(dist.get_rank(), ranks)
        self.pipeline: dist.ProcessGroup | None = None  # None: the default group
        self._codec, self._timeout, self._checksums = codec, config.run.timeout_seconds, config.run.checksums
        self.across: dist.ProcessGroup | None = None
        self._sent_bytes = self._sent_elements = 0.0
        if count == 1:
            self.side = side
            return
        pipelines = [self.members(i) for i in range(count)]
        self.pipeline, self.side = self._own_group(pipelines), self._own_group(pipelines)
        self.across = self._own_group([list(range(place, ranks * count, ranks)) for place in range(ranks)])
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
            async_op=True, timeout=self._timeout, checksums=self._checksums,
        )  # fmt: skip

    def average_all(self, gradients: Gradients) -> None:
        """Replace gradients by their means over all pipelines; send those as stored that have the messages' format."""
        storage, sent = gradients.storage, self._codec
        if (
            storage is None
            or not isinstance(sent, Summable)
            or not storage.codec.unit
            or storage.codec.nearest() != sent.nearest()
        ):
            gradients.average(self._average)
            return
        storage.average(self.across, timeout=self._timeout, checksums=self._checksums)
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

    def _own_group(self, memberships: list[list[int]]) -> dist.ProcessGroup:
        """Make several groups, as every rank must, and return the one that this rank is in."""
        groups = [new_group(members, timeout=self._timeout) for members in memberships]
        return next(group for group in groups if group is not None)
