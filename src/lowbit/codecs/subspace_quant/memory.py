"""What an end of a `SubspaceQuant` boundary knows, and how it tells that a message is the next one."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lowbit.codecs.subspace_quant.reference_basis import invert
from lowbit.kernels import implementation


class Headers:
    """What arrives and what should have: compared by the host as soon as it knows, which waits for no GPU."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def compare(self, found: Tensor, expected: Tensor) -> bool:
        """Take two headers; raise for those that have arrived: on the CPU these, on a GPU those before, as a rule.

        Returns:
            Whether these have been compared.
        """
        both, event = torch.stack([found, expected]), None
        if both.is_cuda:
            host = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True)
            both, event = host.copy_(both, non_blocking=True), torch.cuda.Event()
            event.record()
        self._coming.append((both, event))
        self.check()
        return not self._coming

    def check(self, wait: bool = False) -> None:
        """Raise unless every header that has arrived is the expected one."""
        while self._coming:
            both, event = self._coming[0]
            if event is not None and wait:
                event.synchronize()
            elif event is not None and not event.query():
                return
            self._coming.popleft()
            found, expected = both.tolist()
            # Below 0: wrong directions, which a sender may well announce itself.
            if found != expected or min(expected) < 0:
                raise ValueError(
                    f"payload is {_told(found)}; this end expects {_told(expected)}: "
                    "a message was lost, repeated or changed, or came in another order"
                )

    def clear(self) -> None:
        self._coming.clear()


class Memory:
    """What an end knows: the directions, and how they came about."""

    def __init__(self, directions: int, channels: int, device: torch.device) -> None:
        self._empty = (directions, channels), device
        self.headers = Headers()
        self.reset()

    def reset(self) -> None:
        """Nothing has passed yet."""
        shape, device = self._empty
        digest = torch.zeros((), dtype=torch.int64, device=device)
        self.restore(torch.zeros(shape, dtype=torch.float32, device=device), 0, digest)

    def restore(self, directions: Tensor, messages: int, digest: Tensor) -> None:
        """So many messages of training have passed; the digest is int64 ()."""
        self.directions, self.messages, self.digest = directions, messages, digest
        self._inverse: Tensor | None = None
        self.headers.clear()

    def inverse(self) -> Tensor:
        """Of the directions' products with each other ; for use `apart`."""
        if self._inverse is None:
            count = len(self.directions)
            self._inverse = self.directions.new_empty(count, count)
            implementation(invert, self.directions.device)(self.directions, self._inverse)
        return self._inverse

    def keep(self, directions: Tensor, digest: Tensor, inverse: Tensor | None = None) -> None:
        """A training message has passed."""
        for old in (self.directions, self.digest, self._inverse):
            if old is not None and old.is_cuda:
                # This stream may still have to read what another one allocated, and would be free to use again.
                old.record_stream(torch.cuda.current_stream())
        self.directions, self.digest, self._inverse = directions, digest, inverse
        self.messages += 1


def _told(header: list[int]) -> str:
    number, before, training, own = header
    kind = {0: "evaluation", 1: "training"}.get(training, f"unknown ({training})")
    new = f"new ones {own:08x}" if own >= 0 else "new ones beyond the basis or twice in one place"
    return f"{kind} message {number} after directions {before:08x} with {new}"
