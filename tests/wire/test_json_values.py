"""Values and tensors of all ranks, and what a peer that sends something else comes to."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowbit.wire import json_values
from lowbit.wire.json_values import MOST_BYTES, gather_json, gather_tensor
from tests.processes import Ranks, on_ranks

VALUES = [
    None,
    {},
    [],
    "",
    {"name": [1, -(2**70), 0.1, 1e-310, True], "ü": {"": []}},
    [math.inf, -math.inf, 5e-324],
    "long " * 5000,
]


def states(count: int) -> Any:
    rank = dist.get_rank()
    return [gather_json(VALUES[(rank + i) % len(VALUES)]) for i in range(count)]


@pytest.mark.parametrize("size", [2, 3])
def test_values_of_any_size_and_kind_arrive_as_they_are(ranks: Ranks, size: int):
    expected = [[VALUES[(rank + i) % len(VALUES)] for rank in range(size)] for i in range(7)]
    assert ranks.run(states, 7, ranks=size) == [expected] * size


@on_ranks(3)
def test_nan_arrives_tuples_become_lists_and_a_group_may_be_a_part() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        gather_json(object())
    stated = gather_json((dist.get_rank(), math.nan))
    assert [first for first, _ in stated] == [0, 1, 2]
    assert all(math.isnan(second) for _, second in stated)
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert gather_json("only two", pair) == ["only two"] * 2


def hostile(length: int, text: bytes) -> str:
    """Rank 1 announces a length and sends a text of its own; what rank 0 says of it."""
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="rank") as caught:
            gather_json({"fair": True})
        return str(caught.value)
    sizes = torch.empty(2, dtype=torch.int64)
    json_values.pytorch.gather(sizes, torch.tensor([length]), dist.group.WORLD)
    longest = int(sizes.max())
    if 0 < length <= MOST_BYTES:
        message = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        json_values.pytorch.gather(torch.empty(2 * longest, dtype=torch.uint8), message, dist.group.WORLD)
    return ""


PICKLE = b"cos\nsystem\n(S'false'\ntR."


@pytest.mark.parametrize(
    ("length", "text", "message"),
    [
        (len(PICKLE), PICKLE, "what rank 1 of the group stated is not JSON: Expecting value"),
        (4, b"\xff\xfe\x00\x01", "what rank 1 of the group stated is not JSON"),
        (40000, b"[" * 40000, "what rank 1 of the group stated is not JSON"),
        (5000, b"9" * 5000, "what rank 1 of the group stated is not JSON"),
        (2**62, b"", f"ranks state [14, {2**62}] bytes; allowed: 1 to {MOST_BYTES} each"),
        (-1, b"", "ranks state [14, -1] bytes"),
        (0, b"", "ranks state [14, 0] bytes"),
    ],
)
def test_a_peer_that_sends_something_else_is_an_error(ranks: Ranks, length: int, text: bytes, message: str):
    assert ranks.run(hostile, length, text)[0].startswith(message)


@on_ranks
def test_tensors_arrive_bit_for_bit() -> None:
    x = torch.full((2, 3), math.nan if dist.get_rank() else 0.1).T
    stacked = gather_tensor(x)
    assert stacked.shape == (2, 3, 2)
    assert torch.equal(stacked[0], torch.full((3, 2), 0.1))
    assert stacked[1].isnan().all()
    assert gather_tensor(torch.empty(0)).shape == (2, 0)
