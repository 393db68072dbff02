"""Ends that learn directions from the messages between them; lost, repeated, reordered or changed ones are errors."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import Session, TransformQuant
from lowbit.codecs.transform_quant import reference
from lowbit.codecs.transform_quant.basis import start
from lowbit.codecs.transform_quant.memory import FELT, Headers
from lowbit.codecs.transform_quant.reference import ENTRY, LANES, TransformGeometry, body_nbytes
from tests.lowbit.codecs.transform_quant.messages import SHAPE, crossed, decibels, ends, same, tokens
from tests.refused import refused

CODEC = TransformQuant()


def test_evaluation_of_another_shape_uses_the_basis_and_leaves_no_trace() -> None:
    sender, receiver = ends(after=4)
    before = sender.state_dict(), receiver.state_dict()
    small = {"shape": (1, 30, 48), "dtype": torch.bfloat16}
    there, here = sender.sharing_state(**small), receiver.sharing_state(**small)
    x = tokens((1, 30, 48), seed=8).bfloat16()
    y = crossed(there, here, x, training=False)
    assert y.dtype == torch.bfloat16
    assert decibels(x, y) > 8
    same((sender.state_dict(), receiver.state_dict()), before)
    crossed(there, here, x)  # in training, the other shape's messages count among the first's
    crossed(sender, receiver, tokens(seed=9))
    assert sender.state_dict()["messages"] == before[0]["messages"] + 2
    same(sender.state_dict(), receiver.state_dict())


def test_a_state_whose_directions_lie_in_memory_by_columns_is_the_same_state():
    sender, receiver = ends(after=3)
    again = ends()
    for end, from_ in zip(again, (sender, receiver), strict=True):
        state = from_.state_dict()
        end.load_state_dict(state | {"directions": state["directions"].t().contiguous().t()})
    x = tokens(seed=9)
    assert torch.equal(crossed(*again, x), crossed(sender, receiver, x))


def test_a_restart_continues_bit_for_bit() -> None:
    (sender, receiver), again = ends(after=3), ends()
    channels = torch.logspace(-3, 0, 48)
    sender.observe(tokens(seed=0) * channels)
    sender.end_step()
    sender.observe(tokens(seed=1) * channels.flip(0))  # in the step that the checkpoint ends
    again[0].load_state_dict(sender.state_dict())
    again[1].load_state_dict(receiver.state_dict())
    for end in (sender, again[0]):
        end.end_step()
    for seed in range(3, 6):
        payload = sender.encode(tokens(seed=seed))
        assert torch.equal(payload, again[0].encode(tokens(seed=seed)))
        assert torch.equal(receiver.decode(payload), again[1].decode(payload))
    fresh, _ = ends()
    sender.load_state_dict({})  # of before the first message
    same(sender.state_dict(), fresh.state_dict())
    assert torch.equal(sender.encode(tokens(seed=0)), fresh.encode(tokens(seed=0)))


def test_a_state_that_cannot_be_one_is_refused() -> None:
    (sender, _), ones = ends(after=1), torch.ones(48, dtype=torch.float64)
    load, state = sender.load_state_dict, sender.state_dict()
    others = [CODEC.open(shape=shape, dtype=torch.float32).load_state_dict for shape in ((4, 64), (4, 16))]
    text = r"state has directions .* \(\d+, 48\); expected .* \(\d+, \d\d\)"
    refused(
        (lambda: load({"5": torch.zeros(2)}), ValueError, "it is not a state of TransformQuant"),
        *((partial(other, state), ValueError, text) for other in others),
        *((partial(load, state | {FELT: felt}), ValueError, "state has felt")
          for felt in (ones[:5], ones.float(), -ones, torch.nan * ones, "ones")),
    )  # fmt: skip


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
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16), "default-dtype": default_dtype,
    "default-device": partial(torch.device, "meta"), "inference": torch.inference_mode, "grad": contextlib.nullcontext,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_callers_modes_do_not_matter(mode: str, backend: str) -> None:
    xs = [tokens(seed=seed) for seed in range(4)]
    start.cache_clear()
    with kernels.backend(backend):
        with torch.no_grad():
            sender, receiver = ends()
            expected = [sender.encode(x) for x in xs]
            decoded = [receiver.decode(payload) for payload in expected]
        start.cache_clear()
        with MODES[mode]():
            sender, receiver = ends()
            payloads = [sender.encode(x.clone().requires_grad_()) for x in xs[:3]]
            found = [receiver.decode(payload) for payload in payloads[:2]]
            out = torch.empty(40, 2, 48, device="cpu", dtype=torch.float32).transpose(0, 1).requires_grad_()
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


def parts(payload: Tensor, geo: TransformGeometry) -> dict[str, list[int]]:
    """The positions of each kind of byte."""
    at, sizes = geo.layout.offsets, geo.layout.sizes
    found = {name: [*range(at[name], at[name] + size)] for name, size in sizes.items() if name != "streams"}
    start = at["streams"]
    entries = geo.layout.section(payload, "streams")[: 4 * ENTRY * geo.streams].view(torch.int32).view(-1, ENTRY)
    found["table"] = [*range(start, start := start + 4 * ENTRY * geo.streams)]
    for words, beyond, raw in entries.tolist():
        kinds = {"states": 4 * LANES, "words": 2 * words, "beyond": 2 * beyond, "lowest": raw}
        for name, size in kinds.items():
            found.setdefault(name, []).extend(range(start, start := start + size))
        assert body_nbytes(words, beyond, raw) == sum(kinds.values())
    return found | {"padding": [*range(start, geo.layout.nbytes)]}


@pytest.mark.parametrize("step", ["token", "message"])
@pytest.mark.parametrize("training", [True, False])
def test_changed_bytes(step: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STREAM", 1 << 10)  # two streams
    shape = (64, 32)
    sender, receiver = ends(TransformQuant(step=step), shape, after=2)
    x = tokens(shape, seed=2)
    x[5], x[9, 3] = 0, 1e4  # zeros, and an outlier beyond the symbols
    x[:, 7] *= 300
    before, noticed = receiver.state_dict(), {}
    payload = sender.encode(x, training=training)
    for name, places in parts(payload, sender._geometry).items():
        assert places or name in MAYBE_EMPTY
        noticed[name] = []
        for place, bit in product(places[:: max(1, len(places) // 40)], (0, 5)):
            changed = payload.clone()
            changed[place] ^= 1 << bit
            noticed[name].append(noticed_by(receiver, changed, training, before))
    for name in ALWAYS:
        assert all(noticed[name]), name
    for name, share in NEARLY.items():
        assert sum(noticed[name]) >= share * len(noticed[name]), (name, sum(noticed[name]), len(noticed[name]))
    assert noticed.keys() == {*ALWAYS, *NEARLY, *SILENT}
    assert not any(any(noticed[name]) for name in ("padding", "weights", *MAYBE_EMPTY))
    receiver.decode(payload, training=training)
    same(receiver.state_dict(), sender.state_dict())


def noticed_by(receiver: Session, payload: Tensor, training: bool, before: dict[str, Any]) -> bool:
    """Whether a message is an error that leaves no trace; else the state is put back."""
    out, text = torch.full(receiver.shape, 7.0), ""
    try:
        receiver.decode(payload, out=out, training=training)
    except ValueError as error:
        text = str(error)
    if not text:
        receiver.load_state_dict(before)
        return False
    assert re.fullmatch("payload is .*; this end expects .*", text), text
    assert (out == 7).all()
    same(receiver.state_dict(), before)
    return True


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_wrong_with_damaged_streams_is_said_and_scalars_of_any_size_harm_nothing(backend: str) -> None:
    sender, receiver = ends(CODEC, (40, 64))
    payload = sender.encode(tokens((40, 64), seed=0), training=False)
    decode, layout = partial(receiver.decode, training=False), sender._geometry.layout
    start = layout.offsets["streams"]
    state, words = payload.clone(), payload.clone()
    state[start + 4 * ENTRY] ^= 1
    words[start : start + 4].view(torch.int32).fill_(-1)
    text = "this end expects evaluation message 0 .* with streams that end as expected"
    with kernels.backend(backend):
        refused(*((partial(decode, damaged), ValueError, text) for damaged in (state, words)))
        for scalar, value in product(range(3), (-(1 << 31), (1 << 31) - 1, 1 << 20, -9000)):
            damaged = payload.clone()
            layout.section(damaged, "scalars", torch.int32)[scalar] = value
            with contextlib.suppress(ValueError):
                decode(damaged)


def test_bytes_between_those_of_a_strided_payload_stay() -> None:
    x = torch.randn(64, 64)
    own, other = (TransformQuant().open(shape=(64, 64), dtype=torch.float32) for _ in range(2))
    around = torch.full((2 * own.nbytes(),), 7, dtype=torch.uint8)
    own.encode(x, out=around[::2])
    assert torch.equal(around[::2], other.encode(x))
    assert (around[1::2] == 7).all()


def test_no_gradients_are_observed_in_an_empty_batch() -> None:
    session = TransformQuant(bits=3, step="message").open(shape=(0, 64), dtype=torch.float32)
    assert session.observe(torch.zeros(0, 64)) is None
