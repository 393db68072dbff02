"""Ends that learn directions from the messages between them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch

from lowbit import kernels
from lowbit.codecs import TransformQuant
from lowbit.codecs.transform_quant.basis import start
from lowbit.codecs.transform_quant.memory import Headers
from tests.codecs.transform_quant.messages import crossed, decibels, ends, same_state, tokens

SHAPE = (2, 40, 48)
CODEC = TransformQuant()


def test_evaluation_of_another_shape_uses_the_basis_and_leaves_no_trace() -> None:
    sender, receiver = ends(CODEC, SHAPE)
    for seed in range(4):
        crossed(sender, receiver, tokens(SHAPE, seed=seed))
    before = sender.state_dict()
    small = {"shape": (1, 30, 48), "dtype": torch.bfloat16}
    there, here = sender.sharing_state(**small), receiver.sharing_state(**small)
    x = tokens((1, 30, 48), seed=8).bfloat16()
    y = crossed(there, here, x, training=False)
    assert y.dtype == torch.bfloat16
    assert decibels(x, y) > 8
    for end in (sender, receiver):
        after = end.state_dict()
        assert torch.equal(after["directions"], before["directions"])
        assert (after["messages"], after["digest"]) == (before["messages"], before["digest"])
    crossed(there, here, x)  # in training, the other shape's messages count among the first's
    crossed(sender, receiver, tokens(SHAPE, seed=9))
    assert sender.state_dict()["messages"] == before["messages"] + 2
    same_state(sender, receiver)


def test_a_restart_continues_bit_for_bit() -> None:
    sender, receiver = ends(CODEC, SHAPE)
    for seed in range(3):
        crossed(sender, receiver, tokens(SHAPE, seed=seed))
    again = ends(CODEC, SHAPE)
    again[0].load_state_dict(sender.state_dict())
    again[1].load_state_dict(receiver.state_dict())
    for seed in range(3, 6):
        payload = sender.encode(tokens(SHAPE, seed=seed))
        assert torch.equal(payload, again[0].encode(tokens(SHAPE, seed=seed)))
        assert torch.equal(receiver.decode(payload), again[1].decode(payload))
    fresh, _ = ends(CODEC, SHAPE)
    sender.load_state_dict({})  # of before the first message
    same_state(sender, fresh)
    assert torch.equal(sender.encode(tokens(SHAPE, seed=0)), fresh.encode(tokens(SHAPE, seed=0)))
    with pytest.raises(ValueError, match="it is not a state of TransformQuant"):
        sender.load_state_dict({"5": torch.zeros(2)})
    for shape in ((4, 64), (4, 16)):
        other = CODEC.open(shape=shape, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"state has directions .* \(\d+, 48\); expected .* \(\d+, \d\d\)"):
            other.load_state_dict(receiver.state_dict())


def test_strided_tensors_and_outputs() -> None:
    sender, receiver = ends(CODEC, (40, 48))
    x = tokens((48, 40), seed=0).t()
    out = torch.full((48, 40), math.nan).t()
    payload = sender.encode(x)
    assert receiver.decode(payload, out=out) is out
    same, other = ends(CODEC, (40, 48))
    room = torch.empty(len(payload) + 3, dtype=torch.uint8)
    assert torch.equal(same.encode(x.contiguous(), out=room[3:]), payload)
    assert torch.equal(other.decode(room[3:]), out)


def test_a_lost_repeated_or_misplaced_message_is_an_error() -> None:
    sender, receiver = ends(CODEC, SHAPE)
    first, second = (sender.encode(tokens(SHAPE, seed=s)) for s in range(2))
    with pytest.raises(ValueError, match=r"training message 1 .* expects training message 0"):
        receiver.decode(second)
    receiver.decode(first)
    with pytest.raises(ValueError, match=r"training message 0 .* expects training message 1"):
        receiver.decode(first)
    with pytest.raises(ValueError, match="expects evaluation message 1"):
        receiver.decode(second, training=False)
    before = receiver.state_dict()
    receiver.decode(second)
    other, _ = ends(CODEC, SHAPE)
    for seed in (5, 6):
        other.encode(tokens(SHAPE, seed=seed))
    with pytest.raises(ValueError, match=r"message 2 after directions .* expects training message 2"):
        receiver.decode(other.encode(tokens(SHAPE, seed=2)))
    receiver.load_state_dict(before)
    receiver.decode(second)
    receiver.decode(sender.encode(tokens(SHAPE, seed=2)))


def test_where_the_host_knows_late_a_wrong_message_is_nan_and_leaves_the_directions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, whose headers the host compares a message later."""
    sender, receiver = ends(CODEC, SHAPE)
    payloads = [sender.encode(tokens(SHAPE, seed=s)) for s in range(4)]
    check = Headers.check
    monkeypatch.setattr(Headers, "check", lambda self, wait=False: check(self) if wait else None)
    assert receiver.decode(payloads[0]).isfinite().all()
    before = receiver._memory.directions  # state_dict() would look
    assert receiver.decode(payloads[2]).isnan().all()
    assert receiver.decode(payloads[3]).isnan().all(), "nor is anything after it taken for good"
    assert torch.equal(receiver._memory.directions, before)
    with pytest.raises(ValueError, match="training message 2 .* expects training message 1"):
        receiver.state_dict()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="training message 3 .* expects training message 2"):
        receiver.decode(payloads[1])
    receiver.load_state_dict(ends(CODEC, SHAPE)[1].state_dict())
    assert receiver.decode(payloads[0]).isfinite().all(), "a restored end starts afresh"


