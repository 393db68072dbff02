from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit.codecs import AQSGD, GroupInt, parse


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def sessions(shape: tuple[int, ...] = (2, 3, 64)):
    codec = AQSGD(inner=GroupInt(bits=4, group=64))
    return tuple(codec.open(shape=shape, dtype=torch.float32) for _ in range(2))


def test_first_visit_is_exact_and_later_ones_send_differences() -> None:
    sender, receiver = sessions()
    x = torch.randn(2, 3, 64)
    key = (7, 3)
    assert sender.nbytes(key) == sender.max_nbytes() == x.numel() * 4
    assert torch.equal(receiver.decode(sender.encode(x, key=key), key=key), x)
    near = x + 0.01 * torch.randn(2, 3, 64)
    payload = sender.encode(near, key=key)
    assert len(payload) == receiver.nbytes(key) == 2 * GroupInt().nbytes((3, 64))
    y = receiver.decode(payload, key=key)
    # The difference is a hundredth of the tensor, and 4 bits of it are a thousandth.
    assert (y - near).norm() < 0.1 * (near - x).norm()
    assert (y - near).norm() < 0.1 * (GroupInt().round_trip(near) - near).norm()


def test_errors_do_not_pile_up_and_both_ends_agree() -> None:
    sender, receiver = sessions()
    x = torch.randn(2, 3, 64)
    for step in range(20):
        y = receiver.decode(sender.encode(x, key=(0, 1)), key=(0, 1))
        assert torch.equal(y[0], sender.state_dict()["0"]), step
    assert (y - x).norm() < 1e-6 * x.norm()


def test_messages_that_mix_new_and_known_samples() -> None:
    sender, receiver = sessions()
    x = torch.randn(2, 3, 64)
    receiver.decode(sender.encode(x, key=(0, 1)), key=(0, 1))
    payload = sender.encode(x, key=(1, 2))
    assert len(payload) == GroupInt().nbytes((3, 64)) + 3 * 64 * 4
    y = receiver.decode(payload, key=(1, 2))
    assert torch.equal(y[1], x[1])


def test_state_grows_with_the_samples_and_survives_a_restart() -> None:
    sender, receiver = sessions()
    x = torch.randn(2, 3, 64)
    for key in ((0, 1), (2, 3)):
        receiver.decode(sender.encode(x, key=key), key=key)
    assert sender.state_bytes() == receiver.state_bytes() == 4 * 3 * 64 * 4
    again_s, again_r = sessions()
    again_s.load_state_dict(sender.state_dict())
    again_r.load_state_dict(receiver.state_dict())
    payload = again_s.encode(x * 1.01, key=(3, 0))
    assert torch.equal(payload, sender.encode(x * 1.01, key=(3, 0)))
    assert torch.equal(again_r.decode(payload, key=(3, 0)), receiver.decode(payload, key=(3, 0)))


def test_evaluation_uses_what_is_known_and_keeps_nothing() -> None:
    sender, receiver = sessions()
    x = torch.randn(2, 3, 64)
    receiver.decode(sender.encode(x, key=(0, 1)), key=(0, 1))
    before = [{k: v.clone() for k, v in end.state_dict().items()} for end in (sender, receiver)]
    payload = sender.encode(x + 0.01, key=(1, 2), training=False)
    y = receiver.decode(payload, key=(1, 2), training=False)
    assert len(payload) == GroupInt().nbytes((3, 64)) + 3 * 64 * 4
    assert torch.allclose(y, x + 0.01, atol=2.0)
    for end, kept in zip((sender, receiver), before, strict=True):
        assert end.state_dict().keys() == kept.keys()
        assert all(torch.equal(end.state_dict()[k], v) for k, v in kept.items())


def test_nan_reaches_the_other_side() -> None:
    sender, receiver = sessions()
    x = torch.randn(2, 3, 64)
    receiver.decode(sender.encode(x, key=(0, 1)), key=(0, 1))
    x[1, 2, 5] = float("nan")
    y = receiver.decode(sender.encode(x, key=(0, 1)), key=(0, 1))
    assert y[1, 2, 5].isnan()
    assert y[0].isfinite().all()


def test_bad_input() -> None:
    sender, receiver = sessions()
    x = torch.randn(2, 3, 64)
    for key in (None, (1,), (1, 1), (1, 2, 3)):
        with pytest.raises(ValueError, match="AQSGD needs 2 different sample ids"):
            sender.encode(x, key=key)
    with pytest.raises(ValueError, match="expected one dimension of 1536 bytes"):
        receiver.decode(torch.zeros(10, dtype=torch.uint8), key=(0, 1))
    with pytest.raises(ValueError, match=r"AQSGD keeps state between messages: use open\(\)"):
        AQSGD().encode(x)
    with pytest.raises(TypeError, match="inner is AQSGD"):
        AQSGD(inner=AQSGD())
    with pytest.raises(ValueError, match=r"state of sample 5 has shape \(2,\)"):
        sender.load_state_dict({"5": torch.zeros(2)})


def test_a_coded_cache_is_a_quarter_and_both_ends_hold_the_same() -> None:
    codec = parse("aq-sgd-8bit")
    sender, receiver, exact = (c.open(shape=(2, 3, 64), dtype=torch.float32) for c in (codec, codec, AQSGD()))
    x = torch.randn(2, 3, 64)
    assert torch.equal(receiver.decode(sender.encode(x, key=(0, 1)), key=(0, 1)), x), "the first visit is exact"
    exact.encode(x, key=(0, 1))
    for _ in range(5):
        y = receiver.decode(sender.encode(x, key=(0, 1)), key=(0, 1))
        assert all(torch.equal(m, receiver.state_dict()[k]) for k, m in sender.state_dict().items())
    assert 1e-4 < (y - x).norm() / x.norm() < 1e-3, "4 bits of what 8 bits leave"
    assert sender.state_bytes() == 2 * GroupInt(bits=8, group=64).nbytes((3, 64)) < 0.3 * exact.state_bytes()
    again = codec.open(shape=(2, 3, 64), dtype=torch.float32)
    again.load_state_dict(sender.state_dict())
    assert torch.equal(again.encode(2 * x, key=(1, 0)), sender.encode(2 * x, key=(1, 0)))
    with pytest.raises(ValueError, match=r"state of sample 5 has shape \(3, 64\); expected \(224,\)"):
        sender.load_state_dict({"5": x[0]})
    bad: Any
    for bad in (8, AQSGD(), GroupInt(bits=8, rounding="stochastic")):
        with pytest.raises(TypeError, match="cache is .*; allowed: a codec without state that rounds to nearest"):
            AQSGD(cache=bad)
