"""Ranks that do not fit together, and ranks that die: the same clear error everywhere, and no hang."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lowbit.codecs import Cast, GroupInt, TransformQuant
from lowbit.pipeline import LowBitStage
from lowbit.pipeline.layouts import pipeline_number
from lowbit.wire.agreement import Agreement, Facts
from lowbit.wire.tags import PIPELINES
from tests.pipeline import toy
from tests.pipeline.toy import INT4, INT6
from tests.processes import Failure, Ranks, on_ranks

FIT = {"forward": INT4, "backward": INT6}


def unlike(schedule: str, changes: Mapping[int, Mapping[str, Any]], steps: int = 0) -> None:
    options = {**FIT, "timeout": 30.0, **changes.get(dist.get_rank(), {})}
    run = toy.Run(schedule, toy.lowbit(**options))
    for stage in run.stages:
        stage.load_codec_state_dict({"steps": steps * dist.get_rank(), "lanes": {}})
    run.train(0)


@pytest.mark.parametrize(
    ("schedule", "changes", "said"),
    [
        ("1f1b", {1: {"forward": GroupInt(bits=3)}}, "boundary 0 forward codec: GroupInt(bits=4"),
        ("1f1b", {0: {"backward": Cast()}}, "boundary 0 backward codec: Cast("),
        ("zbv", {1: {"warmup_steps": 5}}, "warm-up steps: 0 on rank 0 (stage 0) and rank 0 (stage 3); 5 on"),
    ],
)
def test_other_formats_are_the_same_error_everywhere(ranks: Ranks, schedule: str, changes: Any, said: str):
    assert said in toy.disagreement(toy.timely(ranks, unlike, schedule, changes))


def unfit(forward: Mapping[int, Any], state: Mapping[str, Any], steps: int) -> None:
    """One boundary of three cannot code what crosses, or go on from what it is given."""
    rest = dict.fromkeys(range(3), INT4)
    options = {"forward": rest | dict(forward), "backward": INT6, "warmup_steps": 1}
    run = toy.Run("1f1b", toy.lowbit(**options, timeout=30.0))
    for stage in run.stages:
        own = {n: s for n, s in state.items() if stage.stage_index in (1, 2)}
        stage.load_codec_state_dict({"steps": steps, "lanes": own})
    run.train(0)


THREE = {"directions": torch.zeros(8, toy.WIDTH), "messages": 5, "digest": 0}


@pytest.mark.parametrize(
    ("codec", "state", "steps", "said"),
    [
        (TransformQuant(bits=1), {}, 0, "boundary 1 forward: bits is 1, .* allowed: at least"),
        (TransformQuant(), THREE, 5, r"state "),
        (TransformQuant(bits="auto"), {}, 5, "width 24: .*'auto'.* saved after the warm-up"),
    ],
    ids=["directions", "state", "choice"],
)
def test_what_one_boundary_cannot_code_is_an_error_everywhere(
    ranks: Ranks, codec: Any, state: Any, steps: int, said: str
):
    states = {"boundary 1 forward": {"tensor 0, width 24": state}} if state else {}
    text = toy.disagreement(ranks.outcomes(unfit, {1: codec}, states, steps, ranks=4))
    assert re.search(said, text)


def test_what_no_boundary_can_code_is_the_same_error(ranks: Ranks):
    low = TransformQuant(bits=1)
    changes = {rank: {"forward": low, "backward": low} for rank in range(2)}
    text = "boundary 0 forward: bits is 1, .*; boundary 0 backward: bits is 1, .*"
    for outcome in ranks.outcomes(unlike, "1f1b", changes):
        assert outcome.kind == "ValueError"
        assert re.search(text, outcome.text)


def other_micro_batches() -> None:
    """As many rows in more or fewer micro-batches; PyTorch infers the shapes."""
    run = toy.Run("1f1b", toy.lowbit(timeout=30.0, **FIT))
    run.runner = Schedule1F1B(run.stages[0], 2 if dist.get_rank() else 4, loss_fn=toy.loss_of)
    run.train(0)


def other_pass(steps: int) -> None:
    run = toy.Run("interleaved-2", toy.lowbit(timeout=30.0, **FIT))
    for step in range(steps):
        run.train(step)
    (run.evaluate if dist.get_rank() else run.train)(0)


def other_version() -> None:
    from lowbit.pipeline import passes

    before, passes.__version__ = passes.__version__, f"9.{dist.get_rank()}"
    try:
        toy.Run("1f1b", toy.lowbit(**FIT)).train(0)
    finally:
        passes.__version__ = before


def other_shapes(expected: list[int]) -> None:
    """Static shapes, which PyTorch does not compare."""
    rank = dist.get_rank()
    x = torch.empty(toy.ROWS, expected[rank], toy.WIDTH, requires_grad=rank > 0)
    stage = LowBitStage(
        toy.Block(), rank, 2, toy.CPU, input_args=x, output_args=x.detach().requires_grad_(), timeout=30, **FIT
    )
    runner = ScheduleGPipe(stage, toy.MICRO_BATCHES, loss_fn=toy.loss_of)
    x, target = toy.batch(0)
    runner.step(*([x] if rank == 0 else []), target=target if rank else None)


def other_lengths(lengths: list[int]) -> None:
    """Each rank takes the pipeline to have another number of stages."""
    rank, length = dist.get_rank(), lengths[dist.get_rank()]
    stages = [LowBitStage(toy.Block(), i, length, toy.CPU, timeout=30.0, **FIT) for i in range(rank, length, 2)]
    if len(stages) == 1:
        runner = ScheduleGPipe(stages[0], toy.MICRO_BATCHES, loss_fn=toy.loss_of)
    else:
        runner = ScheduleInterleaved1F1B(stages, toy.MICRO_BATCHES, loss_fn=toy.loss_of)
    x, target = toy.batch(0)
    runner.step(*([x] if rank == 0 else []), target=target if rank else None)


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (other_micro_batches, (), "micro-batches: 4 on rank 0 (stage 0); 2 on rank 1 (stage 1)"),
        (other_pass, (0,), "kind of pass: training on rank 0 (stage 0) and rank 0 (stage 2); evaluation on rank 1"),
        (other_pass, (1,), "kind of pass: training on rank 0 (stages 0, 2); evaluation on rank 1"),
        (unlike, ("interleaved-2", {}, 3), "training steps so far: 0 on rank 0 (stage 0)"),
        (other_version, (), "lowbit version: 9.0 on rank 0 (stage 0); 9.1 on rank 1 (stage 1)"),
        (other_shapes, ([8, 5],), "boundary 0 forward tensors: float32 (2, 8, 24)"),
        (other_lengths, ([4, 2],), "number of stages: 4 on rank 0 (stage 0)"),
        (other_lengths, ([4, 6],), "number of stages: 4 on rank 0 (stage 0)"),
    ],
)
def test_ranks_that_differ_get_the_same_error(ranks: Ranks, function: Any, args: Any, said: str):
    assert said in toy.disagreement(toy.timely(ranks, function, *args))


def test_declared_shapes_that_are_equal_pass(ranks: Ranks):
    ranks.run(other_shapes, [8, 8])


@on_ranks
def test_kernels_are_compiled_before_a_peer_waits_for_a_message() -> None:
    """Codecs have been used by the time that a rank says what its boundaries carry."""
    used, states, exchanged = [], [], Agreement.exchange
    encode = GroupInt._encode

    def exchange(self: Agreement, facts: Mapping[int, Facts], names: Sequence[str]) -> Any:
        about_shapes = any("payload bytes" in name for each in facts.values() for name in each)
        states.append((len(used), about_shapes))
        return exchanged(self, facts, names)

    GroupInt._encode = lambda self, x, payload: (used.append(self), encode(self, x, payload))
    Agreement.exchange = exchange
    try:
        run = toy.Run("1f1b", toy.lowbit(forward=GroupInt(bits=3, group=56), backward=INT6))
        run.train(0)
    finally:
        GroupInt._encode, Agreement.exchange = encode, exchanged
    assert next(count for count, about_shapes in states if about_shapes) >= 1


def test_stages_find_their_pipeline_whatever_the_order_they_are_made_in():
    class Group:
        pass

    group, other = Group(), Group()
    made = [pipeline_number(group, length, 2) for length in (4, 2, 4, 4, 8, 2, 8, 4, 8, 8, 4)]
    assert made == [0, 1, 0, 2, 3, 4, 3, 2, 3, 3, 5]
    assert pipeline_number(other, 4, 2) == 0


def test_a_group_has_tags_for_so_many_pipelines():
    class Group:
        pass

    group = Group()
    for number in range(PIPELINES.members):
        assert pipeline_number(group, 4, 2) == number  # type: ignore[arg-type]
        assert pipeline_number(group, 4, 2) == number  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="has had 32 pipelines"):
        pipeline_number(group, 4, 2)  # type: ignore[arg-type]


@on_ranks
def test_pipelines_of_one_group_do_not_get_mixed_up() -> None:
    """Pipelines of different and of equal lengths in one group, built at once and used in turn."""
    names = ("1f1b", "interleaved-2", "zbv", "gpipe")
    runs = [toy.Run(name, toy.lowbit(timeout=20.0, **FIT)) for name in names]
    for step in range(2):
        for run in runs:
            run.train(step)


class Stop(toy.Block):
    """A block that, on one rank, in the third step, stops its process in one way or another."""

    rank = -1
    seconds = 0.0
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Stop.calls += 1
        if dist.get_rank() == Stop.rank and Stop.calls == 2 * toy.MICRO_BATCHES + 3:
            if not Stop.seconds:
                os._exit(7)
            time.sleep(Stop.seconds)
        return super().forward(x)


def dies(schedule: str, rank: int, seconds: float, timeout: float) -> float:
    """How long the error took; it must name the rank that stopped."""
    Stop.rank, Stop.seconds, Stop.calls = rank, seconds, 0
    run = toy.Run(schedule, toy.lowbit(timeout=timeout, **FIT), kind=Stop)
    start = time.monotonic()
    for step in range(3):
        start = time.monotonic()
        run.train(step)
    return time.monotonic() - start


@pytest.mark.parametrize(("schedule", "rank"), [("1f1b", 2), ("interleaved-2", 0)])
def test_a_rank_that_dies_is_named_by_all_others(ranks: Ranks, schedule: str, rank: int):
    outcomes = toy.timely(ranks, dies, schedule, rank, 0.0, 40.0, count=3, limit=35)
    assert outcomes[rank] == Failure("ended", "exit code 7")
    stages = f"stages {rank}, {rank + 3}" if schedule == "interleaved-2" else f"stage {rank}"
    for outcome in outcomes[:rank] + outcomes[rank + 1 :]:
        assert outcome.kind == "PeerError"
        assert f"rank {rank} ({stages})" in outcome.text, outcome.text


def test_a_rank_that_hangs_is_named_within_the_timeout(ranks: Ranks):
    outcomes = toy.timely(ranks, dies, "1f1b", 2, 6.0, 3.0, count=3, limit=40)
    for outcome in outcomes[:2]:
        assert outcome.kind == "PeerError"
        assert "rank 2 (stage 2)" in outcome.text, outcome.text
        assert "within 3 s" in outcome.text or "closed" in outcome.text
