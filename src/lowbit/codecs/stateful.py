"""Codecs that keep state between messages, and so work only through sessions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.codecs.sessions import Session


@dataclass(frozen=True, kw_only=True)
class StatefulCodec(Codec):
    """A codec whose sessions keep state between messages; its own `encode` and `decode` raise a ValueError."""

    stateful: ClassVar[bool] = True

    @abstractmethod
    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session: ...

    def choose(self, x: Tensor, gradient: Tensor | None = None, part: float = 1.0, *, backward: bool = False) -> int:
        """Return the parameter to use for tensors like `x`, or 0 if nothing is open.

        Args:
            x: a message's activations, or gradients if nothing else is given. The other arguments are given only if
                `wanted_nats` is a number.
            gradient: gradient of the loss with respect to these activations.
            part: share of `wanted_nats` for this tensor.
            backward: whether gradients like this one are to be sent, not activations.
        """
        return 0

    def settle(self, choice: int) -> StatefulCodec:
        """Return the codec with this choice made; a settled codec returns itself."""
        return self

    @property
    def wanted_nats(self) -> float | None:
        """Allowed increase of the loss by the coded activations of all boundaries, in nats; None: no goal is set."""
        return None

    def raised(self, choice: int, bits: float) -> int:
        """Return the choice for `bits` more per element; a format without rates returns `choice` itself."""
        return choice

    def shared_by(self, shape: Sequence[int]) -> int | None:
        """Return a key: sessions of shapes with equal keys share state. None: only equal shapes do."""
        return None

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")
