"""Ends that learn directions from the messages between them; lost, repeated, reordered or changed ones are errors."""

import contextlib
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import TransformQuant
from lowbit.codecs.base import Session
from lowbit.codecs.transform_quant import reference
from lowbit.codecs.transform_quant.basis import start
from lowbit.codecs.transform_quant.memory import Headers
from lowbit.codecs.transform_quant.reference import ENTRY, LANES, TransformGeometry, body_nbytes
from tests.codecs.transform_quant.messages import SHAPE, crossed, decibels, ends, same_state, tokens
from tests.refused import refused

CODEC = TransformQuant()


def test_evaluation_of_another_shape_uses_the_basis_and_leaves_no_trace() -> None:
    sender, receiver = ends()
    for seed in range(4):
        crossed(sender, receiver, tokens(seed=seed))
    before = ends()
    for new, old in zip(before, (sender, receiver), strict=True):
        new.load_state_dict(old.state_dict())
    small = {"shape": (1, 30, 48), "dtype": torch.bfloat16}
    there, here = sender.sharing_state(**small), receiver.sharing_state(**small)
    x = tokens((1, 30, 48), seed=8).bfloat16()
    y = crossed(there, here, x, training=False)
    assert y.dtype == torch.bfloat16
    assert decibels(x, y) > 8
    same_state(sender, before[0])
    same_state(receiver, before[1])
    crossed(there, here, x)  # in training, the other shape's messages count among the first's
    crossed(sender, receiver, tokens(seed=9))
    assert sender.state_dict()["messages"] == before[0].state_dict()["messages"] + 2
    same_state(sender, receiver)


def test_a_restart_continues_bit_for_bit() -> None:
    sender, receiver = ends()
    for seed in range(3):
        crossed(sender, receiver, tokens(seed=seed))
    again = ends()
    again[0].load_state_dict(sender.state_dict())
    again[1].load_state_dict(receiver.state_dict())
    for seed in range(3, 6):
        payload = sender.encode(tokens(seed=seed))
        assert torch.equal(payload, again[0].encode(tokens(seed=seed)))
        assert torch.equal(receiver.decode(payload), again[1].decode(payload))
    fresh, _ = ends()
    sender.load_state_dict({})  # of before the first message
    same_state(sender, fresh)
    assert torch.equal(sender.encode(tokens(seed=0)), fresh.encode(tokens(seed=0)))
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
    (sender, receiver), (other, _) = ends(), ends()
    first, second, third = (sender.encode(tokens(seed=s)) for s in range(3))
    strange = [other.encode(tokens(seed=s)) for s in (5, 6, 2)][-1]
    decode = receiver.decode
    refused((lambda: decode(second), ValueError, "training message 1 .* expects training message 0"))
    decode(first)
    refused(
        (lambda: decode(first), ValueError, "training message 0 .* expects training message 1"),
        (lambda: decode(second, training=False), ValueError, "expects evaluation message 1"),
    )
    before = receiver.state_dict()
    decode(second)
    refused((lambda: decode(strange), ValueError, "message 2 after directions .* expects training message 2"))
    receiver.load_state_dict(before)
    decode(second)
    decode(third)


def test_where_the_host_knows_late_a_wrong_message_is_nan_and_leaves_the_directions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare headers one message later, as the host does for a GPU."""
    sender, receiver = ends()
    payloads = [sender.encode(tokens(seed=s)) for s in range(4)]
    damaged = payloads[1].clone()
    damaged[sender._geometry.layout.offsets["streams"] + 4 * ENTRY] ^= 1  # a state
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
    receiver.load_state_dict(ends()[1].state_dict())
    assert receiver.decode(payloads[0]).isfinite().all(), "a restored end starts afresh"
    monkeypatch.setattr(Headers, "check", lambda self, wait=False: check(self) if wait else None)
    assert receiver.decode(damaged).isnan().all()
    with pytest.raises(ValueError, match="streams that end as expected"):
        receiver.state_dict()


@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 130), (3, 0)])
def test_nothing_is_an_empty_message(shape: tuple[int, ...]) -> None:
    assert CODEC.nbytes(shape) == 0
    sender, receiver = ends(CODEC, shape)
    assert crossed(sender, receiver, torch.empty(shape)).shape == shape
    assert sender.state_dict()["messages"] == 0


def test_bad_input() -> None:
    sender, receiver = ends()
    payload, room = sender.encode(tokens(seed=0)), torch.empty(SHAPE)
    decode, outs = partial(receiver.decode, payload), (room[:1], room.view(80, 48), room.to("meta"))
    text = r"out has shape .*; expected \(2, 40, 48\) on cpu"
    refused(
        (lambda: CODEC.encode(torch.randn(4, 64)), ValueError, r"use open\(\)"),
        (lambda: sender.encode(torch.randn(3)), ValueError, r"x has shape \(3,\)"),
        (lambda: sender.encode(room.double()), TypeError, "float64"),
        (lambda: sender.encode(room.to("meta")), ValueError, "x is on meta; this session is for cpu"),
        (lambda: receiver.decode(payload[:10]), ValueError, "expected .* bytes"),
        (lambda: decode(out=room.double()), TypeError, "out has dtype torch.float64"),
        *((partial(decode, out=out), ValueError, text) for out in outs),
    )
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
    xs = [tokens(seed=seed) for seed in range(4)]
    start.cache_clear()
    with kernels.backend(backend):
        with torch.no_grad():
            plain = ends()
            expected = [plain[0].encode(x) for x in xs]
            decoded = [plain[1].decode(payload) for payload in expected]
        start.cache_clear()
        with caller():
            sender, receiver = ends()
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


ALWAYS = ("header", "slots", "lengths", "directions", "table")
"""Parts of which no change goes unnoticed."""
NEARLY = {"states": 0.9, "words": 0.9, "levels": 0.3, "tokens": 0.5}
"""Changes that lead to other symbols are noticed unless the states end as they must by chance.

