"""Codecs that remember messages, and so work through sessions only."""

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
            x: activations of a message, or gradients where nothing else is given. The rest is given only where
                `wanted_nats` is a number.
            gradient: of the loss, for these activations.
            part: of `wanted_nats` for this tensor.
            backward: gradients like this one are to be sent, not activations.
        """
        return 0

    def settle(self, choice: int) -> StatefulCodec:
        """Return the codec with this choice made; a settled codec returns itself."""
        return self

    @property
    def wanted_nats(self) -> float | None:
        """What the coded activations of all boundaries may cost of the loss, in nats; None: no goal is set."""
        return None

    def raised(self, choice: int, bits: float) -> int:
        """Return the choice for `bits` more per element; a format without rates returns `choice` itself."""
        return choice

    def advice(self, shape: Sequence[int]) -> str:
        """Return a warning if a setting makes messages of this shape needlessly long, else an empty text."""
        return ""

    def shared_by(self, shape: Sequence[int]) -> int | None:
        """Return a number: sessions of shapes with the same number share state. None: only equal shapes do."""
        return None

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")
