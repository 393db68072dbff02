"""Lanes of an exchange between real ranks, below any sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lowbit.collectives.calls import CollectiveCall, Transport, queue_of
from lowbit.collectives.exchange import PayloadExchange
from lowbit.wire.groups import default_group
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
