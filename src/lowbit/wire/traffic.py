"""Counts of what a stage sent, and of the time and memory that it took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from lowbit.wire.trace import Trace

_holding = threading.Lock()  # other threads release messages, too


@dataclass
class Traffic:
    """Counts of what one stage sends to neighbours on other ranks, since the start or since `reset`.

    Attributes:
        forward_bytes: bytes of activations sent to the next stage, as they travel, with their checksums.
        forward_elements: elements of the tensors in them.
        backward_bytes: bytes of gradients sent to the previous stage.
        backward_elements: elements of the tensors in them.
        announced_bytes: that the first stage sends to all other ranks at the start of each pass after the first.
        codec_seconds: spent encoding what was sent and decoding what was received (on GPUs: launching that).
        checksum_seconds: spent on checksums, by the thread that runs the schedule (on GPUs with NCCL: launching that).
        wait_seconds: spent blocked until something expected had arrived, or, at the end of a step, until what was sent
            had left (the last stage of a rank to finish waits for all of them).
        peak_bytes: most bytes of messages, with their checksums, that the stage's transport held at once, counted from
            `held_bytes` on. On the host with Gloo, on the device with NCCL.
        held_bytes: of those, held now. A message to receive is held from when its receive is posted until it is
            decoded; one to send, until its peer has it and the transport has released it.
        trace: gets what is timed as spans, if it is set.
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
        self.trace: Trace | None = None  # no field: it is no count

    @contextlib.contextmanager
    def timing(self, name: str, span: str = "", **about: Any) -> Iterator[None]:
        """Add the seconds that a block takes to the count of this name, and to the trace what it did.

        Args:
            name: of the count, such as "wait_seconds".
            span: name in the trace; absent: "wait" for "wait_seconds".
            about: what it concerns, for the trace.
        """
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
        """Count from zero again, and the peak from what is held now."""
        with _holding:
            for field in fields(self):
                if field.name != "held_bytes":
                    setattr(self, field.name, field.default)
            self.peak_bytes = self.held_bytes

    def hold(self, nbytes: int) -> None:
        """Add to the bytes held (subtract, if negative); from any thread."""
        with _holding:
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def count(self, direction: str, nbytes: int, elements: int) -> None:
        """Count a message that was sent "forward" or "backward"."""
        for name, more in ((f"{direction}_bytes", nbytes), (f"{direction}_elements", elements)):
            setattr(self, name, getattr(self, name) + more)
