"""Count the messages that a rank sends, and compare what all ranks have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
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


def equal_everywhere(*tensors: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [x.detach().float().numpy().tobytes() for x in tensors])
    return all(each == found[0] for each in found)
