"""Measure round trip, clock offset and rate of the link between two ranks, with the process group's own messages.

For `round_trip`, both ranks of a pair call the same function. Errors are those of `Messages`.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from lowbit.wire.messages import Messages

_PINGS = 9
_NUMBER_BYTES = 8
_SIZES = tuple(1 << n for n in range(18, 25))
_ENOUGH_SECONDS = 0.15  # a message must take as long as this for its rate to count
_ENOUGH_TRIPS = 8  # and this many round trips: TCP needs several before it uses the whole link
_MOST_MESSAGES = 1 << 16  # in one probe, so that it ends whatever the sender does


class Trip(NamedTuple):
    """Outcome of `round_trip`, the same on both ranks: the median round trip, and the clocks' offset.

    `offset`: nanoseconds to add to the higher rank's clock to get the lower rank's, within `error`.
    """

    seconds: float
    offset: int
    error: int


def neighbours(ranks: int) -> list[tuple[int, int]]:
    """Return pairs of each rank and the next (rank 0 after the last), ordered so that many can measure at a time."""
    pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks if ranks > 2 else ranks - 1)]
    return sorted(pairs, key=lambda pair: pair[0] % 2)


def round_trip(messages: Messages, peer: int, clock: Callable[[], int] = time.perf_counter_ns) -> Trip:
    """Exchange nine 8-byte messages with another rank. clock: in nanoseconds; its offset is measured."""
    # One extra for warm-up, which does not count: the peer may not have posted its receives yet.
    arriving = [messages.expect(_NUMBER_BYTES, peer, "ping") for _ in range(_PINGS + 1)]
    if messages.rank > peer:
        outcome = messages.expect(3 * _NUMBER_BYTES, peer, "round trip")
        for message in arriving:
            message.wait()
            messages.send(torch.tensor([clock()]), peer).wait()
        trip, offset, error = outcome.wait().view(torch.int64).tolist()
        return Trip(trip / 1e9, offset, error)
    trips: list[tuple[int, int]] = []
    for message in arriving:
        begin = clock()
        sent = messages.send(torch.tensor([0]), peer)
        theirs = int(message.wait().view(torch.int64))
        trip = clock() - begin
        sent.wait()
        trips.append((trip, begin + trip // 2 - theirs))
    median = int(statistics.median(trip for trip, _ in trips[1:]))
    shortest, offset = min(trips)
    messages.send(torch.tensor([median, offset, shortest // 2]), peer).wait()
    return Trip(median / 1e9, offset, shortest // 2)


def send_rate(messages: Messages, peer: int, *, trip: float = 0.0, seconds: float = 0.0) -> float:
    """Measure Mbit/s to another rank, which calls `take_rate`.

    Messages grow until one takes 0.15 s and eight round trips, or has 16 MiB. That size is repeated for `seconds`. A
    message's time is measured from its start until the peer's answer arrives, minus one round trip (`trip` seconds).
    """
    step, nbytes, elapsed = 0, 0, 0.0
    while nbytes == 0 or elapsed < seconds:
        ready = messages.expect(_NUMBER_BYTES, peer, "probe")
        answer = messages.expect(_NUMBER_BYTES, peer, "probe")
        messages.send(torch.tensor([_SIZES[step]]), peer).wait()
        payload = torch.zeros(_SIZES[step], dtype=torch.uint8)
        ready.wait()  # the peer has posted its receive
        begin = time.perf_counter()
        sent = messages.send(payload, peer)
        answer.wait()
        took = time.perf_counter() - begin
        sent.wait()
        enough = max(_ENOUGH_SECONDS, _ENOUGH_TRIPS * trip)
        if took < enough and step < len(_SIZES) - 1:
            wanted = bisect.bisect_left(_SIZES, _SIZES[step] * enough / max(took, 1e-9))
            step = min(max(step + 1, wanted), len(_SIZES) - 1)
        else:
            nbytes, elapsed = nbytes + _SIZES[step], elapsed + max(took - trip, took / 2)
    messages.send(torch.tensor([0]), peer).wait()
    return 8 * nbytes / elapsed / 1e6


def take_rate(messages: Messages, peer: int) -> None:
    """Receive what another rank sends in `send_rate`; ValueError for a size that probes do not use, or too many."""
    for _ in range(_MOST_MESSAGES):
        nbytes = int(messages.receive(_NUMBER_BYTES, peer, "probe").view(torch.int64))
        if not nbytes:
            return
        if nbytes not in _SIZES:
            raise ValueError(f"rank {peer} announces a probe of {nbytes} bytes; allowed: {_SIZES}")
        arriving = messages.expect(nbytes, peer, "probe")
        messages.send(torch.tensor([1]), peer).wait()
        arriving.wait()
        messages.send(torch.tensor([1]), peer).wait()
    raise ValueError(f"rank {peer} sends a probe of more than {_MOST_MESSAGES} messages")
