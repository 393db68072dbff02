"""Weights of channels in pipelines: senders of activations follow the gradients that come back, all ranks alike."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lowbit.codecs import TransformQuant
from lowbit.codecs.transform_quant.weights import FELT
from lowbit.pipeline import LowBitStage, emulate_
from tests.pipeline import toy
from tests.pipeline.test_goal import batch, equal
from tests.processes import Ranks

STEPS = 4


class Uneven(toy.Block):
    """Feels later channels of its input more than earlier ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.logspace(-1, 1, x.shape[-1]))


@mock.patch.object(toy, "batch", batch)
def in_pipeline(schedule: str, stop: int = -1) -> Any:
    """Losses, and what was felt by boundary and end; restarts from a checkpoint at `stop`."""
    make = toy.lowbit(forward=TransformQuant(), timeout=30)
    run, losses = toy.Run(schedule, make, kind=Uneven), []
    for step in range(STEPS):
        if step == stop:
            kept = [(stage.codec_state_dict(), stage.submod.state_dict()) for stage in stages_of(run)]
            run = toy.Run(schedule, make, kind=Uneven)
            for stage, (state, weights) in zip(stages_of(run), kept, strict=True):
                stage.submod.load_state_dict(weights)
                stage.load_codec_state_dict(state)
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
        for part, wanted in zip(x.split(toy.ROWS), target.split(toy.ROWS), strict=True):
            loss = toy.loss_of(whole(part), wanted)
            loss.backward()
            losses.append(loss.detach())
        for p in whole.parameters():
            assert p.grad is not None
            p.grad /= toy.MICRO_BATCHES
        optimizer.step()
        emulation.step()
    return losses, felt(emulation.state_dict())


def test_the_sender_feels_what_comes_back_and_an_emulation_is_the_same(ranks: Ranks) -> None:
    (_, first), (losses, last) = ranks.run(in_pipeline, "1f1b")
    [(expected, emulated)] = ranks.run(in_one_process, ranks=1)
    assert equal(losses, expected)
    (own,) = first[0].values()
    assert last == [{}], "a receiver feels nothing"
    (path, same), = emulated.items()  # fmt: skip
    assert "sender" in path
    assert torch.equal(own, same)
    assert own[-1] > 100 * own[0] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_restart_loses_nothing(ranks: Ranks, schedule: str) -> None:
    through, resumed = (ranks.run(in_pipeline, schedule, stop) for stop in (-1, 2))
    assert any(through[0][1])
    for (a, felt_a), (b, felt_b) in zip(through, resumed, strict=True):
        assert equal(a, b)
        for x, y in zip(felt_a, felt_b, strict=True):
            assert x.keys() == y.keys()
            assert all(torch.equal(x[path], y[path]) for path in x)
