"""Ranks that do not fit together, and ranks that fail: the same clear error everywhere, and no hang."""

import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B

from lowbit.codecs import AQSGD, Cast, Codec, GroupInt, TransformQuant
from lowbit.pipeline import LowBitStage, passes
from lowbit.pipeline.layouts import Batch, pipeline_number
from lowbit.wire.agreement import Agreement, Facts
from lowbit.wire.errors import described
from lowbit.wire.tags import PIPELINES
from tests.damage import secret
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.test_passes import in_one_process
from tests.lowbit.pipeline.toy import INT4, INT6, data
from tests.processes import Failure, Ranks, on_ranks

FIT = {"forward": INT4, "backward": INT6}
FITTING = toy.lowbit(timeout=30.0, **FIT)
N, ROWS = toy.MICRO_BATCHES, toy.ROWS * toy.MICRO_BATCHES


# ------------------------------------------------------------------------------------------------ unlike ranks


def unlike(schedule: str, changes: Mapping[int, Mapping[str, Any]], steps: int = 0) -> None:
    run = toy.Run(schedule, toy.lowbit(**{**FIT, "timeout": 30.0, **changes.get(dist.get_rank(), {})}))
    for stage in run.stages:
        stage.load_codec_state_dict({"steps": steps * dist.get_rank(), "lanes": {}})
    run.train(0)


def other_micro_batches() -> None:
    """As many rows in more or fewer micro-batches; PyTorch infers the shapes."""
    run = toy.Run("1f1b", FITTING)
    run.feed(*data(0), run.another(2 if dist.get_rank() else 4))


def other_pass(steps: int, length: int = 8) -> None:
    run = toy.Run("interleaved-2", FITTING)
    for step in range(steps):
        run.train(step)
    run.feed(*data(0, length=length), training=dist.get_rank() == 0)


def other_samples() -> None:
    """Ids in another order: each end would code the difference from another sample."""
    run = toy.Run("1f1b", toy.lowbit(forward=AQSGD(), backward=INT6, timeout=60))
    for step in range(3):
        for stage in run.stages:
            stage.set_samples(list(range(ROWS))[:: 1 if step < 2 or run.first else -1])
        run.train(0)


def other_version() -> None:
    with mock.patch.object(passes, "__version__", f"9.{dist.get_rank()}"):
        toy.Run("1f1b", FITTING).train(0)


def other_secret() -> None:
    with secret(f"of rank {dist.get_rank()}"):
        toy.Run("1f1b", FITTING).train(0)


def other_shapes() -> None:
    """Static shapes, which PyTorch does not compare."""
    x = torch.empty(toy.ROWS, 5 if dist.get_rank() else 8, toy.WIDTH, requires_grad=True)
    toy.Run("gpipe", toy.lowbit(timeout=30.0, input_args=x, output_args=x, **FIT)).train(0)


def other_lengths(lengths: list[int]) -> None:
    """Each rank takes the pipeline to have another number of stages."""
    rank, length = dist.get_rank(), lengths[dist.get_rank()]
    stages = [FITTING(toy.Block(), i, length, toy.CPU) for i in range(rank, length, 2)]
    if len(stages) == 1:
        runner = ScheduleGPipe(stages[0], N, loss_fn=toy.loss_of)
    else:
        runner = ScheduleInterleaved1F1B(stages, N, loss_fn=toy.loss_of)
    x, target = toy.batch(0)
    runner.step(*([x] if rank == 0 else []), target=target if rank else None)


def loads_alone() -> None:
    """One rank loads its own state again in the middle of a run; the others have no reason to compare theirs."""
    run = toy.Run("1f1b", FITTING)
    run.train(0)
    if dist.get_rank():
        run.stages[0].load_codec_state_dict(run.stages[0].codec_state_dict())
    run.train(1)


