"""Trace of one rank: when it computed, encoded or decoded, sent and waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

_PASSES = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weight"}
_NOTHING = nullcontext()


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
        """Add a span of the rank's own thread."""
        self.spans.append(Span(name, None, begin, end, about))

    def add_sent(self, peer: int, begin: int, end: int, nbytes: int) -> None:
        """Add a message that was queued at `begin` and sent by `end`; messages to a peer are sent in order."""
        first = min(end, max(begin, self._left.get(peer, begin)))
        self._left[peer] = end
        self.spans.append(Span("send", peer, first, end, {"bytes": nbytes, "queued_us": (first - begin) / 1e3}))

    @contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        begin = time.perf_counter_ns()
        yield
        self.add(name, begin, time.perf_counter_ns(), **about)

    @contextmanager
    def passes(self, stage: Any) -> Iterator[None]:
        """Record the forward and backward passes of a pipeline stage while the block runs."""
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
    """Context manager that records its block in `trace`; does nothing if `trace` is None."""
    return _NOTHING if trace is None else trace.span(name, **about)
