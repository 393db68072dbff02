"""Counters of what a stage sent, and of the time and memory it took; and the trace of a rank: when it did what."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

_lock = threading.Lock()  # the outbox's thread also releases messages
_sent: Counter[str] = Counter()
_PASSES = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}


class Span(NamedTuple):
    """A timed interval, in nanoseconds of `time.perf_counter_ns`, with details such as {"micro_batch": 0}.

    `name`: "forward", "backward", "weight", "encode", "decode", "checksum", "wait" or "send"; others from a trainer.
    `peer`: the rank, within the group, that a message is sent to; None for spans of the rank's own thread, which are
    nested or follow each other.
    """

    name: str
    peer: int | None
    begin: int
    end: int
    about: dict[str, Any]


class Trace:
    """Spans of the stages that have this object as `traffic.trace`, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._left: dict[int, int] = {}  # when the last send to each peer finished

    def add(self, name: str, begin: int, end: int, **about: Any) -> None:
        self.spans.append(Span(name, None, begin, end, about))

    def add_sent(self, peer: int, begin: int, end: int, nbytes: int) -> None:
        """Add a message that was queued at `begin` and sent by `end`; messages to a peer are sent in order."""
        first = min(end, max(begin, self._left.get(peer, begin)))
        self._left[peer] = end
        self.spans.append(Span("send", peer, first, end, {"bytes": nbytes, "queued_us": (first - begin) / 1e3}))

    @contextmanager
    def passes(self, stage: Any) -> Iterator[None]:
        """Record the forward and backward passes of a pipeline stage while the block runs."""

        def traced(function: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
            begin, chunk = time.perf_counter_ns(), args[0] if args else None
            result = function(*args, **kwargs)
            self.add(name, begin, time.perf_counter_ns(), stage=stage.stage_index, micro_batch=chunk)
            return result

        before = {name: vars(stage).get(name) for name in _PASSES}
        for method, name in _PASSES.items():
            setattr(stage, method, partial(traced, getattr(stage, method), name))
        try:
            yield
        finally:
            for method, own in before.items():
                # An instance's attribute hides the method of its class, which is back once that is deleted.
                delattr(stage, method) if own is None else setattr(stage, method, own)


@contextmanager
def span(trace: Trace | None, name: str, **about: Any) -> Iterator[None]:
    """Record the block in `trace`, if there is one."""
    begin = time.perf_counter_ns()
    yield
    if trace is not None:
        trace.add(name, begin, time.perf_counter_ns(), **about)


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
        checksum_seconds: time that the schedule's thread spent on checksums.
        wait_seconds: time spent blocked until an expected message had arrived or, at the end of a step, until all sends
            had finished (the last stage of a rank to finish waits for those of all its stages).
        peak_bytes: most bytes of messages, with their checksums, that the stage's transport held at once, counted from
            `held_bytes` on; on the host.
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

    @contextmanager
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
        with _lock:
            for field in fields(self):
                if field.name != "held_bytes":
                    setattr(self, field.name, field.default)
            self.peak_bytes = self.held_bytes

    def hold(self, nbytes: int) -> None:
        """Add `nbytes` (may be negative) to the bytes held; thread-safe."""
        with _lock:
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def count(self, direction: str, nbytes: int, elements: int) -> None:
        """Count a message that was sent "forward" or "backward"."""
        for name, more in ((f"{direction}_bytes", nbytes), (f"{direction}_elements", elements)):
            setattr(self, name, getattr(self, name) + more)


def note_sent(purpose: str, nbytes: int) -> None:
    """Count bytes handed to a process group; thread-safe."""
    with _lock:
        _sent[purpose] += nbytes


def sent_so_far() -> Counter[str]:
    """Return bytes by purpose since the process began; subtract an earlier result to get those of one run."""
    with _lock:
        return Counter(_sent)
