"""Single messages between two ranks, what is measured with them, and values of all ranks."""

import math
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lowbit.collectives import DamagedError, PeerError
from lowbit.wire import messages as module
from lowbit.wire.messages import (
    MOST_BYTES,
    Messages,
    Trip,
    gather_json,
    gather_tensor,
    neighbours,
    round_trip,
    send_rate,
    take_rate,
)
from lowbit.wire.pytorch import default_group
from tests.damage import Flip, Replay, on_the_way
from tests.processes import Ranks, on_ranks

VALUE = {"names": ["a", "ü"], "shape": [3, 4], "none": None, "nan": float("inf")}


@pytest.mark.parametrize("checksums", [True, False])
@on_ranks
def test_what_is_sent_arrives(checksums: bool) -> None:
    messages = Messages(None, "test", timeout=10, checksums=checksums)
    numbers = torch.arange(12.0).view(3, 4)
    if messages.rank == 0:
        messages.send_json(VALUE, 1)
        sent = [messages.send(x, 1) for x in (numbers.t(), numbers[:0], numbers[:, 1][2:])]
        numbers.zero_()  # a copy travels
        for each in sent:
            each.wait()
        assert messages.receive_json(1) == VALUE
    else:
        value = messages.receive_json(0)
        arrived, nothing, last = (messages.expect(nbytes, 0) for nbytes in (48, 0, 4))
        assert nothing.wait().numel() == 0, "waited for in any order"
        assert torch.equal(arrived.wait().view(torch.float32), numbers.t().reshape(-1))
        assert last.wait().view(torch.float32) == 9
        messages.send_json(value, 0)


@pytest.mark.parametrize(("change", "number"), [(Flip(1), 1), (Replay(1, 2), 2)], ids=["changed", "twice"])
@on_ranks
def test_a_message_that_changed_or_comes_twice_names_its_sender(change: Any, number: int) -> None:
    messages = Messages(None, "saving", timeout=10)
    if messages.rank == 0:
        with on_the_way(0, change):
            for value in range(3):
                messages.send(torch.tensor([value]), 1).wait()
        return
    for value in range(number):
        assert int(messages.receive(8, 0, "weight").view(torch.int64)) == value
    said = f"^saving, weight, number {number}: the message from rank 0 is damaged: "
    with pytest.raises(DamagedError, match=said) as error:
        messages.receive(8, 0, "weight")
    assert error.value.rank == 0
    for _ in range(number + 1, 3):
        messages.receive(8, 0, "weight")


@on_ranks
def test_a_peer_that_is_silent_is_an_error_in_time() -> None:
    messages, store = Messages(None, "test", timeout=0.5), default_group().get_group_store()
    if messages.rank == 1:
        return store.wait(["said"], timedelta(seconds=30))
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"^rank 1 did not answer within 0\.5 s") as error:
        messages.receive(8, 1)
    store.set("said", "")
    assert error.value.rank == 1
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("size", "text", "said"),
    [
        (1 << 40, b"", f"announces {1 << 40} bytes of JSON; allowed: 1 to {MOST_BYTES}$"),
        (-1, b"", f"announces -1 bytes of JSON; allowed: 1 to {MOST_BYTES}$"),
        (3, b"[1,", "sent text that is not JSON: "),
        (100_000, b"[" * 100_000, "sent text that is not JSON: "),
    ],
    ids=["huge", "negative", "cut", "deep"],
)
@on_ranks
def test_what_a_peer_tells_is_read_with_care(size: int, text: bytes, said: str) -> None:
    messages = Messages(None, "test", timeout=10)
    if messages.rank == 1:
        messages.send(torch.tensor([size]), 0).wait()
        if text:
            messages.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0).wait()
        return
    with pytest.raises(ValueError, match=f"^rank 1 {said}"):
        messages.receive_json(1)


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


@pytest.mark.parametrize(
    ("trip", "rate", "seconds", "sizes"),
    [
        (0.0, 25.0, 0.0, [1 << 18, 1 << 19]),
        (0.04, 100.0, 0.0, [1 << 18, 1 << 21, 1 << 22]),
        (0.0, 50.0, 0.4, [1 << 18, 1 << 20, 1 << 20, 1 << 20]),
        (0.0, 9000.0, 0.0, [1 << 18, 1 << 24]),
    ],
)
@on_ranks
def test_messages_grow_until_their_rate_counts(trip: float, rate: float, seconds: float, sizes: list[int]) -> None:
    """On a clock that only messages of a probe move on."""
    messages, arrived, now = Messages(None, "test", timeout=60), list[int](), [0.0]
    send, expect = Messages.send, Messages.expect

    def slow(self: Messages, payload: torch.Tensor, to: int) -> Any:
        if payload.nbytes > 8:
            now[0] += trip + 8e-6 * payload.nbytes / rate
        return send(self, payload, to)

    def counted(self: Messages, nbytes: int, *args: Any) -> Any:
        arrived.append(nbytes)
        return expect(self, nbytes, *args)

    with (
        mock.patch.object(Messages, "send", slow),
        mock.patch.object(Messages, "expect", counted),
        mock.patch.object(module, "time", SimpleNamespace(perf_counter=lambda: now[0])),
    ):
        if messages.rank:
            take_rate(messages, 0)
            assert [size for size in arrived if size > 8] == sizes
        else:
            assert send_rate(messages, 1, trip=trip, seconds=seconds) == pytest.approx(rate)