def mixed(codec: Codec) -> None:
    """Two runs of as many steps; then each rank goes on with the state of another one."""
    runs = [toy.Run("1f1b", toy.lowbit(forward=codec, backward=INT6, timeout=30)) for _ in range(2)]
    for seed, run in enumerate(runs):
        for number in range(2):
            run.stages[0].set_samples(torch.arange(ROWS) + 100 * number)
            run.feed(*data(10 * seed + number))
    states = [run.stages[0].codec_state_dict() for run in runs]
    stage = runs[0].stages[0]
    stage.load_codec_state_dict(states[dist.get_rank()])
    stage.set_samples(range(ROWS))
    stage.traffic.reset()
    try:
        runs[0].feed(*data(50))
    finally:
        assert stage.traffic.forward_bytes + stage.traffic.backward_bytes == 0


def altered() -> None:
    """One rank goes on with other directions, under the same number and digest of messages."""
    run = toy.Run("1f1b", toy.lowbit(forward=TransformQuant(), backward=INT6, timeout=30))
    run.train(0)
    state = run.stages[0].codec_state_dict()
    if run.last:
        [kept] = state["lanes"]["boundary 0 forward"].values()
        kept["directions"] = kept["directions"].flip(0)
    run.stages[0].load_codec_state_dict(state)
    run.train(1)


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (unlike, ("1f1b", {1: {"forward": GroupInt(bits=3)}}), "boundary 0 forward codec: GroupInt(bits=4"),
        (unlike, ("1f1b", {0: {"backward": Cast()}}), "boundary 0 backward codec: Cast("),
        (unlike, ("zbv", {1: {"warmup_steps": 5}}), "warm-up steps: 0 on rank 0 (stage 0) and rank 0 (stage 3); 5"),
        (unlike, ("interleaved-2", {}, 3), "training steps so far: 0 on rank 0 (stage 0)"),
        (other_micro_batches, (), "micro-batches: 4 on rank 0 (stage 0); 2 on rank 1 (stage 1)"),
        (other_pass, (0,), "kind of pass: training on rank 0 (stage 0) and rank 0 (stage 2); evaluation on rank 1"),
        (other_pass, (1,), "kind of pass: training on rank 0 (stages 0, 2); evaluation on rank 1"),
        (other_pass, (1, 5), "kind of pass: training on rank 0 (stages 0, 2); evaluation on rank 1"),  # a new batch
        (other_version, (), "lowbit version: 9.0 on rank 0 (stage 0); 9.1 on rank 1 (stage 1)"),
        (unlike, ("1f1b", {1: {"checksums": False}}), "checksums: on on rank 0 (stage 0); off on rank 1 (stage 1)"),
        (other_secret, (), "LOWBIT_SECRET: one with digest "),
        (other_shapes, (), "boundary 0 forward tensors: float32 (2, 8, 24)"),
        (other_samples, (), f"sample ids: {ROWS} with digest "),
        (other_lengths, ([4, 2],), "number of stages: 4 on rank 0 (stage 0)"),
        (other_lengths, ([4, 6],), "number of stages: 4 on rank 0 (stage 0)"),
        (loads_alone, (), "codec state: loaded on rank 1 (stage 1)"),
        (mixed, (TransformQuant(),), "boundary 0 forward state: "),
        (mixed, (AQSGD(),), "boundary 0 forward state: "),
        (altered, (), "boundary 0 forward state: "),
        (unlike, ("1f1b", {1: {"code_constants": True}}), "constants: exact on rank 0 (stage 0); coded on rank 1"),
    ],
)
def test_ranks_that_differ_get_the_same_error(ranks: Ranks, function: Any, args: Any, said: str):
    assert said in toy.disagreement(toy.timely(ranks, function, *args))


