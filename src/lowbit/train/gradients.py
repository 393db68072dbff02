"""Hold a rank's gradients between backward passes and the optimizer: in `.grad`, or in few bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lowbit.codecs import Codec, Summable
from lowbit.config import ConfigError
from lowbit.gradients import GradientStorage
from lowbit.gradients.storage import BUCKET_BYTES
from lowbit.train import optim
from lowbit.train.boundaries import codec_of
from lowbit.train.config import FULL_PRECISION, GradientsConfig


def storage_codec(config: GradientsConfig) -> Codec | None:
    """Return the codec of stored gradients; None if they stay in `.grad`.

    Raises:
        ConfigError: the codec's name or argument is invalid, or the codec has state.
    """
    if config.storage == FULL_PRECISION:
        return None
    codec = codec_of("gradients.storage", config.storage)
    if not isinstance(codec, Summable):
        raise ConfigError(
            f"gradients.storage is {config.storage!r}, which keeps state between messages or cannot be summed; "
            "allowed: codecs without state"
        )
    return codec


def travels_as_stored(storage: Codec | None, codec: Codec) -> TypeGuard[Summable]:
    """Whether gradients stored by `storage` can be sent as they are instead of coded by `codec`."""
    if not isinstance(storage, Summable) or not isinstance(codec, Summable):
        return False
    return storage.unit > 0 and storage.nearest() == codec.nearest()


class Gradients:
    """The phases of a step, for gradients in `.grad` and for stored ones.

    Args:
        codec: for stored gradients; None: `.grad`.
        others: parameters whose gradients are handed over to another rank (`in_full`). They are stored likewise, but
            take no part in averages over replicas and in the optimizer's step.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        codec: Codec | None,
        *,
        microbatches: int,
        others: Iterable[nn.Parameter] = (),
    ) -> None:
        self.parameters = list(parameters)
        self.microbatches = microbatches
        self.storage: GradientStorage | None = None
        if codec is not None:
            self.storage = GradientStorage([*self.parameters, *others], codec=codec)
            for parameter in self.parameters[:1]:  # compile kernels before a peer waits
                self.storage.codec.add(codec.encode(parameter), parameter)

    def finish(self) -> None:
        """Take the mean over micro-batches, after the last backward pass; in `.grad`, the schedule does so."""
        if self.storage is not None:
            self.storage.absorb()
            self.storage.scale_(1 / self.microbatches)

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
