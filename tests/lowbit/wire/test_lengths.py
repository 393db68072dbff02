"""Lengths of messages and their tags: which can meet, and one error on both ranks, with both lengths, if they don't."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lowbit.collectives.algorithms import Shards
from lowbit.collectives.calls import CollectiveCall, queue_of
from lowbit.collectives.exchange import PayloadExchange
from lowbit.pipeline.boundary import Lane
from lowbit.wire import tags
from lowbit.wire.checksum import Checksums
from lowbit.wire.errors import PeerError
from lowbit.wire.mailbox import Mailbox, Route
from lowbit.wire.messages import Messages
from lowbit.wire.pytorch import default_group
from tests.lowbit.pipeline import toy
from tests.processes import impatient, on_ranks

# Bytes of payload that are sent and expected: of two size classes, as in the abort that was seen, and of one.
LENGTHS = [(4096, 64), (64, 4096), (100, 64), (64, 100)]


def disagree(sent: int, expected: int, about: str = "", stages: bool = False) -> Any:
    """What both ranks must raise."""
    names = [f"rank {rank}{rf' .stage {rank}.' * stages}" for rank in range(2)]
    lengths = f"has {sent + 8} bytes with its checksum; {names[1]} expects {expected + 8}"
    return pytest.raises(PeerError, match=f"{about}the message from {names[0]} {lengths}")


def conversed(sent: int, expected: int) -> None:
    messages = Messages(None, "test", timeout=5)
    with impatient(0.5), disagree(sent, expected):
        if messages.rank == 0:
            messages.send(torch.ones(sent, dtype=torch.uint8), 1).wait()
            messages.receive(8, 1)
        else:
            messages.receive(expected, 0)


def collected(sent: int, expected: int) -> None:
    """Rank 0 and rank 1 exchange payloads; rank 0's has a length that rank 1 does not expect."""
    rank = dist.get_rank()

    def work(exchange: PayloadExchange) -> None:
        incoming, outgoing = ([0, 32], [0, sent]) if rank == 0 else ([expected, 0], [32, 0])
        exchange.open(0, incoming, outgoing)
        exchange.send(0, 1 - rank)
        exchange.take(0, 1 - rank)
        exchange.open(1, [32, 32], [32])
        if rank == 0:  # waits for a rank that may have failed
            exchange.send(1)
            exchange.take(1, 1)
        else:
            exchange.send(1)
            exchange.take(1, 0)

    facts = {"collective": "crossing"}
    call = CollectiveCall(facts=facts, group=default_group(), device=torch.device("cpu"), timeout=5, work=work)
    with impatient(0.5), disagree(sent, expected):
        queue_of(default_group()).submit(call).wait()


@pytest.mark.parametrize("kind", [conversed, collected])
@pytest.mark.parametrize(("sent", "expected"), LENGTHS)
@on_ranks
def test_of_a_single_message_and_a_collectives(kind: Any, sent: int, expected: int) -> None:
    kind(sent, expected)


@pytest.mark.parametrize("more", [1 << 16, 5, -5])
@on_ranks
def test_of_an_activation(more: int) -> None:
    """In the second step, rank 0 sends activations that are longer (or shorter) than rank 1 expects."""
    run = toy.Run("gpipe", toy.lowbit(forward=toy.INT4, backward=toy.INT4, timeout=10.0))
    run.train(0)
    encode, size = Lane.encode, toy.INT4.nbytes((toy.ROWS, 8, toy.WIDTH))

    def encoded(self: Lane, *args: Any, room: int = 0, **kwargs: Any) -> torch.Tensor:
        message = encode(self, *args, room=room, **kwargs)
        return torch.cat([message, message.new_zeros(more)]) if more > 0 else message[:more]

    where = "boundary 0 forward, micro-batch 0, tensor 0, step 2: "
    with (
        mock.patch.object(Lane, "encode", encoded if dist.get_rank() == 0 else encode),
        disagree(size + more, size, where, stages=True),
        impatient(1.0),
    ):
        run.train(1)


@pytest.mark.parametrize(("checksums", "room"), [(True, 256), (False, 100)])
def test_without_checksums_nothing_longer_fits(checksums: bool, room: int):
    """It would be taken cut off: Gloo has to notice."""
    group: Any = mock.Mock()
    board: Any = SimpleNamespace(in_flight={})
    expected = Mailbox(group, Checksums("test", enabled=checksums), board).expect(Route(1, 0), 100)
    assert expected.memory.numel() == room


SOURCE = Path(tags.__file__).parents[1]


def test_no_two_kinds_of_message_can_meet():
    for kind, following in itertools.pairwise(tags.KINDS):
        assert kind.first < kind.end == following.first
    assert tags.KINDS[0].first == 0
    assert tags.KINDS[-1].end <= tags.CHANNELS
    assert tags.tag(tags.CHANNELS - 1, tags.CAPACITIES[-1]) < 1 << 31, "Gloo's tags are int32"


@pytest.mark.parametrize("kind", tags.KINDS, ids=lambda kind: f"{kind.name} from {kind.first}")
def test_members_of_a_kind_share_no_channel(kind: tags.Kind):
    first, last = kind.channels(0), kind.channels(kind.members - 1)
    assert (first.start, last.stop) == (kind.first, kind.end)
    if kind.members > 1:
        assert kind.channels(1).start == first.stop
    with pytest.raises(RuntimeError, match=f"has had {kind.members} {kind.name}, and no more are allowed"):
        kind.channels(kind.members)


def test_a_receive_has_room_for_every_message_with_its_tag():
    assert len(tags.CAPACITIES) <= 32, "else classes of one channel reach the next"
    assert list(tags.CAPACITIES) == sorted(set(tags.CAPACITIES))
    ends = {n + more for n in tags.CAPACITIES for more in (-1, 0, 1)} - {tags.CAPACITIES[-1] + 1}
    for nbytes, other in itertools.product(sorted({0, 1, 72, 4104, *ends}), repeat=2):
        assert nbytes <= tags.capacity(nbytes)
        if tags.tag(5, nbytes) == tags.tag(5, other):
            assert other <= tags.capacity(nbytes)
        assert tags.tag(5, nbytes) // 32 == 5
    with pytest.raises(ValueError, match="has 68719476737 bytes; allowed: at most 68719476736"):
        tags.capacity(tags.CAPACITIES[-1] + 1)


def test_a_call_has_a_channel_for_each_message():
    assert 2 * Shards(numel=1 << 40, ranks=2, chunk=1).chunks <= tags.COLLECTIVES.width


def test_tags_stand_in_the_table_only():
    calls = re.compile(r"\b(dist\.(send|recv|isend|irecv)|(group|carrier)\.(send|recv))\b[^`]*$|\btag=", re.M)
    files = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if calls.search(file.read_text())}
    assert files == {"wire/mailbox.py", "pipeline/layouts.py"}, "the latter sends layouts of a trial"