def unfit(forward: Mapping[int, Any], state: Mapping[str, Any], steps: int) -> None:
    """One boundary of three cannot code what crosses, or go on from what it is given."""
    options = {"forward": dict.fromkeys(range(3), INT4) | dict(forward), "backward": INT6, "warmup_steps": 1}
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
    ],
    ids=["directions", "state"],
)
def test_what_one_boundary_cannot_code_is_an_error_everywhere(
    ranks: Ranks, codec: Any, state: Any, steps: int, said: str
):
    states = {"boundary 1 forward": {"tensor 0, width 24": state}} if state else {}
    for outcome in ranks.outcomes(unfit, {1: codec}, states, steps, ranks=4):
        assert outcome.kind == "ValueError"
        assert re.search(said, outcome.text)


def test_what_no_boundary_can_code_is_the_same_error(ranks: Ranks):
    low = TransformQuant(bits=1)
    changes = {rank: {"forward": low, "backward": low} for rank in range(2)}
    text = "boundary 0 forward: bits is 1, .*; boundary 0 backward: bits is 1, .*"
    for outcome in ranks.outcomes(unlike, "1f1b", changes):
        assert outcome.kind == "ValueError"
        assert re.search(text, outcome.text)


@on_ranks
def test_kernels_are_compiled_before_a_peer_waits_for_a_message() -> None:
    """Codecs have been used by the time that a rank says what its boundaries carry."""
    used, states, exchanged, encode = [], [], Agreement.exchange, GroupInt._encode

    def exchange(self: Agreement, facts: Mapping[int, Facts], names: Sequence[str]) -> Any:
        about_shapes = any("payload bytes" in name for each in facts.values() for name in each)
        states.append((len(used), about_shapes))
        return exchanged(self, facts, names)

    with (
        mock.patch.object(GroupInt, "_encode", lambda self, *args: (used.append(self), encode(self, *args))),
        mock.patch.object(Agreement, "exchange", exchange),
    ):
        toy.Run("1f1b", toy.lowbit(forward=GroupInt(bits=3, group=56), backward=INT6)).train(0)
    assert next(count for count, about_shapes in states if about_shapes) >= 1


# ------------------------------------------------------------------------------------------------ several pipelines


def test_stages_find_their_pipeline_whatever_the_order_they_are_made_in():
    class Group:
        pass

    group: Any = Group()
    stages = ((4, 0), (2, 0), (4, 2), (4, 0), (8, 0), (2, 0), (8, 2), (4, 2), (8, 4), (8, 6), (4, 0))
    made = [pipeline_number(group, stage, length, 2) for length, stage in stages]
    assert made == [0, 1, 0, 2, 3, 4, 3, 2, 3, 3, 5]
    both: Any = Group()  # a teacher and a student, made stage by stage
    assert [pipeline_number(both, stage, 4, 2) for stage in (0, 0, 2, 2)] == [0, 1, 0, 1]
    other: Any = Group()
    for number in range(PIPELINES.members):
        assert [pipeline_number(other, stage, 4, 2) for stage in (0, 3)] == [number] * 2  # the stages of one rank
    with pytest.raises(RuntimeError, match="has had 32 pipelines"):
        pipeline_number(other, 0, 4, 2)


@on_ranks(1)
def test_a_state_that_is_refused_changes_nothing() -> None:
    """A program may go on without it; with its steps, the stage would skip the warm-up."""
    model = nn.Linear(4, 4)
    stage = LowBitStage(model, 0, 2, "cpu", warmup_steps=9)
    anchored, [lane] = {"tensor 0, width 4": {}}, stage.codec_state_dict()["formats"].keys() - {"boundary 0 backward"}
    for state in ({"anchors": {lane: anchored}}, {"lanes": {lane: {"tensor 0, width 4": {"rounds": 1}}}}):
        stage.forward_session(outgoing=True, shape=(2, 4), dtype=torch.float32)
        with pytest.raises((ValueError, TypeError), match="state "):
            stage.load_codec_state_dict({"steps": 500, **state})
        assert stage.in_warmup
        assert stage.codec_state_dict()["steps"] == 0


