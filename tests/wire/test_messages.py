"""Single messages between two ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowbit.collectives import DamagedError, PeerError
from lowbit.wire import messages as module
from lowbit.wire.messages import Messages
from tests.damage import Flip, Replay, on_the_way
from tests.processes import Ranks

VALUE = {"names": ["a", "ü"], "shape": [3, 4], "none": None, "nan": float("inf")}


def carried(checksums: bool) -> Any:
    messages = Messages(None, "test", timeout=10, checksums=checksums)
    if messages.rank == 0:
        messages.send_json(VALUE, 1)
        numbers = torch.arange(12.0).view(3, 4)
        sent = [messages.send(numbers.t(), 1), messages.send(numbers[:0], 1)]
        numbers.zero_()  # a copy travels
        for each in sent:
            each.wait()
        return messages.receive_json(1)
    value = messages.receive_json(0)
    numbers, nothing = messages.expect(48, 0), messages.expect(0, 0)
    assert nothing.wait().numel() == 0, "waited for in any order"
    transposed = torch.arange(12.0).view(3, 4).t().reshape(-1)
    assert torch.equal(numbers.wait().view(torch.float32), transposed)
    messages.send_json(value, 0)
    return value


@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_sent_arrives(ranks: Ranks, checksums: bool):
    assert ranks.run(carried, checksums) == [VALUE, VALUE]


def changed(change: Any) -> tuple[str, int]:
    messages = Messages(None, "saving", timeout=10)
    if messages.rank == 0:
        with on_the_way(0, change):
            for value in range(3):
                messages.send(torch.tensor([value]), 1).wait()
        return "", -1
    try:
        for value in range(3):
            assert int(messages.receive(8, 0, "weight").view(torch.int64)) == value
    except DamagedError as error:
        return str(error), error.rank
    finally:
        for _ in range(1 if isinstance(change, Flip) else 0):
            messages.receive(8, 0, "weight")
    return "", -1


@pytest.mark.parametrize(("change", "number"), [(Flip(1), 1), (Replay(1, 2), 2)], ids=["changed", "twice"])
def test_a_message_that_changed_or_comes_twice_names_its_sender(ranks: Ranks, change: Any, number: int):
    text, culprit = ranks.run(changed, change)[1]
    assert text.startswith(f"saving, weight, number {number}: the message from rank 0 is damaged: ")
    assert culprit == 0


def silent() -> tuple[str, int, float]:
    messages = Messages(None, "test", timeout=2)
    if messages.rank == 1:
        time.sleep(4)
        return "", -1, 0
    start = time.monotonic()
    with pytest.raises(PeerError) as error:
        messages.receive(8, 1)
    return str(error.value), error.value.rank, time.monotonic() - start


def test_a_peer_that_is_silent_is_an_error_in_time(ranks: Ranks):
    text, culprit, seconds = ranks.run(silent)[0]
    assert text.startswith("rank 1 did not answer within 2 s")
    assert culprit == 1
    assert seconds < 3.5


def told(size: int, text: bytes) -> str:
    """What a rank says about JSON that is none, or that would take too much memory."""
    messages = Messages(None, "test", timeout=10)
    if dist.get_rank() == 1:
        messages.send(torch.tensor([size]), 0).wait()
        if text:
            messages.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0).wait()
        return ""
    with pytest.raises(ValueError, match="JSON") as error:
        messages.receive_json(1)
    return str(error.value)


def test_what_a_peer_tells_is_read_with_care(ranks: Ranks):
    limit = f"allowed: 1 to {module.MOST_BYTES}"
    assert ranks.run(told, 1 << 40, b"")[0] == f"rank 1 announces {1 << 40} bytes of JSON; {limit}"
    assert ranks.run(told, -1, b"")[0] == f"rank 1 announces -1 bytes of JSON; {limit}"
    assert ranks.run(told, 3, b"[1,")[0].startswith("rank 1 sent text that is not JSON: ")
    deep = b"[" * 100_000
    assert ranks.run(told, len(deep), deep)[0].startswith("rank 1 sent text that is not JSON: ")
