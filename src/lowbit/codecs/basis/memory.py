"""The state of one end of a `TransformQuant` boundary, and the check that a message is the next one."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lowbit.codecs.basis.reference import invert
from lowbit.kernels import implementation

BAD_STREAMS = -2  # instead of the digest of new directions: the message's coded symbols are damaged


class Headers:
    """Received and expected headers, compared by the host once they have arrived, without waiting for a GPU."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def compare(self, received: Tensor, expected: Tensor) -> bool:
        """Add two headers and check those that have arrived: on the CPU these, on a GPU usually earlier ones.

        Returns:
            Whether these two have been compared.
        """
        both, event = torch.stack([received, expected]), None
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
            received, expected = both.tolist()
            # Negative: invalid directions, which the sender's own header may announce as well.
            if received != expected or min(expected) < 0:
                raise ValueError(
                    f"payload is {_described(received)}; this end expects {_described(expected)}: "
                    "a message was lost, repeated or changed, or came in another order"
                )

    def clear(self) -> None:
        self._coming.clear()


class Memory:
    """One end's directions, and the number and digest of the messages that brought them."""

    def __init__(self, directions: int, channels: int, device: torch.device) -> None:
        self._shape, self._device = (directions, channels), device
        self.headers = Headers()
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first message."""
        digest = torch.zeros((), dtype=torch.int64, device=self._device)
        self.restore(torch.zeros(self._shape, dtype=torch.float32, device=self._device), 0, digest)

    def restore(self, directions: Tensor, messages: int, digest: Tensor) -> None:
        """Set the state after `messages` training messages; the digest is int64 ()."""
        self.directions, self.messages, self.digest = directions, messages, digest
        self._inverse: Tensor | None = None
        self.headers.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the directions, float32 (K, C), the number of messages so far, and the digest of their directions."""
        self.headers.check(wait=True)
        return {"directions": self.directions.clone(), "messages": self.messages, "digest": int(self.digest)}

    def load_state_dict(self, state: dict[str, Any], codec: object) -> None:
        """Restore the result of `state_dict`; an empty one is the state before the first message.

        Raises:
            ValueError: it has another number of directions or another width, or is not from a `codec` like this.
        """
        if not state:
            self.reset()
            return
        if unlike := {"directions", "messages", "digest"} ^ set(state):
            raise ValueError(f"state lacks or has {sorted(unlike)}; it is not a state of {codec}")
        directions, counts = state["directions"], (state["messages"], state["digest"])
        if not isinstance(directions, Tensor) or any(type(count) is not int for count in counts):
            raise ValueError(
                "state has directions, messages or digest of a wrong type; allowed: a tensor and two integers"
            )
        if not directions.isfinite().all():
            raise ValueError("state has directions with NaN or Inf; allowed: finite ones")
        if directions.shape != self.directions.shape:
            expected = tuple(self.directions.shape)
            raise ValueError(
                f"state has directions of shape {tuple(directions.shape)}; expected (directions, channels) = {expected}"
            )
        self.restore(
            directions.to(self._device, torch.float32, copy=True),
            int(state["messages"]),
            torch.full((), int(state["digest"]), dtype=torch.int64, device=self._device),
        )

    def inverse(self) -> Tensor:
        """The inverse of the directions' products with each other; call it inside `apart`."""
        if self._inverse is None:
            count = len(self.directions)
            self._inverse = self.directions.new_empty(count, count)
            implementation(invert, self.directions.device)(self.directions, self._inverse)
        return self._inverse

    def keep(self, directions: Tensor, digest: Tensor, inverse: Tensor | None = None) -> None:
        """Store the state after a training message."""
        for old in (self.directions, self.digest, self._inverse):
            if old is not None and old.is_cuda:
                # This stream may still read memory of another stream, whose allocator could reuse it.
                old.record_stream(torch.cuda.current_stream())
        self.directions, self.digest, self._inverse = directions, digest, inverse
        self.messages += 1


def _described(header: list[int]) -> str:
    number, before, training, own = header
    kind = {0: "evaluation", 1: "training"}.get(training, f"unknown ({training})")
    new = f"new ones {own:08x}" if own >= 0 else "new ones beyond the basis or twice in one place"
    new = "streams that end as expected" if own == BAD_STREAMS else new
    return f"{kind} message {number} after directions {before:08x} with {new}"