@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 130), (3, 0)])
def test_nothing_is_an_empty_message(shape: tuple[int, ...]) -> None:
    assert CODEC.nbytes(shape) == 0
    sender, receiver = ends(CODEC, shape)
    assert crossed(sender, receiver, torch.empty(shape)).shape == shape
    assert sender.state_dict()["messages"] == 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"use open\(\)"):
        CODEC.encode(torch.randn(4, 64))
    sender, receiver = ends(CODEC, SHAPE)
    with pytest.raises(ValueError, match=r"x has shape \(3,\)"):
        sender.encode(torch.randn(3))
    with pytest.raises(TypeError, match="float64"):
        sender.encode(torch.randn(SHAPE, dtype=torch.float64))
    with pytest.raises(ValueError, match="x is on meta; this session is for cpu"):
        sender.encode(torch.empty(SHAPE, device="meta"))
    with pytest.raises(ValueError, match="expected .* bytes"):
        receiver.decode(torch.zeros(10, dtype=torch.uint8))
    payload, room = sender.encode(tokens(SHAPE, seed=0)), torch.empty(SHAPE)
    with pytest.raises(TypeError, match="out has dtype torch.float64"):
        receiver.decode(payload, out=room.double())
    for out in (room[:1], room.view(80, 48), torch.empty(SHAPE, device="meta")):
        with pytest.raises(ValueError, match=r"out has shape .*; expected \(2, 40, 48\) on cpu"):
            receiver.decode(payload, out=out)
    assert receiver.state_dict()["messages"] == 0, "what is refused leaves no trace"
    receiver.decode(payload, out=room)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "caller",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        default_dtype,
        lambda: torch.device("meta"),
        torch.inference_mode,
        contextlib.nullcontext,  # with a graph
    ],
    ids=["autocast", "default-dtype", "default-device", "inference", "grad"],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_callers_modes_do_not_matter(caller: Callable[[], contextlib.AbstractContextManager], backend: str) -> None:
    xs = [tokens(SHAPE, seed=seed) for seed in range(4)]
    start.cache_clear()
    with kernels.backend(backend):
        with torch.no_grad():
            plain = ends(CODEC, SHAPE)
            expected = [plain[0].encode(x) for x in xs]
            decoded = [plain[1].decode(payload) for payload in expected]
        start.cache_clear()
        with caller():
            sender, receiver = ends(CODEC, SHAPE)
            payloads = [sender.encode(x.clone().requires_grad_()) for x in xs[:3]]
            found = [receiver.decode(payload) for payload in payloads[:2]]
            out = torch.empty(40, 2, 48, device="cpu", dtype=torch.float32).transpose(0, 1)
            out.requires_grad_()
            found.append(receiver.decode(payloads[2], out=out))
            sender.load_state_dict(sender.state_dict())
        payloads.append(sender.encode(xs[3]))  # and outside of it
        found.append(receiver.decode(payloads[3]))
    for a, b in zip(expected + decoded, payloads + found, strict=True):
        assert torch.equal(a, b)
        assert b is out or not b.requires_grad
