"""Two ends that disagree about the length of a message: one error on both ranks, which names both lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lowbit.collectives.calls import CollectiveCall, queue_of
from lowbit.collectives.exchange import PayloadExchange
from lowbit.pipeline.boundary import Lane
from lowbit.wire.checksum import Checksums
from lowbit.wire.errors import PeerError
from lowbit.wire.mailbox import Mailbox, Route
from lowbit.wire.messages import Messages
from lowbit.wire.pytorch import default_group
from tests.pipeline import toy
from tests.processes import Ranks

# Bytes of payload that are sent and expected: of two size classes, as in the abort that was seen, and of one.
LENGTHS = [(4096, 64), (64, 4096), (100, 64), (64, 100)]


def said(outcomes: list[Any], sent: int, expected: int) -> None:
    for text in outcomes:
        assert f"the message from rank 0 has {sent + 8} bytes with its checksum; rank 1 expects {expected + 8}" in text


def conversed(sent: int, expected: int) -> str:
    messages = Messages(None, "test", timeout=3)
    try:
        if messages.rank == 0:
            messages.send(torch.ones(sent, dtype=torch.uint8), 1).wait()
            messages.receive(8, 1)
        else:
            messages.receive(expected, 0)
            messages.send(torch.zeros(1, dtype=torch.int64), 0)
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("sent", "expected"), LENGTHS)
def test_of_a_single_message(ranks: Ranks, sent: int, expected: int):
    said(ranks.run(conversed, sent, expected), sent, expected)


def collected(sent: int, expected: int) -> str:
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
    call = CollectiveCall(facts=facts, group=default_group(), device=torch.device("cpu"), timeout=3, work=work)
    try:
        queue_of(default_group()).submit(call).wait()
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("sent", "expected"), LENGTHS)
def test_of_a_collectives_message(ranks: Ranks, sent: int, expected: int):
    said(ranks.run(collected, sent, expected), sent, expected)


def piped(more: int) -> str:
    """In the second step, rank 0 sends activations that are longer (or shorter) than rank 1 expects."""
    run = toy.Run("gpipe", toy.lowbit(timeout=5.0))
    run.train(0)
    encode = Lane.encode

    def encoded(self: Lane, *args: Any, room: int = 0, **kwargs: Any) -> torch.Tensor:
        message = encode(self, *args, room=room, **kwargs)
        return torch.cat([message, message.new_zeros(more)]) if more > 0 else message[:more]

    with mock.patch.object(Lane, "encode", encoded if dist.get_rank() == 0 else encode):
        try:
            run.train(1)
        except PeerError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("more", [1 << 16, 5, -5])
def test_of_an_activation(ranks: Ranks, more: int):
    for text in ranks.run(piped, more):
        assert "boundary 0 forward, micro-batch 0, tensor 0, step 2: the message from rank 0 (stage 0) has " in text
        assert " bytes with its checksum; rank 1 (stage 1) expects " in text


@pytest.mark.parametrize(("checksums", "room"), [(True, 256), (False, 100)])
def test_without_checksums_nothing_longer_fits(checksums: bool, room: int):
    """It would be taken cut off: Gloo has to notice."""
    group: Any = mock.Mock()
    board: Any = SimpleNamespace(letters={})
    expected = Mailbox(group, Checksums("test", enabled=checksums), board).expect(Route(1, 0), 100)
    assert expected.memory.numel() == room
