"""What senders follow: activations and gradients that cross, for their weights."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lowbit.codecs import TransformQuant
from lowbit.codecs.base import Session
from lowbit.codecs.transform_quant.codec import TransformSession
from lowbit.codecs.transform_quant.memory import FELT
from tests.lowbit.pipeline import toy
from tests.processes import Ranks, on_ranks


def batch(step: int) -> tuple[Tensor, Tensor]:
    """More tokens than `toy.batch` has."""
    return toy.data(100 + step, length=40)


STEPS = 4


def with_sinks(step: int) -> tuple[Tensor, Tensor]:
    """Each sequence has a sink, at a place of its own."""
    x, target = batch(step)
    for place, sequence in enumerate(x):
        sequence[place] *= 12
    return x, target


class Uneven(toy.Block):
    """Feels later channels of its input more than earlier ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.logspace(-1, 1, x.shape[-1]))


def weighted(schedule: str, stop: int = -1) -> Any:
    """Losses, and what was felt by boundary and end; restarts from a checkpoint at `stop`."""
    run = toy.Run(schedule, toy.lowbit(forward=TransformQuant(), timeout=30), kind=Uneven, batch=with_sinks)
    for step in range(STEPS):
        if step == stop:
            run = run.restarted()
        run.train(step)
        run.evaluate(step)
    return run.losses, [felt(stage.codec_state_dict()) for stage in run.stages]


def felt(state: Any, path: str = "") -> dict[str, Tensor]:
    """All that is felt within a checkpoint, by where it is."""
    found = {}
    for key, value in state.items():
        if key == FELT:
            found[path] = value
        elif isinstance(value, dict):
            found |= felt(value, f"{path}/{key}")
    return found


def weighted_alone() -> Any:
    run, ends = toy.Emulated(Uneven, with_sinks, forward=TransformQuant()), {}
    for step in range(STEPS):
        run.train(step)
    for pair in run.emulation._pairs:
        for sender, receiver in pair.lanes.values():
            ends[sender.name] = {"sender": sender.states.state_dict(), "receiver": receiver.states.state_dict()}
    return run.losses, felt(ends)


def test_senders_feel_what_crosses_the_other_way_and_an_emulation_is_the_same(ranks: Ranks) -> None:
    (_, first), (losses, last) = ranks.run(weighted, "1f1b")
    [(expected, emulated)] = ranks.run(weighted_alone, ranks=1)
    assert toy.same(losses, expected)
    assert all("sender" in path for path in emulated)
    (gradients,), (activations,) = first[0].values(), last[0].values()
    for own, same in zip((gradients, activations), emulated.values(), strict=True):
        assert torch.equal(own, same)
    assert gradients[-1] > 100 * gradients[0] > 0
    assert (activations > 0).all()


@on_ranks
def test_gradients_of_sinks_are_coded_finer() -> None:
    """The gains in the payloads that the last stage sends, in their order, are those of the sinks' places."""
    run = toy.Run("1f1b", toy.lowbit(forward=TransformQuant(), timeout=30), batch=with_sinks)
    gains, encode = [], Session.encode

    def noting(session: Session, *args: Any, **named: Any) -> Tensor:
        payload = encode(session, *args, **named)
        assert isinstance(session, TransformSession)
        packed = session._geometry.layout.section(payload, "gains")
        gains.extend([torch.stack([packed & 15, packed >> 4], 1).view(-1)] if packed.any() else [])
        return payload

    with mock.patch.object(Session, "encode", noting):
        run.train(0)
    if run.last:
        assert len(gains) == toy.MICRO_BATCHES
        for micro_batch, levels in enumerate(gains):
            expected = [place + 40 * row for row, place in enumerate((2 * micro_batch, 2 * micro_batch + 1))]
            assert levels.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_restart_loses_nothing(ranks: Ranks, schedule: str) -> None:
    through, resumed = (ranks.run(weighted, schedule, stop) for stop in (-1, 2))
    assert any(through[0][1])
    for (a, felt_a), (b, felt_b) in zip(through, resumed, strict=True):
        assert toy.same(a, b)
        for x, y in zip(felt_a, felt_b, strict=True):
            assert x.keys() == y.keys()
            assert all(torch.equal(x[path], y[path]) for path in x)