A level or token may have a scale of which no code depends: below the least that tables have, or of zeros.
"""
SILENT = ("scalars", "norms", "weights", "gains", "beyond", "lowest", "padding")
"""Numbers that nothing else depends on. Of the scalars that is the largest norm, and the step's lowest bits."""


MAYBE_EMPTY = ("norms", "gains", "beyond", "lowest")


def parts(payload: Tensor, geo: TransformGeometry) -> dict[str, list[range]]:
    """The position of each kind of byte."""
    at, sizes = geo.layout.offsets, geo.layout.sizes
    found = {name: [range(at[name], at[name] + size)] for name, size in sizes.items() if name != "streams"}
    start = at["streams"]
    entries = geo.layout.section(payload, "streams")[: 4 * ENTRY * geo.streams].view(torch.int32).view(-1, ENTRY)
    found["table"] = [range(start, start := start + 4 * ENTRY * geo.streams)]
    for words, beyond, raw in entries.tolist():
        names = ("states", "words", "beyond", "lowest")
        for name, size in zip(names, (4 * LANES, 2 * words, 2 * beyond, raw), strict=True):
            found.setdefault(name, []).append(range(start, start := start + size))
        assert body_nbytes(words, beyond, raw) == 4 * LANES + 2 * words + 2 * beyond + raw
    found["padding"] = [range(start, geo.layout.nbytes)]
    return found


@pytest.mark.parametrize("step", ["token", "message"])
@pytest.mark.parametrize("training", [True, False])
def test_changed_bytes(step: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STREAM", 1 << 10)  # two streams
    shape = (64, 32)
    sender, receiver = ends(TransformQuant(step=step), shape)
    for seed in range(2):
        crossed(sender, receiver, tokens(shape, seed=seed))
    x = tokens(shape, seed=2)
    x[5], x[9, 3] = 0, 1e4  # zeros, and an outlier beyond the symbols
    x[:, 7] *= 300
    before = ends(TransformQuant(step=step), shape)[1]
    before.load_state_dict(receiver.state_dict())
    payload = sender.encode(x, training=training)
    geo, noticed = sender._geometry, {}
    for name, spans in parts(payload, geo).items():
        places = [i for span in spans for i in span]
        results = []
        for i in places[:: max(1, len(places) // 40)]:
            for bit in (0, 5):
                changed = payload.clone()
                changed[i] ^= 1 << bit
                results.append(noticed_by(receiver, changed, training, before))
        noticed[name] = results
    assert not any(len(results) == 0 for name, results in noticed.items() if name not in MAYBE_EMPTY)
    for name in ALWAYS:
        assert all(noticed[name]), name
    for name, share in NEARLY.items():
        assert sum(noticed[name]) >= share * len(noticed[name]), (name, sum(noticed[name]), len(noticed[name]))
    assert noticed.keys() == {*ALWAYS, *NEARLY, *SILENT}
    assert not any(any(noticed[name]) for name in ("padding", "weights", *MAYBE_EMPTY))
    receiver.decode(payload, training=training)
    same_state(receiver, sender)


def noticed_by(receiver: Session, payload: Tensor, training: bool, before: Session) -> bool:
    """Whether a message is an error that leaves no trace; else the state is put back."""
    out, text = torch.full(receiver.shape, 7.0), ""
    try:
        receiver.decode(payload, out=out, training=training)
    except ValueError as error:
        text = str(error)
    if text:
        assert text.startswith("payload is ")
        assert "this end expects " in text
        assert "\n" not in text
        assert (out == 7).all()
        same_state(receiver, before)
        return True
    receiver.load_state_dict(before.state_dict())
    return False


def test_what_is_wrong_with_damaged_streams_is_said() -> None:
    sender, receiver = ends(TransformQuant(), (40, 64))
    payload = sender.encode(tokens((40, 64), seed=0))
    start = sender._geometry.layout.offsets["streams"]
    state, words = payload.clone(), payload
    state[start + 4 * ENTRY] ^= 1
    words[start : start + 4].view(torch.int32).fill_(-1)
    text = "this end expects training message 0 .* with streams that end as expected"
    for backend in ("reference", "cpu"):
        with kernels.backend(backend):
            refused(*((partial(receiver.decode, damaged), ValueError, text) for damaged in (state, words)))


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("scalar", range(3))
def test_scalars_of_any_size_harm_nothing(name: str, scalar: int) -> None:
    for value in (-(1 << 31), (1 << 31) - 1, 1 << 20, -9000):
        sender, receiver = ends(TransformQuant(), (6, 40))
        payload = sender.encode(tokens((6, 40), seed=0))
        sender._geometry.layout.section(payload, "scalars", torch.int32)[scalar] = value
        with kernels.backend(name), contextlib.suppress(ValueError):
            receiver.decode(payload)
