"""Messages with tags and early, or in the schedule's order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowbit.codecs import GroupInt
from lowbit.collectives.agreement import default_group
from lowbit.collectives.checksum import Checksums
from lowbit.collectives.failure import FailureBoard
from lowbit.pipeline import LowBitStage, Traffic
from lowbit.pipeline import stage as stage_module
from lowbit.pipeline import transport as transport_module
from lowbit.pipeline.transport import Early, InOrder, Route, choose
from tests.pipeline import toy
from tests.ranks import Ranks

INT4 = GroupInt(bits=4, group=64)
SIZE = 1 << 18
INT6 = GroupInt(bits=6, group=32, symmetric=True)


def early(timeout: float = 20.0) -> tuple[Early, Traffic]:
    traffic, group = Traffic(), default_group()
    transport = choose(group, "cpu", traffic, Checksums("test"))
    assert isinstance(transport, Early)
    names = [f"rank {rank}" for rank in range(dist.get_world_size())]
    transport.begin(FailureBoard(group, "test", names, timeout), 0)
    return transport, traffic


def any_order() -> float:
    """Both ranks send first and take last, in another order than they sent."""
    transport, traffic = early()
    other = 1 - dist.get_rank()
    for tag in range(5):
        transport.post(Route(other, tag), SIZE)
    for tag in (3, 1, 4, 0, 2):
        message = torch.full((SIZE + transport.room,), 10 * other + tag, dtype=torch.uint8)
        assert transport.send(Route(other, tag), message) == []
        del message  # the transport keeps it until it has left
    for tag in (2, 0, 1, 3, 4):
        assert transport.receive(Route(other, tag), SIZE) == []
        found = transport.take(Route(other, tag), SIZE)
        assert found.unique().tolist() == [10 * dist.get_rank() + tag]
    transport.drain()
    assert transport._outbox == []
    return traffic.wait_seconds


def test_messages_are_told_apart_by_their_tags(ranks: Ranks):
    assert all(seconds > 0 for seconds in ranks.run(any_order))


def without_waiting() -> None:
    """Sending does not wait for the peer, which takes nothing before it knows that the sender has gone on."""
    transport, _ = early()
    store = default_group().get_group_store()
    if dist.get_rank() == 1:
        store.wait(["without waiting"], timedelta(seconds=20))
        transport.post(Route(0, 0), 1 << 24)
        transport.take(Route(0, 0), 1 << 24)
    else:
        transport.send(Route(1, 0), torch.zeros((1 << 24) + transport.room, dtype=torch.uint8))
        store.set("without waiting", "")
        transport.drain()


def test_sending_does_not_wait(ranks: Ranks):
    ranks.run(without_waiting)


def steps_leave_nothing_behind() -> int:
    """Sends of a step, training or not, have left before the step returns."""
    drained, most = Early.drain, 0

    def drain(self: Early) -> None:
        nonlocal most
        most = max(most, len(self._outbox))
        drained(self)

    Early.drain = drain
    try:
        for schedule in ("gpipe", "interleaved-2", "zbv"):
            run = toy.Run(schedule, toy.lowbit(forward=INT4, backward=INT6))
            for step in (run.train, run.evaluate, run.train):
                step(0)
                for stage in run.stages:
                    assert isinstance(stage, LowBitStage)
                    assert isinstance(stage._transport, Early)
                    assert stage._transport._outbox == []
                    assert stage._transport._posted == {}
    finally:
        Early.drain = drained
    return most


def test_a_step_waits_for_its_sends_once_at_its_end(ranks: Ranks):
    # Rank 0 of the interleaved schedule: stages 0 and 2 send forward, stage 2 also backward.
    assert ranks.run(steps_leave_nothing_behind)[0] == 3 * toy.MICRO_BATCHES


def leftover() -> None:
    transport, _ = early()
    transport.post(Route(1 - dist.get_rank(), 0), 8)
    early_again = FailureBoard(default_group(), "again", ["rank 0", "rank 1"], 5.0)
    with pytest.raises(RuntimeError, match="1 messages of the previous step were never taken"):
        transport.begin(early_again, 1)
    dist.barrier()


def test_messages_of_a_step_that_was_cut_short_do_not_leak_into_the_next(ranks: Ranks):
    ranks.run(leftover)


def in_order() -> Any:
    """A pipeline over the transport for backends without tags."""
    before = stage_module.choose
    stage_module.choose = InOrder
    try:
        coded = toy.Run("1f1b", toy.lowbit(forward=INT4, backward=INT6))
        looped = toy.Run("interleaved-2", toy.lowbit(forward=INT4, backward=INT6))
    finally:
        stage_module.choose = before
    for step in range(2):
        coded.train(step)
        coded.evaluate(step)
        looped.train(step)
    assert isinstance(coded.stages[0]._transport, InOrder)
    return coded.losses, looped.losses


def with_tags() -> Any:
    runs = [
        toy.Run(name, toy.lowbit(forward=INT4, backward=INT6)) for name in ("1f1b", "interleaved-2")
    ]
    for step in range(2):
        for run in runs:
            run.train(step)
    return [run.losses for run in runs]


def test_the_schedules_order_gives_the_same_losses(ranks: Ranks):
    for found, expected in zip(ranks.run(in_order)[1], ranks.run(with_tags)[1], strict=True):
        assert len(found) == 2 * toy.MICRO_BATCHES
        assert torch.equal(torch.stack(found), torch.stack(expected))


def chosen(device: str, backends: str) -> str:
    before = dist.get_backend_config, transport_module.CudaStreams
    dist.get_backend_config = lambda group: backends
    transport_module.CudaStreams = lambda device: None
    try:
        return type(choose(default_group(), device, Traffic(), Checksums("test"))).__name__
    finally:
        dist.get_backend_config, transport_module.CudaStreams = before


@pytest.mark.parametrize(
    ("device", "backends", "expected"),
    [
        ("cpu", "cpu:gloo,cuda:gloo", "Early"),
        ("cpu", "cpu:gloo,cuda:nccl", "Early"),
        ("cpu", "cpu:gloo", "Early"),
        ("cpu", "cpu:mpi", "InOrder"),
        ("cuda", "cpu:gloo,cuda:gloo", "Staged"),
        ("cuda", "cpu:gloo", "Staged"),
        ("cuda", "cpu:gloo,cuda:nccl", "InOrder"),
        ("cuda", "cuda:nccl", "InOrder"),
    ],
)
def test_the_transport_follows_the_backend(ranks: Ranks, device: str, backends: str, expected: str):
    assert ranks.run(chosen, device, backends, ranks=1) == [expected]


def test_gloo_reaches_no_other_devices(ranks: Ranks):
    assert ranks.outcomes(chosen, "mps", "cpu:gloo", ranks=1)[0].text == (
        "device is mps; allowed with Gloo: cpu or cuda"
    )