@on_ranks(1)
def test_the_other_end_of_a_boundary_has_another_state() -> None:
    first, last = (LowBitStage(nn.Linear(4, 4), index, 2, "cpu") for index in range(2))
    state = first.codec_state_dict()
    with pytest.raises(ValueError, match="state is of stage 0; this is stage 1"):
        last.load_codec_state_dict(state)
    first.load_codec_state_dict(state)


@on_ranks
def test_a_stage_that_is_refused_is_not_counted() -> None:
    rank = dist.get_rank()
    elsewhere = {"forward": {0: INT4, 5: INT4}}
    for options, said in ((elsewhere, "there are 0 to 0"), ({"device": "meta"}, "device is meta")):
        with pytest.raises(ValueError, match=said):
            LowBitStage(nn.Linear(4, 4), rank, 2, options.pop("device", "cpu"), **options)  # type: ignore[arg-type]
        if rank:
            break  # the ranks fail at other places
    toy.Run("1f1b", FITTING).train(0)


@on_ranks
def test_pipelines_of_one_group_do_not_get_mixed_up() -> None:
    """Pipelines of different and of equal lengths in one group, built at once and used in turn."""
    runs = [toy.Run(name, FITTING) for name in ("1f1b", "interleaved-2", "zbv", "gpipe")]
    for step in range(2):
        for run in runs:
            run.train(step)


# ------------------------------------------------------------------------------------------------ failing ranks


class Failing(toy.Block):
    """A block that fails on one rank: in the third micro-batch of the third step, or when it is tried out."""

    how, calls = "", 0

    def forward(self, x: Tensor) -> Tensor:
        Failing.calls += 1
        if Failing.calls == (1 if Failing.how == "trial" else 3):
            match Failing.how:
                case "exit":
                    os._exit(7)
                case "interrupt":
                    raise KeyboardInterrupt
                case "sleep":
                    time.sleep(6)
                case "raise" | "trial":
                    raise ZeroDivisionError("no such token")
        return super().forward(x)


def fails(schedule: str, rank: int, how: str, timeout: float) -> Failure:
    """What ended a step; no step follows it."""
    Failing.how = ""
    run = toy.Run(schedule, toy.lowbit(timeout=timeout, **FIT), kind=Failing)
    for step in range(0 if how == "trial" else 2):
        run.train(step)
    Failing.how, Failing.calls = how if dist.get_rank() == rank else "", 0
    with pytest.raises((Exception, KeyboardInterrupt)) as caught:
        run.train(2)
    with pytest.raises(RuntimeError) as refused:
        run.train(3)
    assert str(refused.value) == (
        f"a step of this pipeline ended early ({described(caught.value)}); start again with a new process group"
    )
    return Failure(caught.typename, str(caught.value), "".join(traceback.format_exception(caught.value)))


@pytest.mark.parametrize(
    ("schedule", "rank", "how", "said"),
    [
        ("1f1b", 1, "raise", r"^rank 1 \(stage 1\) gave up: ZeroDivisionError: no such token; "),
        ("1f1b", 1, "trial", r"^rank 1 \(stage 1\) gave up: ZeroDivisionError: no such token$"),
        ("1f1b", 1, "interrupt", r"^rank 1 \(stage 1\) gave up: KeyboardInterrupt"),
        ("1f1b", 2, "exit", r"rank 2 \(stage 2\)"),
        ("interleaved-2", 0, "exit", r"rank 0 \(stages 0, 3\)"),
        ("1f1b", 2, "sleep", r"(?=.*rank 2 \(stage 2\)).*(within 3 s|closed)"),
    ],
)
def test_a_rank_that_fails_is_named_by_all_others(ranks: Ranks, schedule: str, rank: int, how: str, said: str):
    timeout = 3.0 if how == "sleep" else 40.0
    outcomes = toy.timely(ranks, fails, schedule, rank, how, timeout, count=3, limit=35)
    own = outcomes.pop(rank)
    if how == "exit":
        assert own == Failure("ended", "exit code 7")
    elif how != "sleep":
        assert ("KeyboardInterrupt" if how == "interrupt" else "ZeroDivisionError: no such token") in own.trace
    for outcome in outcomes:
        assert outcome.kind == "PeerError" or how == "trial"  # as the agreement or the board says it first
        assert re.search(said, outcome.text), outcome.text


