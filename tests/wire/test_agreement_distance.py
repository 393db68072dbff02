"""What agreements cost where the store is far away, in round trips."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore

from lowbit.collectives import agree
from tests.distant import distant
from tests.processes import Ranks

ROUND_TRIP = 0.1  # seconds
FACTS = {f"boundary 0 forward fact {i}": "GroupInt(bits=4, group=64)" for i in range(20)}


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    processes = Ranks(8)
    yield processes
    processes.stop()


def agrees_from_afar(near: int, far: int, times: int) -> list[float]:
    """Seconds of each agreement on this rank; all ranks but the first are far from the store."""
    port = far if dist.get_rank() else near
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    own, taken = PrefixStore("group", store), []
    with mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=own):
        for _ in range(times):
            dist.barrier()
            start = time.monotonic()
            agree(None, FACTS, 30.0)
            taken.append(time.monotonic() - start)
    return taken


def test_an_agreement_takes_at_most_three_round_trips_whatever_the_number_of_ranks(eight: Ranks):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with distant(store.port, ROUND_TRIP / 2) as port:
        taken = eight.run(agrees_from_afar, store.port, port, 4, ranks=8)
    slowest = [max(seconds) for seconds in zip(*taken, strict=True)]
    # Not less than one, or there was no distance. The machine may be busy now and then, but not always.
    assert ROUND_TRIP <= min(slowest) <= 3.3 * ROUND_TRIP
