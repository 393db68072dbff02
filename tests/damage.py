"""Messages that change on their way: what a sender has sealed is changed before it leaves."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor

from lowbit.wire.checksum import Checksums

Change = Callable[[int, Tensor], None]
"""Called with the number of a sealed message, from 0, and the message, which it may change."""


@contextlib.contextmanager
def on_the_way(rank: int, change: Change) -> Iterator[None]:
    """Change what a rank sends, whether it is sealed on the host or on a device."""
    before, count = (Checksums.seal, Checksums.seal_there), 0

    def wrapped(seal: Callable[..., None]) -> Callable[..., None]:
        def sealed(self: Checksums, message: Tensor, *place: int) -> None:
            nonlocal count
            seal(self, message, *place)
            change(count, message)
            count += 1

        return sealed

    if dist.get_rank() == rank:
        Checksums.seal, Checksums.seal_there = map(wrapped, before)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checksums.seal, Checksums.seal_there = before  # type: ignore[method-assign]


class Flip:
    """One bit of one message."""

    def __init__(self, number: int, byte: int = 3) -> None:
        self.number, self.byte = number, byte

    def __call__(self, count: int, message: Tensor) -> None:
        if count == self.number:
            message[self.byte] ^= 16


class Replay:
    """One message again in the place of another one."""

    def __init__(self, old: int, new: int) -> None:
        self.old, self.new = old, new

    def __call__(self, count: int, message: Tensor) -> None:
        if count == self.old:
            self.kept = message.clone()
        if count == self.new:
            message.copy_(self.kept)


@contextlib.contextmanager
def secret(text: str) -> Iterator[None]:
    """The secret of this process."""
    os.environ["LOWBIT_SECRET"] = text
    try:
        yield
    finally:
        del os.environ["LOWBIT_SECRET"]
