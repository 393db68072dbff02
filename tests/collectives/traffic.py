"""Count the messages that a rank sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """The bytes of each message that this rank sends in the block."""
    sent: list[int] = []
    isend = dist.isend

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counted):
        yield sent