def test_neighbours_measure_in_turn():
    assert neighbours(1) == []
    assert neighbours(2) == [(0, 1)]
    assert neighbours(4) == [(0, 1), (2, 3), (1, 2), (3, 0)]


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (-1, "announces a probe of -1 bytes; allowed: "),
        (1 << 40, "announces a probe of"),
        (1 << 18, "more than 2 messages"),
    ],
)
@on_ranks
def test_a_sender_that_lies_is_named(nbytes: int, said: str) -> None:
    messages = Messages(None, "test", timeout=20)
    with mock.patch.object(module, "_MOST_MESSAGES", 2):
        if messages.rank == 0:
            with pytest.raises(ValueError, match=said):
                take_rate(messages, 1)
            return
        for _ in range(2 if nbytes in module._SIZES else 1):
            messages.send(torch.tensor([nbytes]), 0).wait()
            if nbytes in module._SIZES:
                messages.receive(8, 0)
                messages.send(torch.zeros(nbytes, dtype=torch.uint8), 0).wait()
                messages.receive(8, 0)


VALUES = [
    None,
    {},
    [],
    "",
    {"name": [1, -(2**70), 0.1, 1e-310, True], "ü": {"": []}},
    [math.inf, -math.inf, 5e-324],
    "long " * 5000,
]


@on_ranks(3)
def test_values_of_any_size_and_kind_arrive_as_they_are() -> None:
    """But tuples become lists. A group may be a part."""
    rank, count = dist.get_rank(), len(VALUES)
    for i in range(count):
        assert gather_json(VALUES[(rank + i) % count]) == [VALUES[(r + i) % count] for r in range(3)]
    with pytest.raises(TypeError, match="not JSON serializable"):
        gather_json(object())
    stated = gather_json((rank, math.nan))
    assert [first for first, _ in stated] == [0, 1, 2]
    assert all(math.isnan(second) for _, second in stated)
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert gather_json("only two", pair) == ["only two"] * 2


PICKLE = b"cos\nsystem\n(S'false'\ntR."


@pytest.mark.parametrize(
    ("length", "text", "message"),
    [
        (len(PICKLE), PICKLE, "what rank 1 of the group stated is not JSON: Expecting value"),
        (4, b"\xff\xfe\x00\x01", "what rank 1 of the group stated is not JSON"),
        (40000, b"[" * 40000, "what rank 1 of the group stated is not JSON"),
        (5000, b"9" * 5000, "what rank 1 of the group stated is not JSON"),
        (2**62, b"", rf"ranks state \[14, {2**62}\] bytes; allowed: 1 to {MOST_BYTES} each"),
        (-1, b"", r"ranks state \[14, -1\] bytes"),
        (0, b"", r"ranks state \[14, 0\] bytes"),
    ],
)
@on_ranks
def test_a_peer_that_sends_something_else_is_an_error(length: int, text: bytes, message: str) -> None:
    """Rank 1 announces a length and sends a text of its own."""
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=f"^{message}"):
            gather_json({"fair": True})
        return
    sizes = torch.empty(2, dtype=torch.int64)
    module.pytorch.gather(sizes, torch.tensor([length]), dist.group.WORLD)
    longest = int(sizes.max())
    if 0 < length <= MOST_BYTES:
        sent = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        module.pytorch.gather(torch.empty(2 * longest, dtype=torch.uint8), sent, dist.group.WORLD)


@on_ranks
def test_tensors_arrive_bit_for_bit() -> None:
    x = torch.full((2, 3), math.nan if dist.get_rank() else 0.1).T
    stacked = gather_tensor(x)
    assert stacked.shape == (2, 3, 2)
    assert torch.equal(stacked[0], torch.full((3, 2), 0.1))
    assert stacked[1].isnan().all()
    assert gather_tensor(torch.empty(0)).shape == (2, 0)
