"""Lanes of an exchange between real ranks, their memory, and checksums of what collectives send."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import GroupInt
from lowbit.collectives import AgreementError, all_gather, all_reduce, all_reduce_bytes, reduce_scatter
from lowbit.collectives.calls import CollectiveCall, Transport, queue_of
from lowbit.collectives.exchange import PayloadExchange, Scratch
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit.wire.pytorch import default_group
from tests.collectives.traffic import sent_bytes
from tests.damage import Flip, Replay, on_the_way, secret
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


INT8 = GroupInt(bits=8, group=64)


def x_of(rank: int) -> Tensor:
    return torch.randn(9001, generator=torch.Generator().manual_seed(rank))


def called(kind: str, **options: Any) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if kind == "reduce_scatter":
        out, whole = torch.empty(600), torch.cat([x_of(rank)[:600]] * ranks)
        reduce_scatter(out, whole, INT8, chunk=320, timeout=10, **options)
    elif kind == "all_gather":
        out = torch.empty(600 * ranks)
        all_gather(out, x_of(rank)[:600], INT8, chunk=320, timeout=10, **options)
    else:
        out = x_of(rank)
        how: Any = {"algorithm": kind, "chunk": 2000, "small": 0, "timeout": 10}
        all_reduce(out, INT8, **(how | options))
    return out


def damages(kind: str, transport: str, change: Any) -> tuple[str, str, int]:
    """Two calls, in the second of which something that rank 0 sends is changed on its way."""
    with on_the_way(0, change):
        called(kind, transport=transport)
        try:
            called(kind, transport=transport)
        except Exception as error:
            return type(error).__name__, str(error), getattr(error, "rank", -1)
    return "", "", -1


MESSAGES = {"two_shot": 3 + 3, "one_shot": 5, "reduce_scatter": 2, "all_gather": 2}
"""Sealed by a rank in a call of two ranks that sends messages."""


@pytest.mark.parametrize(
    ("kind", "transport"), [*((kind, "messages") for kind in MESSAGES), ("two_shot", "collectives")]
)
def test_a_flipped_bit_is_an_error_that_names_its_sender(ranks: Ranks, kind: str, transport: str):
    count = MESSAGES[kind]
    if transport == "collectives":  # which seal what a rank sends to itself, too
        count = 6 + 3
    _, (error, text, culprit) = ranks.run(damages, kind, transport, Flip(count))
    assert error == "DamagedError"
    name = "all_reduce" if "shot" in kind else kind
    assert text.startswith(f"{name}, call 1, lane 0: the message from rank 0 is damaged: "), text
    assert culprit == 0


@pytest.mark.parametrize("transport", ["messages", "collectives"])
def test_a_message_of_an_earlier_call_is_noticed(ranks: Ranks, transport: str):
    outcome = ranks.run(damages, "one_shot", transport, Replay(1, 6))[1]
    assert outcome[0] == "DamagedError"
    assert "all_reduce, call 1, lane 1: the message from rank 0 is damaged" in outcome[1]


def with_settings(checksums: dict[int, bool], secrets: dict[int, str], transport: str) -> str:
    rank = dist.get_rank()
    with secret(secrets.get(rank, "same")):
        try:
            called("one_shot", checksums=checksums.get(rank, True), transport=transport)
        except AgreementError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("transport", ["messages", "collectives"])
def test_ranks_must_agree_on_checksums_and_secret(ranks: Ranks, transport: str):
    errors = ranks.run(with_settings, {1: False}, {}, transport)
    assert errors == ["the ranks do not agree:\n  checksums: on on rank 0; off on rank 1"] * 2
    errors = ranks.run(with_settings, {}, {1: "another"}, transport, ranks=3)
    assert len(set(errors)) == 1
    assert "LOWBIT_SECRET: one with digest" in errors[0]
    assert "on rank 0, rank 2" in errors[0] or "on rank 0 and rank 2" in errors[0]
    assert ranks.run(with_settings, {0: False, 1: False}, {}, transport) == ["", ""]


def bytes_and_sums(checksums: bool) -> tuple[list[int], list[Tensor]]:
    with sent_bytes() as sent:
        sums = [called(kind, checksums=checksums) for kind in MESSAGES]
    for kind in ("two_shot", "one_shot"):
        how: Any = {"algorithm": kind, "chunk": 2000, "small": 0, "checksums": checksums}
        rank, ranks = dist.get_rank(), dist.get_world_size()
        more = CHECKSUM_BYTES * (ranks - 1) * MESSAGES[kind] * checksums
        plain = all_reduce_bytes(9001, INT8, rank=rank, ranks=ranks, **how | {"checksums": False})
        assert all_reduce_bytes(9001, INT8, rank=rank, ranks=ranks, **how) == plain + more
    return sent, sums


def test_without_checksums_nothing_is_added_and_with_them_nothing_changes(ranks: Ranks):
    off, on = (ranks.run(bytes_and_sums, checksums) for checksums in (False, True))
    for (few, plain), (more, checked) in zip(off, on, strict=True):
        assert [size + CHECKSUM_BYTES for size in few] == more
        assert len(few) == sum(MESSAGES.values())
        assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True))
