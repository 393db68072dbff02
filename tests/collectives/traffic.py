"""Count the messages that a rank sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from lowbit.wire.mailbox import Mailbox, Route


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    sent: list[int] = []
    send = Mailbox.send

    def counted(self: Mailbox, message: Tensor, place: Any, *routes: Route, **more: Any) -> Any:
        sent.extend(message.numel() for _ in routes)
        return send(self, message, place, *routes, **more)

    with mock.patch.object(Mailbox, "send", counted):
        yield sent
