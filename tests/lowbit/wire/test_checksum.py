"""Eight bytes behind a message."""

import random
from collections.abc import Callable

import pytest
import torch

from lowbit.wire.checksum import Checksums, secret_facts
from tests.damage import secret

HOST = Checksums.seal, lambda checksums, m, *place: not checksums.intact(m, *place)
DEVICE = (Checksums.seal_there, lambda checksums, m, *place: bool(checksums.damage_there(m, *place)))
on_host_and_device = pytest.mark.parametrize(("seal", "is_damaged"), [HOST, DEVICE], ids=["host", "device"])
Seal = Callable[..., None]
IsDamaged = Callable[..., bool]


@on_host_and_device
@pytest.mark.parametrize("size", [1, 7, 8, 13, 64, 1000, 4099])
def test_every_bit_counts(seal: Seal, is_damaged: IsDamaged, size: int):
    checksums, message = Checksums("test"), torch.randint(0, 256, (size + 8,), dtype=torch.uint8)
    seal(checksums, message, 1, 2)
    assert not is_damaged(checksums, message, 1, 2)
    bits = 8 * message.numel()
    for bit in random.Random(0).sample(range(bits), min(bits, 200)):
        message[bit // 8] ^= 1 << bit % 8
        assert is_damaged(checksums, message, 1, 2), bit
        message[bit // 8] ^= 1 << bit % 8
    assert not is_damaged(checksums, message, 1, 2)


@on_host_and_device
def test_changes_in_two_places_do_not_make_up_for_each_other(seal: Seal, is_damaged: IsDamaged):
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


@on_host_and_device
def test_a_message_fits_its_place_topic_and_secret_only(seal: Seal, is_damaged: IsDamaged):
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
