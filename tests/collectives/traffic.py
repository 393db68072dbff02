"""Count the messages that a rank sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from lowbit.wire import pytorch


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """The bytes of each message that this rank sends in the block."""
    sent: list[int] = []
    send = pytorch.send

    def counted(tensor: Tensor, *args: Any) -> Any:
        sent.append(tensor.numel())
        return send(tensor, *args)

    with mock.patch.object(pytorch, "send", counted):
        yield sent
