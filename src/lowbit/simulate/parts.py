"""The inputs of a simulation: stages and the network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A link in one direction, or both directions of a half-duplex link: it carries one message at a time.

    Args:
        bytes_per_second: rate of payloads; infinite by default.
        latency: seconds from the end of sending to the receiver.

    Raises:
        ValueError: a rate that is not positive, or a negative latency.
    """

    bytes_per_second: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {self.bytes_per_second}; allowed: more than 0")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is {self.latency}; allowed: at least 0 and finite")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds and bytes of one micro-batch on a stage.

    Args:
        forward, backward: seconds of computing. The two passes of a split backward take half of it each.
        encode_forward: encoding activations for the next stage. decode_forward: decoding those of the previous one.
        encode_backward: encoding gradients for the previous stage. decode_backward: decoding those of the next one.
        forward_bytes, backward_bytes: of the messages that this stage sends.

    Raises:
        ValueError: a value that is negative or not finite.
    """

    forward: float
    backward: float
    encode_forward: float = 0.0
    decode_forward: float = 0.0
    encode_backward: float = 0.0
    decode_backward: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= (value := getattr(self, field.name)) < math.inf:
                raise ValueError(f"{field.name} is {value}; allowed: at least 0 and finite")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The channels between ranks.

    Args:
        channels: all of them. A channel that several pairs of ranks use is shared; one that both directions of a pair
            use is half-duplex.
        routes: index of the channel by (sender, receiver). Ranks that exchange activations need one. The metrics sent
            at the end of a step use it, too; without one they take the longest latency of any channel.
    """

    channels: Sequence[Channel]
    routes: Mapping[tuple[int, int], int]
