"""Lanes of an exchange between real ranks, below any sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lowbit.collectives.calls import CollectiveCall, Transport, queue_of
from lowbit.collectives.exchange import PayloadExchange, Scratch
from lowbit.wire.pytorch import default_group
from tests.processes import Ranks


def crossed(sizes: list[list[int]], transport: Transport) -> None:
    """Rank s sends `sizes[s][r]` bytes to rank r."""
    group, rank = default_group(), dist.get_rank()
    incoming, taken = [row[rank] for row in sizes], []

    def work(exchange: PayloadExchange) -> None:
        exchange.open(0, incoming, sizes[rank])
        for to in range(exchange.ranks):
            exchange.box(0, to).fill_(10 * rank + to)
            exchange.send(0, to)
        taken.extend(exchange.take(0, source).tolist() for source in range(exchange.ranks))

    facts = {"collective": "crossing", "sizes": str(sizes)}
    call = CollectiveCall(
        facts=facts, group=group, device=torch.device("cpu"), timeout=20, work=work, transport=transport
    )
    queue_of(group).submit(call).wait()
    assert taken == [[10 * source + rank] * size for source, size in enumerate(incoming)]


@pytest.mark.parametrize("transport", ["messages", "collectives"])
def test_what_is_taken_from_a_lane_without_bytes_is_empty(ranks: Ranks, transport: Transport):
    ranks.run(crossed, [[0, 0], [0, 0]], transport)


def test_messages_to_each_rank_may_have_any_size(ranks: Ranks):
    ranks.run(crossed, [[3, 500, 0], [0, 7, 2], [40, 0, 0]], "messages", ranks=3)


# Memory for payloads.

CPU = torch.device("cpu")
MB = 1 << 20


def take_all(scratch: Scratch, sizes: list[int]) -> None:
    """One call's payloads: each has its own memory."""
    taken = [scratch.take(size, CPU) for size in sizes]
    for i, payload in enumerate(taken):
        assert payload.numel() == sizes[i]
        assert payload.data_ptr() % 64 == 0
        payload.fill_(i)
    for i, payload in enumerate(taken):
        assert bool((payload == i).all())
    scratch.reset()


def test_as_much_is_held_as_the_largest_call_needed() -> None:
    scratch = Scratch()
    for sizes in ([3 * MB, 5], [2 * MB, 2 * MB, 2 * MB], [5 * MB, 1], [100] * 50, [0], [6 * MB]):
        take_all(scratch, sizes)
    take_all(scratch, [2 * MB, 2 * MB, 2 * MB])
    assert 6 * MB <= scratch.nbytes() <= 6 * MB + 64
    held = scratch.take(MB, CPU).data_ptr()
    scratch.reset()
    assert scratch.take(2 * MB, CPU).data_ptr() == held, "no fresh pages"
