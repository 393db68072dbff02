"""Trace of one rank: when it computed, coded, sent and waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

_PASSES = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}
_NOTHING = nullcontext()


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        name: "forward", "backward", "weight", "encode", "decode", "checksum", "wait" or "send"; others from a trainer.
        peer: the rank, within the group, that a message is sent to; None for what the rank's own thread does, whose
            spans lie one inside another or one after another.
        begin, end: nanoseconds of `time.perf_counter_ns`.
        about: what it concerns, such as {"micro_batch": 0}.
    """

    name: str
    peer: int | None
    begin: int
    end: int
    about: dict[str, Any]


class Trace:
    """Spans of the stages whose `traffic.trace` this is, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._left: dict[int, int] = {}  # when the last message to a peer had left

    def add(self, name: str, begin: int, end: int, **about: Any) -> None:
        """Add a span of the rank's own thread."""
        self.spans.append(Span(name, None, begin, end, about))

    def add_sent(self, peer: int, begin: int, end: int, nbytes: int) -> None:
        """Add a message that was handed over at `begin` and had left at `end`; messages to a peer leave in order."""
        first = min(end, max(begin, self._left.get(peer, begin)))
        self._left[peer] = end
        self.spans.append(Span("send", peer, first, end, {"bytes": nbytes, "queued_us": (first - begin) / 1e3}))

    @contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        """Add the block as a span."""
        begin = time.perf_counter_ns()
        yield
        self.add(name, begin, time.perf_counter_ns(), **about)

    @contextmanager
    def passes(self, stage: Any) -> Iterator[None]:
        """Add the forward and backward passes of a pipeline stage while the block runs."""
        before = {name: vars(stage).get(name) for name in _PASSES}
        for method, name in _PASSES.items():
            setattr(stage, method, self._traced(getattr(stage, method), name, stage.stage_index))
        try:
            yield
        finally:
            for method, own in before.items():
                delattr(stage, method) if own is None else setattr(stage, method, own)

    def _traced(self, function: Callable[..., Any], name: str, stage: int) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            result = function(*args, **kwargs)
            self.add(name, begin, time.perf_counter_ns(), stage=stage, micro_batch=args[0] if args else None)
            return result

        return traced


def span(trace: Trace | None, name: str, **about: Any) -> AbstractContextManager[None]:
    """A block that is a span of `trace`, if there is one."""
    return _NOTHING if trace is None else trace.span(name, **about)
