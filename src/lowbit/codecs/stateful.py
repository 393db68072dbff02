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

    def choose(self, x: Tensor) -> int:
        """The parameter that is still open, for tensors like `x`; 0 from a settled codec."""
        return 0

    def settle(self, choice: int) -> StatefulCodec:
        """The codec with that choice made; settled ones return themselves."""
        return self

    def advice(self, shape: Sequence[int]) -> str:
        """A line that says which setting makes messages of this shape needlessly long; empty: none does."""
        return ""

    def shared_by(self, shape: Sequence[int]) -> int | None:
        """Messages for which this is the same number share what a session keeps; None: those of one shape."""
        return None

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")
