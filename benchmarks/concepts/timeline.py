"""When two stages compute, send and wait in one GPipe step: the rules of docs/concepts/pipelines-and-links.md.

A stage computes one micro-batch after the other, first all forward, then all backward. A link carries one message at a
time in each direction. A message leaves as soon as it is ready, its receiver has posted the receive, and the link is
free; posting it takes half a round trip to reach the sender, the message as long to reach the receiver. PyTorch's
stage posts a receive when it needs the message, `LowBitStage` posts all of them ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["stage 0", "activations", "gradients", "stage 1"]
LANES: tuple[Lane, ...] = ("stage 0", "activations", "gradients", "stage 1")
TCP_SHARE = 0.956
"""Share of a link's bits that TCP carries as payload; the rest are headers (docs/how-to/links.md)."""


@dataclass(frozen=True)
class Interval:
    """A time in which a stage computes or a link carries a message.

    Args:
        lane: a stage, which computes, or a direction of the link, which carries a message.
        pass_: forward or backward.
        micro_batch: its number.
        start, end: seconds from the beginning of the step.
    """

    lane: Lane
    pass_: Literal["forward", "backward"]
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class TwoStageStep:
    """A step of two stages, with its times in seconds.

    Args:
        forward, backward: computing one micro-batch on one stage.
        activations, gradients: one message on the link.
        micro_batches: in the step.
        ahead: receives are posted ahead.
        one_way: half a round trip.
    """

    forward: float
    backward: float
    activations: float
    gradients: float
    micro_batches: int = 4
    ahead: bool = True
    one_way: float = 0.0

    def spans(self) -> list[Interval]:
        """Return all intervals, in the order of the rules."""
        n, spans = self.micro_batches, list[Interval]()
        spans += [Interval("stage 0", "forward", i, i * self.forward, (i + 1) * self.forward) for i in range(n)]
        ready = [span.end for span in spans]
        there = self._cross(spans, "activations", "forward", ready, after=0.0)
        last = there[-1].end
        ready = []
        for i in range(n):
            start = max(last, ready[-1]) if ready else last
            ready.append(start + self.backward)
            spans.append(Interval("stage 1", "backward", i, start, ready[-1]))
        # PyTorch's first stage waits for its sends before it asks for gradients.
        sent = max(span.end for span in spans if span.lane == "activations")
        self._cross(spans, "gradients", "backward", ready, after=sent)
        return spans

    def seconds(self) -> float:
        """Return the seconds from the first forward pass to the end of the last backward pass."""
        return max(span.end for span in self.spans())

    def _cross(
        self, spans: list[Interval], lane: Lane, pass_: Literal["forward", "backward"], ready: list[float], after: float
    ) -> list[Interval]:
        """Send a message for each micro-batch that becomes ready, and compute with it; return the computing."""
        message, compute = (self.activations, self.forward) if pass_ == "forward" else (self.gradients, self.backward)
        receiver: Lane = "stage 1" if pass_ == "forward" else "stage 0"
        free, idle, computed = 0.0, after, list[Interval]()
        for i, moment in enumerate(ready):
            posted = 0.0 if self.ahead else idle + self.one_way
            start = max(moment, free, posted)
            free = start + message
            spans.append(Interval(lane, pass_, i, start, free))
            begin = max(free + self.one_way, idle)
            idle = begin + compute
            computed.append(Interval(receiver, pass_, i, begin, idle))
        spans += computed
        return computed


def message_seconds(tokens: int, channels: int, bits: float, mbit: float) -> float:
    """Return the seconds of one message of `tokens` tokens in `bits` bits per element, on a link of `mbit` Mbit/s."""
    return tokens * channels * bits / (mbit * 1e6 * TCP_SHARE)
