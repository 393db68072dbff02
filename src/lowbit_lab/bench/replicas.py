"""Data-parallel ranks with low-bit gradients, emulated in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowbit.codecs import Codec
from lowbit.config import ConfigError
from lowbit.gradients import GradientStorage

RANKS = 2


class Replicas:
    """Gradients of `RANKS` ranks in one process, which share a batch, one sample a micro-batch.

    As in AGoQ's all-reduce: each rank's sum over its micro-batches is coded for the network, the sum over the ranks is
    float32, coded once more, and stored.

    Args:
        model: whose gradients are taken out of `.grad`.
        codec: of storage and all-reduce.
    """

    def __init__(self, model: nn.Module, codec: Codec) -> None:
        self.codec, self.storage = codec, GradientStorage(model, codec=codec)

    def backward(self, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Leave the mean gradient of a batch in the storage.

        Args:
            loss: mean loss of samples.
            inputs, targets: (samples, sequence), a multiple of `RANKS` samples.

        Returns:
            The batch's mean loss.

        Raises:
            ConfigError: a number of samples that the ranks cannot share.
        """
        if len(inputs) % RANKS:
            raise ConfigError(f"batch is {len(inputs)}; allowed: multiples of {RANKS}")
        sums: dict[nn.Parameter, Tensor] = {}
        losses: list[Tensor] = []
        for mine in torch.arange(len(inputs)).chunk(RANKS):
            self.storage.zero_()
            for sample in mine.split(1):
                one = loss(inputs[sample], targets[sample])
                one.backward()
                losses.append(one.detach())
            for parameter, gradient in self.storage.gradients():
                sent = self.codec.round_trip(gradient)
                sums[parameter] = sums[parameter] + sent if parameter in sums else sent
        for parameter, total in sums.items():
            self.storage.put(parameter, self.codec.round_trip(total))
        self.storage.scale_(1 / len(inputs))
        return torch.stack(losses).mean()

    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> None:
        """Clip to this norm (0: never), take the optimizer's step, and drop the gradients."""
        if clip:
            self.storage.clip_(clip)
        self.storage.step(optimizer)
        self.storage.zero_()
