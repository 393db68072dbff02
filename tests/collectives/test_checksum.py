"""Eight bytes behind a message, and what collectives do with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import GroupInt
from lowbit.collectives import AgreementError, DamagedError, all_gather, all_reduce, all_reduce_bytes, reduce_scatter
from lowbit.ranks.checksum import CHECKSUM_BYTES, Checksums, secret_facts
from tests.damage import Flip, Replay, on_the_way, secret
from tests.processes import Ranks

INT8 = GroupInt(bits=8, group=64)
HOST = Checksums.seal, lambda checksums, m, *place: not checksums.intact(m, *place)
DEVICE = (Checksums.seal_there, lambda checksums, m, *place: bool(checksums.damage_there(m, *place)))
Kind = tuple[Callable[..., None], Callable[..., bool]]


@pytest.mark.parametrize("kind", [HOST, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("size", [1, 7, 8, 13, 64, 1000, 4099])
def test_every_bit_counts(kind: Kind, size: int):
    seal, is_damaged = kind
    checksums, message = Checksums("test"), torch.randint(0, 256, (size + 8,), dtype=torch.uint8)
    seal(checksums, message, 1, 2)
    assert not is_damaged(checksums, message, 1, 2)
    bits = 8 * message.numel()
    for bit in random.Random(0).sample(range(bits), min(bits, 200)):
        message[bit // 8] ^= 1 << bit % 8
        assert is_damaged(checksums, message, 1, 2), bit
        message[bit // 8] ^= 1 << bit % 8
    assert not is_damaged(checksums, message, 1, 2)


@pytest.mark.parametrize("kind", [HOST, DEVICE], ids=["host", "device"])
def test_changes_in_two_places_do_not_make_up_for_each_other(kind: Kind):
    seal, is_damaged = kind
    checksums, message = Checksums("test"), torch.randint(0, 256, (808,), dtype=torch.uint8)
    seal(checksums, message)
    words = message.view(torch.int64)
    for a, b in ((0, 1), (3, 50), (98, 99)):
        for bit in (0, 31, 62, 63):
            before = message.clone()
            words[[a, b]] ^= torch.tensor(1) << bit
            assert is_damaged(checksums, message), (a, b, bit)
            message.copy_(before)
        words[[a, b]] = words[[b, a]]
        assert is_damaged(checksums, message), "two words that changed places"
        words[[a, b]] = words[[b, a]]


@pytest.mark.parametrize("kind", [HOST, DEVICE], ids=["host", "device"])
def test_a_message_fits_its_place_topic_and_secret_only(kind: Kind):
    seal, is_damaged = kind
    message = torch.randint(0, 256, (72,), dtype=torch.uint8)
    seal(Checksums("test"), message, 1, 2)
    assert is_damaged(Checksums("test"), message, 2, 1)
    assert is_damaged(Checksums("test"), message, 1, 2, 0)
    assert is_damaged(Checksums("other"), message, 1, 2)
    with secret("abc"):
        assert is_damaged(Checksums("test"), message, 1, 2)
        seal(Checksums("test"), message, 1, 2)
        assert not is_damaged(Checksums("test"), message, 1, 2)
    assert is_damaged(Checksums("test"), message, 1, 2)


def test_facts_tell_secrets_apart_and_do_not_tell_them():
    assert secret_facts() == {"LOWBIT_SECRET": "not set"}
    facts = []
    for text in ("correct horse", "battery staple", "correct horse"):
        with secret(text):
            facts.append(secret_facts()["LOWBIT_SECRET"])
    assert facts[0] == facts[2] != facts[1]
    assert facts[0].startswith("one with digest ")
    assert "horse" not in facts[0]


def test_on_a_device_the_sum_is_the_same_everywhere():
    """The number itself, which ranks with and without a GPU would have to agree on."""
    message = torch.arange(108, dtype=torch.uint8)
    Checksums("test").seal_there(message, 5)
    assert int(message[-8:].clone().view(torch.int64)) == -8329968847690192682


# ------------------------------------------------------------------------------------------------ collectives


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


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("transport", ["messages", "collectives"])
def test_a_flipped_bit_is_an_error_that_names_its_sender(ranks: Ranks, kind: str, transport: str):
    count = MESSAGES[kind]
    if transport == "collectives":  # which seal what a rank sends to itself, too
        count = {"two_shot": 6 + 3, "reduce_scatter": 4}.get(kind, count)
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
    found = ranks.run(with_settings, {1: False}, {}, transport)
    assert found == ["the ranks do not agree:\n  checksums: on on rank 0; off on rank 1"] * 2
    found = ranks.run(with_settings, {}, {1: "another"}, transport, ranks=3)
    assert len(set(found)) == 1
    assert "LOWBIT_SECRET: one with digest" in found[0]
    assert "on rank 0, rank 2" in found[0] or "on rank 0 and rank 2" in found[0]
    assert ranks.run(with_settings, {0: False, 1: False}, {}, transport) == ["", ""]


def bytes_and_sums(checksums: bool) -> tuple[list[int], list[Tensor]]:
    """What a rank sends and gets."""
    sent: list[int] = []
    isend = dist.isend

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return isend(tensor, *args, **kwargs)

    dist.isend = counted
    try:
        sums = [called(kind, checksums=checksums) for kind in MESSAGES]
    finally:
        dist.isend = isend
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


def test_the_error_is_one_of_peers():
    error = DamagedError("text", 3)
    assert isinstance(error, RuntimeError)
    assert error.rank == 3


def test_checksums_is_yes_or_no(ranks: Ranks):
    for outcome in ranks.outcomes(called_with_one):
        assert outcome.text == "checksums is 1; allowed: True or False"


def called_with_one() -> None:
    called("one_shot", checksums=1)
