"""A rate that all ranks choose in the warm-up, from what a stage hands over."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowbit.codecs import RateGoal, TransformQuant
from lowbit.pipeline import choose_rate
from lowbit.pipeline.stage import LowBitStage
from tests.lowbit.pipeline import toy
from tests.processes import Ranks, on_ranks

WARM, MORE = 2, 4  # steps before


def coded(schedule: str, stop: int = -1) -> Any:
    """Losses, the formats, and bytes of each step, with other rates twice; restarts from a checkpoint before `stop`."""
    run = toy.Run(schedule, toy.lowbit(warmup_steps=WARM, timeout=30))
    codecs, sent = (TransformQuant(), TransformQuant(step="message")), []
    for step in range(6):
        if step == stop:
            run.make = toy.lowbit(forward=codecs[0], backward=codecs[1], warmup_steps=WARM, timeout=30)
            run = run.restarted()
        if step in (WARM, MORE):
            x = run.batch(step)[0][: toy.ROWS] if run.first else None
            goal = RateGoal(decibels=20 if step == WARM else 30)
            codecs = choose_rate(goal, x), choose_rate(goal.for_gradients(), x)
            for stage in run.stages:
                stage.set_codecs(*codecs, keep_state=True)
        for stage in run.stages:
            stage.looks_ahead = step + 1 not in (WARM, MORE)
            stage.traffic.reset()
        run.train(step)
        sent.append(sum(stage.traffic.forward_bytes for stage in run.stages))
    return run.losses, codecs, sent


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_all_ranks_change_to_the_same_rates_and_a_restart_continues_with_them(ranks: Ranks, schedule: str) -> None:
    through, resumed = (ranks.run(coded, schedule, stop) for stop in (-1, MORE + 1))
    assert through[0][1] == through[1][1]
    assert through[0][1][0].bits > through[0][1][1].bits > 3
    sent = through[0][2]
    assert sent[0] > sent[MORE] > sent[MORE - 1] == sent[WARM]
    for a, b in zip(through, resumed, strict=True):
        assert toy.same(a[0], b[0])
        assert a[1:] == b[1:]


@on_ranks
def test_the_highest_rate_counts_and_codecs_keep_what_they_learned() -> None:
    x, goal = toy.batch(dist.get_rank())[0] * (1 + torch.arange(toy.WIDTH) * dist.get_rank()), RateGoal()
    own = [goal.choose(toy.batch(rank)[0] * (1 + torch.arange(toy.WIDTH) * rank)).bits for rank in range(2)]
    assert own[0] != own[1]
    assert choose_rate(goal, x).bits == max(own)  # pyright: ignore[reportArgumentType]
    assert choose_rate(goal, None if dist.get_rank() else x).bits == own[0]
    tiny = torch.ones(1)
    assert choose_rate(goal, tiny if dist.get_rank() else x) == TransformQuant(), "which no rate suits"
    with pytest.raises(ValueError, match="x is None on all ranks"):
        choose_rate(goal)
    wrong: Any = "activations" if dist.get_rank() else x
    with pytest.raises(ValueError, match="rank 1 of the group could not choose a rate: AttributeError"):  # on both
        choose_rate(goal, wrong)

    run = toy.Run("1f1b", toy.lowbit(timeout=30))
    for step in range(2):
        run.train(step)
    [stage] = run.stages
    assert isinstance(stage, LowBitStage)
    before = stage.codec_state_dict()
    for keep in (True, False):
        stage.set_codecs(TransformQuant(bits=9), TransformQuant(bits=9, step="message"), keep_state=keep)
        after = stage.codec_state_dict()
        assert before["lanes"].keys() == (after["lanes"].keys() if keep else before["lanes"].keys() | after["lanes"])
        assert bool(after["lanes"]) == keep
