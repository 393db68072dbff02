"""Weights in pipelines: senders follow the tensors that cross the other way, all ranks alike."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lowbit.codecs import TransformQuant
from lowbit.codecs.base import Session
from lowbit.codecs.transform_quant.codec import TransformSession
from lowbit.codecs.transform_quant.memory import FELT
from lowbit.pipeline import LowBitStage, emulate_
from tests.pipeline import test_goal, toy
from tests.pipeline.test_goal import equal
from tests.processes import Ranks

STEPS = 4


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Each sequence has a sink, at a place of its own."""
    x, target = test_goal.batch(step)
    for place, sequence in enumerate(x):
        sequence[place] *= 12
    return x, target


class Uneven(toy.Block):
    """Feels later channels of its input more than earlier ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.logspace(-1, 1, x.shape[-1]))


@mock.patch.object(toy, "batch", batch)
def in_pipeline(schedule: str, stop: int = -1) -> Any:
    """Losses, and what was felt by boundary and end; restarts from a checkpoint at `stop`."""
    run, losses = toy.Run(schedule, toy.lowbit(forward=TransformQuant(), timeout=30), kind=Uneven), []
    for step in range(STEPS):
        if step == stop:
            run = run.restarted()
        run.train(step)
        run.evaluate(step)
        losses += run.losses[-toy.MICRO_BATCHES :]
    return losses, [felt(stage.codec_state_dict()) for stage in stages_of(run)]


def stages_of(run: toy.Run) -> list[LowBitStage]:
    return cast("list[LowBitStage]", run.stages)


def felt(state: Any, path: str = "") -> dict[str, Tensor]:
    """All that is felt within a checkpoint, by where it is."""
    found = {}
    for key, value in state.items():
        if key == FELT:
            found[path] = value
        elif isinstance(value, dict):
            found |= felt(value, f"{path}/{key}")
    return found


def in_one_process() -> Any:
    whole = nn.Sequential(*toy.blocks(2, Uneven))
    emulation = emulate_(whole, at=["0"], forward=TransformQuant())
    optimizer, losses = torch.optim.SGD(whole.parameters(), lr=0.1), []
    for step in range(STEPS):
        x, target = batch(step)
        optimizer.zero_grad()
        losses += toy.alone(whole, x, target)
        optimizer.step()
        emulation.step()
    ends = {
        pair.name: zip(("sender", "receiver"), pair.every_state(), strict=True)
        for pair in emulation._pairs
        if pair.lanes
    }
    return losses, felt({name: {end: states.state_dict() for end, states in both} for name, both in ends.items()})


def test_senders_feel_what_crosses_the_other_way_and_an_emulation_is_the_same(ranks: Ranks) -> None:
    (_, first), (losses, last) = ranks.run(in_pipeline, "1f1b")
    [(expected, emulated)] = ranks.run(in_one_process, ranks=1)
    assert equal(losses, expected)
    assert all("sender" in path for path in emulated)
    (gradients,), (activations,) = first[0].values(), last[0].values()
    for own, same in zip((gradients, activations), emulated.values(), strict=True):
        assert torch.equal(own, same)
    assert gradients[-1] > 100 * gradients[0] > 0
    assert (activations > 0).all()


@mock.patch.object(toy, "batch", batch)
def gains_sent() -> list[Tensor]:
    run, levels = toy.Run("1f1b", toy.lowbit(forward=TransformQuant(), timeout=30)), []
    encode = Session.encode

    def noting(session: Session, *args: Any, **named: Any) -> Tensor:
        payload = encode(session, *args, **named)
        assert isinstance(session, TransformSession)
        packed = session._geometry.layout.section(payload, "gains")
        levels.extend([torch.stack([packed & 15, packed >> 4], 1).view(-1)] if len(packed) else [])
        return payload

    with mock.patch.object(Session, "encode", noting):
        run.train(0)
    return levels


def test_gradients_of_sinks_are_coded_finer(ranks: Ranks) -> None:
    """The gains in the payloads that the last stage sends, in their order, are those of the sinks' places."""
    _, gains = ranks.run(gains_sent)
    assert len(gains) == toy.MICRO_BATCHES
    for micro_batch, levels in enumerate(gains):
        expected = [place + 40 * row for row, place in enumerate((2 * micro_batch, 2 * micro_batch + 1))]
        assert levels.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_restart_loses_nothing(ranks: Ranks, schedule: str) -> None:
    through, resumed = (ranks.run(in_pipeline, schedule, stop) for stop in (-1, 2))
    assert any(through[0][1])
    for (a, felt_a), (b, felt_b) in zip(through, resumed, strict=True):
        assert equal(a, b)
        for x, y in zip(felt_a, felt_b, strict=True):
            assert x.keys() == y.keys()
            assert all(torch.equal(x[path], y[path]) for path in x)
