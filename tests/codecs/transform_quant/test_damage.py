"""Messages that are lost, repeated, reordered or changed: one error, and nothing has happened."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import TransformQuant
from lowbit.codecs.base import Session
from lowbit.codecs.transform_quant import reference
from lowbit.codecs.transform_quant.memory import Headers
from lowbit.codecs.transform_quant.reference import ENTRY, LANES, TransformGeometry, body_nbytes
from tests.codecs.transform_quant.messages import crossed, same_state
from tests.codecs.transform_quant.test_transform_quant import ends, tokens

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
    """Where each kind of byte lies."""
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
    state = receiver.state_dict()
    payload = sender.encode(x, training=training)
    geo, noticed = sender._geometry, {}
    for name, spans in parts(payload, geo).items():
        places = [i for span in spans for i in span]
        results = []
        for i in places[:: max(1, len(places) // 40)]:
            for bit in (0, 5):
                changed = payload.clone()
                changed[i] ^= 1 << bit
                results.append(refused(receiver, changed, training, state))
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


def refused(receiver: Session, payload: Tensor, training: bool, state: dict) -> bool:
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
        after = receiver.state_dict()
        assert torch.equal(after["directions"], state["directions"])
        assert (after["messages"], after["digest"]) == (state["messages"], state["digest"])
        return True
    receiver.load_state_dict(state)
    return False


def test_what_is_wrong_with_damaged_streams_is_said() -> None:
    sender, receiver = ends(TransformQuant(), (40, 64))
    payload = sender.encode(tokens((40, 64), seed=0))
    start = sender._geometry.layout.offsets["streams"]
    payload[start + 4 * ENTRY] ^= 1
    with pytest.raises(ValueError, match="this end expects training message 0 .* with streams that end as expected"):
        receiver.decode(payload)
    payload[start : start + 4].view(torch.int32).fill_(-1)
    for backend in ("reference", "cpu"):
        with kernels.backend(backend), pytest.raises(ValueError, match="streams that end as expected"):
            receiver.decode(payload)


def test_where_the_host_knows_late_a_wrong_message_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose headers the host compares a message later."""
    sender, receiver = ends(TransformQuant())
    payloads = [sender.encode(tokens(seed=s)) for s in range(3)]
    check = Headers.check
    monkeypatch.setattr(Headers, "check", lambda self, wait=False: check(self) if wait else None)
    assert receiver.decode(payloads[0]).isfinite().all()
    before = receiver._memory.directions
    damaged = payloads[1].clone()
    damaged[sender._geometry.layout.offsets["streams"] + 4 * ENTRY] ^= 1  # a state
    assert receiver.decode(damaged).isnan().all()
    assert torch.equal(receiver._memory.directions, before)
    with pytest.raises(ValueError, match="streams that end as expected"):
        receiver.state_dict()


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("scalar", range(3))
@pytest.mark.parametrize("value", [-(1 << 31), (1 << 31) - 1, 1 << 20, -9000])
def test_scalars_of_any_size_harm_nothing(name: str, scalar: int, value: int) -> None:
    sender, receiver = ends(TransformQuant(), (6, 40))
    payload = sender.encode(tokens((6, 40), seed=0))
    sender._geometry.layout.section(payload, "scalars", torch.int32)[scalar] = value
    with kernels.backend(name), contextlib.suppress(ValueError):
        receiver.decode(payload)
