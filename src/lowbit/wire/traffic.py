"""Counters of what a stage sent, and of the time and memory it took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from lowbit.wire.trace import Trace

_holding = threading.Lock()  # the outbox's thread also releases messages


@dataclass
class Traffic:
    """Counts of what one stage sends to neighbours on other ranks, since the start or since `reset`.

    Attributes:
        forward_bytes: bytes of activations sent to the next stage, as they travel, with their checksums.
        forward_elements: elements of the tensors in them.
        backward_bytes: bytes of gradients sent to the previous stage.
        backward_elements: elements of the tensors in them.
        announced_bytes: bytes that the first stage sends to all other ranks at the start of each pass after the first.
        codec_seconds: time spent encoding and decoding messages (on GPUs: launching the kernels).
        checksum_seconds: time that the schedule's thread spent on checksums (on GPUs with NCCL: launching kernels).
        wait_seconds: time spent blocked until an expected message had arrived or, at the end of a step, until all sends
            had finished (the last stage of a rank to finish waits for those of all its stages).
        peak_bytes: most bytes of messages, with their checksums, that the stage's transport held at once, counted from
            `held_bytes` on. On the host with Gloo, on the device with NCCL.
        held_bytes: bytes held now. A message to receive is held from the posting of its receive until it is decoded; a
            message to send, until its peer has it and the transport has released it.
        trace: if set, also records what is timed as spans.
    """

    forward_bytes: int = 0
    forward_elements: int = 0
    backward_bytes: int = 0
    backward_elements: int = 0
    announced_bytes: int = 0
    codec_seconds: float = 0.0
    checksum_seconds: float = 0.0
    wait_seconds: float = 0.0
    peak_bytes: int = 0
    held_bytes: int = 0

    def __post_init__(self) -> None:
        self.trace: Trace | None = None  # not a dataclass field: `reset` sets all fields

    @contextlib.contextmanager
    def timing(self, name: str, span: str = "", **about: Any) -> Iterator[None]:
        """Add a block's seconds to the counter `name`, and a span (named "wait" for "wait_seconds") to the trace."""
        start = time.perf_counter_ns()
        yield
        end = time.perf_counter_ns()
        setattr(self, name, getattr(self, name) + (end - start) / 1e9)
        if self.trace is not None:
            self.trace.add(span or name.removesuffix("_seconds"), start, end, **about)

    @property
    def forward_bits(self) -> float:
        """Bits per element forward, every byte counted (0 if nothing was sent)."""
        return 8 * self.forward_bytes / self.forward_elements if self.forward_elements else 0.0

    @property
    def backward_bits(self) -> float:
        """Bits per element backward, every byte counted (0 if nothing was sent)."""
        return 8 * self.backward_bytes / self.backward_elements if self.backward_elements else 0.0

    def reset(self) -> None:
        """Set all counters to zero, and the peak to what is held now."""
        with _holding:
            for field in fields(self):
                if field.name != "held_bytes":
                    setattr(self, field.name, field.default)
            self.peak_bytes = self.held_bytes

    def hold(self, nbytes: int) -> None:
        """Add `nbytes` (may be negative) to the bytes held; thread-safe."""
        with _holding:
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def count(self, direction: str, nbytes: int, elements: int) -> None:
        """Count a message that was sent "forward" or "backward"."""
        for name, more in ((f"{direction}_bytes", nbytes), (f"{direction}_elements", elements)):
            setattr(self, name, getattr(self, name) + more)


_lock = threading.Lock()
_sent: Counter[str] = Counter()


def note_sent(purpose: str, nbytes: int) -> None:
    """Count bytes handed to a process group; thread-safe."""
    with _lock:
        _sent[purpose] += nbytes


def sent_so_far() -> Counter[str]:
    """Return bytes by purpose since the process began; subtract an earlier result to get those of one run."""
    with _lock:
        return Counter(_sent)