SPLIT = {
    0: "the batch cannot be split into 4 micro-batches (",
    N - 1: "the batch gives 3 micro-batches, and the schedule has 4",
}


@pytest.mark.parametrize("rows", SPLIT)
@pytest.mark.parametrize("passes_before", [0, 1])
@on_ranks
def test_fewer_rows_than_micro_batches_are_refused_everywhere(passes_before: int, rows: int) -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=toy.FP32, backward=toy.FP32, timeout=30))
    for number in range(passes_before):
        run.feed(*data(number))
    start = time.monotonic()
    for training in (True, False):
        with pytest.raises(ValueError, match="micro-batches") as caught:
            run.feed(*data(0, rows), training=training)
        assert str(caught.value).startswith(SPLIT[rows])
        assert str(caught.value).endswith("; allowed: at least one sample for each")
    assert time.monotonic() - start < 10
    found, expected = run.take(*data(9)), in_one_process(run, True, N, *data(9))
    assert toy.same(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2])


@on_ranks
def test_the_first_stages_text_is_escaped_in_the_others_error() -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=toy.FP32, backward=toy.FP32, timeout=30))
    with (
        mock.patch.object(Batch, "problem", return_value="refused \x1b]0;owned\x07"),
        pytest.raises(ValueError, match="refused") as caught,
    ):
        run.feed(*data(0))
    assert str(caught.value) == r"refused \x1b]0;owned\x07"


def too_few_targets() -> None:
    run, (x, target) = toy.Run("1f1b", FITTING), data(0, N)
    for rows in (N, N - 1):
        run.feed(x, target[:rows])


def targets_in_a_list() -> None:
    run = toy.Run("1f1b", FITTING)
    x, target = data(0)
    run.feed(x, list(target))  # pyright: ignore[reportArgumentType]


def keyword_without_rows() -> None:
    run = toy.Run("1f1b", FITTING)
    run.feed(*data(0), **({"scale": torch.ones(0)} if run.last else {}))


def without_samples() -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=AQSGD(), backward=INT6, timeout=60))
    if run.first:
        run.stages[0].set_samples(range(ROWS))
    run.train(0)


def too_few_samples() -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=AQSGD(), backward=INT6, timeout=60))
    for step in range(2):
        for stage in run.stages:
            stage.set_samples(range(ROWS - step))
        run.train(0)


def unfrozen() -> None:
    run = toy.Run("1f1b", FITTING)
    frozen = run.stages[0].submod.requires_grad_(run.last)
    run.train(0)
    frozen.requires_grad_()
    run.train(1)


def test_too_few_sample_ids_are_refused_before_a_byte_is_sent(ranks: Ranks):
    for outcome in ranks.outcomes(too_few_samples):
        assert outcome.kind == "ValueError"
        assert re.search("the sample ids of a micro-batch are 1; allowed: 2, one for each entry", outcome.text)


@pytest.mark.parametrize(
    ("function", "culprit", "said"),
    [
        (too_few_targets, 1, ""),
        (targets_in_a_list, 1, ""),
        (keyword_without_rows, 1, ""),
        (without_samples, 1, "set_samples"),
        (unfrozen, 0, "stage 0 requires a gradient"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_told_to_the_other(ranks: Ranks, function: Any, culprit: int, said: str):
    outcomes = toy.timely(ranks, function)
    own, other = outcomes[culprit], outcomes[1 - culprit]
    assert own.kind == ("RuntimeError" if function is keyword_without_rows else "ValueError")
    assert said in own.text
    assert other.text == f"rank {culprit} (stage {culprit}) gave up: {own.kind}: {own.text}"
