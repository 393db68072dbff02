"""What senders follow: activations and gradients that cross, for weights, and for rates that reach a goal in loss."""

import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lowbit.codecs import TransformQuant
from lowbit.codecs.base import Session
from lowbit.codecs.transform_quant.codec import TransformSession
from lowbit.codecs.transform_quant.memory import FELT
from lowbit.pipeline import emulate_
from tests.lowbit.pipeline import toy
from tests.processes import Ranks, on_ranks
from tests.refused import refused

GOAL = TransformQuant(bits="auto", nats=0.01)
WARM, RAISED = 3, 5  # steps before


def batch(step: int) -> tuple[Tensor, Tensor]:
    """More tokens than `toy.batch` has."""
    return toy.data(100 + step, length=40)


def choices(run: toy.Run) -> dict[str, Any]:
    return {name: codec for stage in run.stages for name, codec in stage.chosen().items()}


def in_pipeline(schedule: str, stop: int = -1) -> Any:
    """Losses, choices before and after rates are raised, and bytes of each step; restarts from a checkpoint."""
    run = toy.Run(schedule, toy.lowbit(forward=GOAL, warmup_steps=WARM, timeout=30), batch=batch)
    chosen, sent = [], []
    for step in range(8):
        if step == stop:
            run = run.restarted()
        if step == RAISED:
            chosen.append(choices(run))
            for stage in run.stages:
                stage.raise_rates(1.5)
        for stage in run.stages:
            stage.looks_ahead = step != RAISED - 1
            stage.traffic.reset()
        run.train(step)
        run.evaluate(step)
        sent.append(sum(stage.traffic.forward_bytes for stage in run.stages))
    return run.losses, [*chosen, choices(run)], sent


def in_one_process() -> Any:
    run = toy.Emulated(batch=batch, forward=GOAL, warmup_steps=WARM)
    for step in range(8):
        if step == RAISED:
            run.emulation.raise_rates(1.5)
        run.train(step)
    return run.losses, run.emulation.chosen()


def bits(codec: Any) -> float:
    return codec.bits


def test_both_ends_choose_by_loss_and_raise_together(ranks: Ranks) -> None:
    first, last = ranks.run(in_pipeline, "1f1b")
    [(expected, chosen)] = ranks.run(in_one_process, ranks=1)
    assert toy.same(last[0], expected)
    assert chosen == first[1][1] | last[1][1]
    (forward, raised), (backward, more) = (
        [next(iter(each.values())) for each in outcome[1]] for outcome in (first, last)
    )
    assert bits(raised) == pytest.approx(min(16, bits(forward) + 1.5))
    assert bits(more) == pytest.approx(min(16, bits(backward) + 1.5))
    assert backward.step == "message"
    assert 0.9 < bits(forward) - bits(backward) < 2, "gradients get a bit less"
    sent = first[2]
    assert sent[0] > sent[RAISED] > sent[RAISED - 1]


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble", "zbv"])
def test_schedules_choose_alike(ranks: Ranks, schedule: str) -> None:
    outcomes = ranks.run(in_pipeline, schedule)
    for _, chosen, _ in outcomes:
        assert chosen[0]
        assert all(0 < bits(codec) <= 16 for codec in chosen[0].values())
    boundaries = 3 if schedule != "gpipe" else 1
    assert sum(len(chosen[0]) for _, chosen, _ in outcomes) == 2 * (boundaries - (schedule == "zbv"))


@pytest.mark.parametrize("stop", [WARM - 1, WARM, RAISED + 1])
def test_a_restart_keeps_what_was_seen_chosen_and_raised(ranks: Ranks, stop: int) -> None:
    through, resumed = ranks.run(in_pipeline, "1f1b"), ranks.run(in_pipeline, "1f1b", stop)
    for a, b in zip(through, resumed, strict=True):
        assert toy.same(a[0], b[0])
        assert a[1:] == b[1:]


def test_an_emulation_takes_batches_in_any_order() -> None:
    found = []
    for order in ((0, 1), (1, 0)):
        model = nn.Sequential(*toy.blocks(2))
        emulation = emulate_(model, at=["0"], forward=GOAL, warmup_steps=2)
        for number in range(2):
            losses = [toy.loss_of(model(part), batch(1)[1][:2]) for part in batch(1)[0].split(2)]
            for i in order if not number else (0, 1):
                losses[i].backward()
            emulation.step()
        found.append(emulation.chosen())
    assert found[0] != found[1], "each looks at the batch whose gradient comes first"


def test_no_gradient_is_a_warning_and_the_rate_of_none(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*toy.blocks(2))
    emulation = emulate_(model, at=["0"], forward=GOAL, warmup_steps=2)
    for _ in range(3):
        with torch.no_grad():
            model(batch(0)[0])
        emulation.step()
    assert "had no gradient before the last step of the warm-up; using 3 bits" in caplog.text
    [codec] = emulation.chosen().values()
    assert bits(codec) == pytest.approx(TransformQuant().bits_per_element(batch(0)[0].shape), abs=0.1)


def test_rates_are_raised_by_a_number_and_after_the_warm_up() -> None:
    emulate = partial(emulate_, nn.Sequential(nn.Identity()), at=["0"], forward=GOAL)
    short = "warmup_steps is 1, and forward .*nats=0.01.*by gradients; allowed: at least 2"
    raise_rates: Any = emulate(warmup_steps=2).raise_rates
    wrong = (0, -1.0, math.nan, math.inf, "1", True)
    refused(
        (lambda: emulate(warmup_steps=1), ValueError, short),
        *((partial(raise_rates, bits), ValueError, "bits is .*; allowed: a number above 0") for bits in wrong),
        (lambda: raise_rates(1.0), ValueError, "rates cannot be raised before they are chosen"),
    )


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
        if pair.lanes:
            sender, receiver = (states.state_dict() for states in pair.every_state())
            ends[pair.name] = {"sender": sender, "receiver": receiver}
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
