"""What is measured of the link between two ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lowbit.wire import probe
from lowbit.wire.messages import Messages
from lowbit.wire.probe import Trip, neighbours, round_trip, send_rate, take_rate
from tests.processes import Ranks

DELAY = 0.04  # seconds that a message takes longer
AHEAD = 7_000_000_000  # nanoseconds of rank 1's clock


def _trip() -> Trip:
    messages, send = Messages(None, "test", timeout=20), Messages.send

    def late(*args: Any) -> Any:
        time.sleep(DELAY)
        return send(*args)

    with mock.patch.object(Messages, "send", late):
        return round_trip(messages, 1 - messages.rank, lambda: time.time_ns() + AHEAD * messages.rank)


def test_both_ranks_learn_the_round_trip_and_the_offset_of_their_clocks(ranks: Ranks):
    first, second = ranks.run(_trip)
    assert first == second
    assert first.seconds >= 2 * DELAY
    assert abs(first.offset + AHEAD) <= first.error
    assert first.error >= 1e9 * DELAY


def _rate(trip: float, rate: float, seconds: float) -> tuple[float | None, list[int]]:
    """The rate that is measured, and the sizes of what arrives, on a clock that only messages of a probe move on."""
    messages, sizes, now = Messages(None, "test", timeout=60), list[int](), [0.0]
    send, expect = Messages.send, Messages.expect

    def slow(self: Messages, payload: torch.Tensor, to: int) -> Any:
        if payload.nbytes > 8:
            now[0] += trip + 8e-6 * payload.nbytes / rate
        return send(self, payload, to)

    def counted(self: Messages, nbytes: int, *args: Any) -> Any:
        sizes.append(nbytes)
        return expect(self, nbytes, *args)

    with (
        mock.patch.object(Messages, "send", slow),
        mock.patch.object(Messages, "expect", counted),
        mock.patch.object(probe, "time", SimpleNamespace(perf_counter=lambda: now[0])),
    ):
        if messages.rank:
            take_rate(messages, 0)
            return None, [size for size in sizes if size > 8]
        return send_rate(messages, 1, trip=trip, seconds=seconds), []


@pytest.mark.parametrize(
    ("trip", "rate", "seconds", "sizes"),
    [
        (0.0, 25.0, 0.0, [1 << 18, 1 << 19]),
        (0.04, 100.0, 0.0, [1 << 18, 1 << 21, 1 << 22]),
        (0.0, 50.0, 0.4, [1 << 18, 1 << 20, 1 << 20, 1 << 20]),
        (0.0, 9000.0, 0.0, [1 << 18, 1 << 24]),
    ],
)
def test_messages_grow_until_their_rate_counts(
    ranks: Ranks, trip: float, rate: float, seconds: float, sizes: list[int]
):
    (found, _), (_, arrived) = ranks.run(_rate, trip, rate, seconds)
    assert arrived == sizes
    assert found == pytest.approx(rate)


def test_neighbours_measure_in_turn():
    assert neighbours(1) == []
    assert neighbours(2) == [(0, 1)]
    assert neighbours(4) == [(0, 1), (2, 3), (1, 2), (3, 0)]


def _lies(nbytes: int) -> str:
    messages = Messages(None, "test", timeout=20)
    with mock.patch.object(probe, "_MOST_MESSAGES", 2):
        if messages.rank:
            for _ in range(2 if nbytes in probe._SIZES else 1):
                messages.send(torch.tensor([nbytes]), 0).wait()
                if nbytes in probe._SIZES:
                    messages.receive(8, 0)
                    messages.send(torch.zeros(nbytes, dtype=torch.uint8), 0).wait()
                    messages.receive(8, 0)
            return ""
        try:
            take_rate(messages, 1)
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (-1, "announces a probe of -1 bytes; allowed: "),
        (1 << 40, "announces a probe of"),
        (1 << 18, "more than 2 messages"),
    ],
)
def test_a_sender_that_lies_is_named(ranks: Ranks, nbytes: int, said: str):
    assert said in ranks.run(_lies, nbytes)[0]
