"""Passes that differ from one to the next: other schedules over the same stages, other batches in the same schedule."""

import gc
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lowbit.codecs import AQSGD, Codec, GroupInt, TAHQuant, TransformQuant
from lowbit.pipeline import LowBitStage
from lowbit.wire.agreement import Agreement
from lowbit.wire.errors import PeerError, described
from tests.pipeline import toy
from tests.pipeline.test_stage import OLD
from tests.pipeline.toy import FP32, INT6
from tests.processes import Ranks, on_ranks

PLAIN = toy.lowbit(forward=FP32, backward=FP32, timeout=30)
N, ROWS = toy.MICRO_BATCHES, toy.ROWS * toy.MICRO_BATCHES

Pass = tuple[str, bool, int, int, int]
"""Name of its schedule, whether it trains, micro-batches, rows and length of the sequences."""


def train(name: str, micro_batches: int = N, rows: int = ROWS, length: int = 3) -> Pass:
    return name, True, micro_batches, rows, length


def evaluate(name: str, micro_batches: int = N, rows: int = ROWS, length: int = 3) -> Pass:
    return name, False, micro_batches, rows, length


def both(name: str, micro_batches: int = N, rows: int = ROWS, length: int = 3) -> list[Pass]:
    own = name, micro_batches, rows, length
    return [train(*own), evaluate(*own)]


PLANS: dict[str, list[Pass]] = {
    "evaluation": [train("a"), evaluate("e", 6, 6), train("a"), evaluate("e", 6, 6), train("a")],
    "lengths": [
        train("a"), *both("b", length=7), *both("c", length=2), *both("a"), *both("b", length=7), evaluate("a")
    ],
    "micro-batches": [*both("a"), *both("b", 5), *both("c", 8), train("a"), train("b", 5), train("a")],
    "same schedule": [*both("a"), *both("a", length=5), *both("a", rows=7), *both("a"), *both("a", rows=7)],
}  # fmt: skip


def data(number: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    shape = (rows, length, toy.WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def taken(run: toy.Run, runner: Any, training: bool, x: Tensor, target: Tensor) -> Any:
    """A pass: outputs of the last stage, losses, and gradients of this rank's parameters."""
    run.optimizer.zero_grad()
    losses: list[Tensor] = []
    args = [x] if run.first else []
    if training:
        runner.step(*args, target=target if run.last else None, losses=losses)
        y = None
    else:
        with torch.no_grad():
            y = runner.eval(*args, target=target if run.last else None, losses=losses)
    grads = [p.grad for stage in run.stages for p in stage.submod.parameters()]
    return y, [loss.detach() for loss in losses], [g.clone() for g in grads if g is not None]


def in_one_process(run: toy.Run, training: bool, n: int, x: Tensor, target: Tensor) -> Any:
    """The same, of the whole model on this rank."""
    modules = toy.blocks(run.stages[0].num_stages)
    model, losses, outputs = nn.Sequential(*modules), [], []
    for part, wanted in zip(x.tensor_split(n), target.tensor_split(n), strict=True):
        with torch.set_grad_enabled(training):
            outputs.append(model(part))
            losses.append(toy.loss_of(outputs[-1], wanted))
        if training:
            losses[-1].backward()
    own = [p for stage in run.stages for p in modules[stage.stage_index].parameters()]
    if not run.last:
        return None, [], [p.grad / n for p in own if p.grad is not None]
    y = None if training else torch.cat(outputs)
    return y, [loss.detach() for loss in losses], [p.grad / n for p in own if p.grad is not None]


def equal(schedule: str, plan: Sequence[Pass], static: bool = False) -> int:
    """Each pass gives what one process gives, and bit for bit what PyTorch's stages, made for it alone, give."""

    def make(*args: Any, **kwargs: Any) -> PipelineStage:
        if static:
            x = torch.empty(toy.ROWS, 8, toy.WIDTH)
            kwargs |= {"input_args": x.requires_grad_(args[1] > 0)}
            kwargs |= {"output_args": x.detach().requires_grad_()}
        return LowBitStage(*args, forward=FP32, backward=FP32, timeout=30, **kwargs)

    ours, runners = toy.Run(schedule, make), {}
    for number, (name, training, n, rows, length) in enumerate(plan):
        x, target = data(number, rows, length)
        if name not in runners:
            runners[name] = ours.another(n)
        found = taken(ours, runners[name], training, x, target)
        expected = in_one_process(ours, training, n, x, target)
        assert (found[0] is None) == (expected[0] is None)
        assert found[0] is None or torch.equal(found[0], expected[0])
        assert toy.same(found[1], expected[1])
        torch.testing.assert_close(found[2], expected[2])  # autograd adds up in another order
        if training and rows % n == 0:  # the only batches that PyTorch's stages take
            stock = toy.Run(schedule, PipelineStage)
            _, losses, grads = taken(stock, stock.another(n), training, x, target)
            assert toy.same(found[1], losses)
            assert toy.same(found[2], grads)
            assert len(grads) == 2 * len(ours.stages)
    return len(plan)


SCHEDULES = [name for name in toy.SCHEDULES if not (OLD and name in toy.V_SHAPED)]


@pytest.mark.parametrize(
    ("schedule", "plan"),
    [
        *(("1f1b", plan) for plan in PLANS),
        *((name, "same schedule") for name in SCHEDULES if name != "1f1b"),
    ],
)
def test_each_pass_equals_stages_that_were_made_for_it(ranks: Ranks, schedule: str, plan: str):
    passes = PLANS[plan]
    if schedule.startswith("interleaved") or schedule == "zero-bubble":  # take only multiples of the ranks
        passes = [(name, training, n + n % 2, *rest) for name, training, n, *rest in passes]
    assert ranks.run(equal, schedule, passes) == [len(passes)] * 2


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 4), ("interleaved-2", 3)])
def test_more_ranks_likewise(ranks: Ranks, schedule: str, count: int):
    n = 6 if count == 3 else 4
    plan = [*both("a", n, 12), *both("a", n, 13, 5), *both("b", 2 * n, 12), *both("a", n, 12)]
    assert ranks.run(equal, schedule, plan, ranks=count) == [len(plan)] * count


def test_static_stages_take_other_shapes(ranks: Ranks):
    plan = [*both("a"), *both("a", length=5), *both("a", rows=7), *both("b", 2), *both("a")]
    assert ranks.run(equal, "1f1b", plan, True) == [len(plan)] * 2


# ------------------------------------------------------------------------------------------------ codecs


def coded(codec: Codec) -> Any:
    """Losses of all passes of all plans, and what the two ends of each boundary hold after them."""
    run = toy.Run("interleaved-2", toy.lowbit(forward=codec, backward=codec, timeout=30))
    runners: dict[Any, Any] = {}
    losses: list[Tensor] = []
    for number, (name, training, n, rows, length) in enumerate(PLANS["lengths"] + PLANS["same schedule"]):
        runner = runners.setdefault((name, n), run.another(n))
        losses += taken(run, runner, training, *data(number, rows, length))[1]
        run.optimizer.step()
    states = [stage.codec_state_dict() for stage in run.stages]
    lanes = {name: lane for state in states for name, lane in state["lanes"].items()}
    return losses, {state["steps"] for state in states}, lanes


@pytest.mark.parametrize("codec", [TransformQuant(), TAHQuant()], ids=["transform", "tah"])
def test_codecs_go_on_from_shape_to_shape(ranks: Ranks, codec: Codec):
    (_, steps, lower), (losses, more, upper) = ranks.run(coded, codec)
    assert len(losses) == 20 * N
    assert all(loss.isfinite() for loss in losses)
    assert steps == more == {10}
    assert lower.keys() == upper.keys()
    assert len(lower) == (6 if isinstance(codec, TransformQuant) else 0)
    for name, tensors in lower.items():
        (key, here), (other, there) = (next(iter(each.items())) for each in (tensors, upper[name]))
        assert key == other == f"tensor 0, width {toy.WIDTH}", "one state for all shapes"
        same = here.keys() - {"felt"}  # a sender of activations has their gradients, too
        assert same == there.keys() - {"felt"}
        assert all(torch.equal(*map(torch.as_tensor, (here[k], there[k]))) for k in same)


# ------------------------------------------------------------------------------------------------ costs


@on_ranks
def test_a_pass_that_has_been_there_before_costs_no_exchange() -> None:
    """Exchanges and operations of the store, in passes of new configurations and of known ones."""
    run = toy.Run("1f1b", PLAIN)
    counts: Counter[str] = Counter()
    kinds = dist.Store, dist.PrefixStore, dist.TCPStore  # pyright: ignore
    reads = ("get", "check", "wait", "multi_get")
    names = (*reads, "append", "set", "add", "compare_set", "delete_key", "multi_set")
    before = {(Agreement, "exchange"): Agreement.exchange}
    before |= {(k, name): getattr(k, name) for k in kinds for name in names if name in vars(k)}

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    found, runners = [], {"a": run.another(N), "e": run.another(2)}
    plan = [*both("a"), evaluate("e", 2), train("a", rows=7)]
    try:
        for (kind, name), function in before.items():
            setattr(kind, name, counting(name, function))
        for name, training, _, rows, length in 3 * plan:
            taken(run, runners[name], training, *data(0, rows, length))
            found.append(dict(counts))
            counts.clear()
    finally:
        for (kind, name), function in before.items():
            setattr(kind, name, function)
    new, known = found[: len(plan)], found[len(plan) :]
    assert all(each["exchange"] == 2 and each["append"] for each in new), new
    assert known == [{}] * 8


@on_ranks
def test_receives_are_posted_for_the_next_pass_of_the_same_kind() -> None:
    """After a training step that evaluations came before."""
    run = toy.Run("1f1b", PLAIN)
    for run_pass in (run.train, run.train, run.evaluate, run.evaluate, run.train):
        run_pass(0)
    stage: Any = run.stages[0]
    # Gradients of the next step; and activations of it, and of the next evaluation.
    assert len(stage.lanes.transport._inbox._posted) == toy.MICRO_BATCHES * (1 + run.last)


@on_ranks
def test_a_pipeline_that_is_dropped_lets_go_of_its_connections() -> None:
    """Without the garbage collector."""
    gc.disable()
    try:
        run = toy.Run("1f1b", PLAIN)
        run.train(0)
        stage: Any = run.stages[0]
        left = [weakref.ref(x) for x in (stage, run.runner, stage.lanes.transport, stage._passes)]
        del run, stage
        assert [type(x).__name__ for ref in left if (x := ref()) is not None] == []
    finally:
        gc.enable()


class Masked(toy.Block):
    """A block whose outputs have a dtype that its positional inputs do not tell."""

    def forward(self, x: Tensor, given: dict[str, Tensor] | None = None) -> Tensor:
        y = torch.tanh(self.inner(x.to(self.inner.weight.dtype)))
        return y if given is None else y.to(given["mask"].dtype)


@pytest.mark.parametrize("by", ["autocast", "a nested keyword argument"])
@on_ranks
def test_dtypes_that_change_from_pass_to_pass_are_agreed_on(by: str) -> None:
    run = toy.Run("1f1b", PLAIN, kind=Masked)
    x, target = data(0, ROWS, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        low = by == "autocast" and dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            if not run.first:
                run.runner.step(target=target)
            elif by == "autocast":
                run.runner.step(x)
            else:
                run.runner.step(x, given={"mask": torch.ones(ROWS, 1, 1, dtype=dtype)})
    assert len(run.stages[0]._passes._agreed) == 2  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("passes_before", [0, 1])
@on_ranks
def test_fewer_rows_than_micro_batches_are_refused_everywhere(passes_before: int) -> None:
    run = toy.Run("1f1b", PLAIN)
    for number in range(passes_before):
        taken(run, run.runner, True, *data(number, ROWS, 3))
    start = time.monotonic()
    with pytest.raises(ValueError, match="micro-batches") as caught:
        taken(run, run.runner, True, *(t[: N - 1] for t in data(0, N, 3)))
    assert time.monotonic() - start < 10
    assert str(caught.value) == (
        "the batch gives 3 micro-batches, and the schedule has 4; allowed: at least one sample for each"
    )
    x, target = data(9, ROWS, 3)
    found, expected = (taken(run, run.runner, True, x, target), in_one_process(run, True, N, x, target))
    assert toy.same(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2])


def too_few_targets() -> None:
    run = toy.Run("1f1b", PLAIN)
    for rows in (N, N - 1):
        x, target = data(0, N, 3)
        taken(run, run.runner, True, x, target[:rows])


class Raising(toy.Block):
    """A block that raises on rank 1, in the third micro-batch of the second step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Raising.calls += not x.eq(0).all()  # trial runs have zeros
        if dist.get_rank() == 1 and Raising.calls == N + 3:
            raise ZeroDivisionError("no such token")
        return super().forward(x)


def raising() -> None:
    Raising.calls = 0
    run = toy.Run("1f1b", PLAIN, kind=Raising)
    run.train(0)
    with pytest.raises(RuntimeError) as caught:
        run.train(1)
    with pytest.raises(RuntimeError) as refused:
        run.train(2)
    assert str(refused.value) == (
        f"a step of this pipeline ended early ({described(caught.value)}); start again with a new process group"
    )
    raise caught.value


@pytest.mark.parametrize("count", [2, 3])
def test_a_model_that_raises_ends_all_ranks_and_no_step_follows(ranks: Ranks, count: int):
    outcomes = toy.timely(ranks, raising, count=count)
    culprit = outcomes.pop(1)
    assert "ZeroDivisionError: no such token" in culprit.trace
    assert culprit.kind != "AssertionError", culprit.text
    for outcome in outcomes:
        assert outcome.kind == "PeerError"
        assert outcome.text.startswith("rank 1 (stage 1) gave up: ZeroDivisionError: no such token; "), outcome.text


class Unfit(toy.Block):
    """A block that cannot be tried out on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("no such width")
        return super().forward(x)


def unfit() -> None:
    toy.Run("1f1b", toy.lowbit(forward=FP32, backward=FP32, timeout=60), kind=Unfit).train(0)


def differs_where_the_batch_is_new() -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=FP32, backward=FP32, timeout=60))
    run.train(0)
    taken(run, run.runner, run.first, *data(0, ROWS, 5))


def without_samples() -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=AQSGD(), backward=INT6, timeout=60))
    if run.first:
        run.stages[0].set_samples(range(ROWS))  # type: ignore[attr-defined]
    run.train(0)


class Scaled(toy.Block):
    """A block with a keyword input."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x if scale is None else x * scale.sum())


@on_ranks
def test_declared_layouts_stand_whatever_keywords_look_like() -> None:
    """Keyword inputs whose parts differ in length, where layouts of what crosses are declared."""
    x, target = data(0, ROWS, 3)

    def make(*args: Any, **kwargs: Any) -> PipelineStage:
        declared = torch.empty(toy.ROWS, 8, toy.WIDTH, requires_grad=True)
        options = {"input_args": declared, "output_args": declared, "timeout": 30}
        return LowBitStage(*args, forward=FP32, backward=FP32, **options, **kwargs)

    run, losses = toy.Run("1f1b", make, kind=Scaled), []
    args, kwargs = ([x], {"scale": torch.ones(N + 1)}) if run.first else ([], {})
    run.runner.step(*args, **kwargs, target=target if run.last else None, losses=losses)
    assert len(losses) == N * run.last


def unfrozen() -> None:
    run = toy.Run("1f1b", PLAIN)
    frozen = run.stages[0].submod.requires_grad_(run.last)
    run.train(0)
    frozen.requires_grad_()
    run.train(1)


@pytest.mark.parametrize(
    ("function", "culprit", "count", "kind", "said"),
    [
        (too_few_targets, 1, 2, "ValueError", ""),
        (unfit, 1, 3, "ZeroDivisionError", "no such width"),
        (without_samples, 1, 2, "ValueError", "set_samples"),
        (unfrozen, 0, 2, "ValueError", "stage 0 requires a gradient"),
    ],
)
def test_an_error_of_one_rank_is_told_to_all(
    ranks: Ranks, function: Any, culprit: int, count: int, kind: str, said: str
):
    outcomes = toy.timely(ranks, function, count=count)
    own = outcomes.pop(culprit)
    assert own.kind == kind
    assert said in own.text
    expected = f"rank {culprit} (stage {culprit}) gave up: {kind}: {own.text}"
    assert {outcome.text for outcome in outcomes} == {expected}


class Replacing(toy.Block):
    """A block with a running mean, in a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(toy.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1)) + 1
        return super().forward(x) + self.mean


@on_ranks
def test_a_trial_run_leaves_buffers_that_the_model_replaces() -> None:
    run = toy.Run("1f1b", PLAIN, kind=Replacing)
    x, target = data(0, ROWS, 3)
    found = taken(run, run.runner, True, x, target)
    model = nn.Sequential(*toy.blocks(2, Replacing))
    expected = [
        toy.loss_of(model(part), wanted) for part, wanted in zip(x.tensor_split(N), target.tensor_split(N), strict=True)
    ]
    assert toy.same(found[1], expected if run.last else [])
    mean = model[dist.get_rank()].mean
    assert torch.equal(run.stages[0].submod.mean, mean)  # type: ignore[arg-type]


def mixed(codec: Codec) -> None:
    """Two runs of as many steps; then each rank goes on with the state of another one."""
    runs = []
    for seed in range(2):
        run = toy.Run("1f1b", toy.lowbit(forward=codec, backward=INT6, timeout=30))
        for number in range(2):
            run.stages[0].set_samples(torch.arange(ROWS) + 100 * number)  # type: ignore[attr-defined]
            taken(run, run.runner, True, *data(10 * seed + number, ROWS, 8))
        runs.append(run)
    stages = [run.stages[0] for run in runs]
    states = [stage.codec_state_dict() for stage in stages]  # type: ignore[attr-defined]
    stage = stages[0]
    assert isinstance(stage, LowBitStage)
    stage.load_codec_state_dict(states[dist.get_rank()])
    stage.set_samples(range(ROWS))
    stage.traffic.reset()
    try:
        taken(runs[0], runs[0].runner, True, *data(50, ROWS, 8))
    finally:
        assert stage.traffic.forward_bytes + stage.traffic.backward_bytes == 0


@on_ranks(3)
def test_an_interrupt_is_told_to_all() -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=FP32, backward=FP32, timeout=60))
    run.train(0)
    start = time.monotonic()
    if dist.get_rank() == 1:

        def interrupt(x: Tensor) -> Tensor:
            raise KeyboardInterrupt

        run.stages[0].submod.forward = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run.train(1)
    else:
        with pytest.raises(PeerError, match="gave up: KeyboardInterrupt") as caught:
            run.train(1)
        assert caught.value.rank == 1
    assert time.monotonic() - start < 20


def loads_alone() -> None:
    """One rank loads its own state again in the middle of a run; the others have no reason to compare theirs."""
    run = toy.Run("1f1b", toy.lowbit(forward=GroupInt(bits=4), backward=INT6, timeout=30))
    run.train(0)
    stage = run.stages[0]
    assert isinstance(stage, LowBitStage)
    if dist.get_rank():
        stage.load_codec_state_dict(stage.codec_state_dict())
    run.train(1)


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (differs_where_the_batch_is_new, (), "kind of pass: training on rank 0 (stage 0); evaluation on"),
        (loads_alone, (), "codec state: loaded on rank 1 (stage 1)"),
        (mixed, (TransformQuant(),), "boundary 0 forward state: "),
        (mixed, (AQSGD(),), "boundary 0 forward state: "),
    ],
    ids=["pass", "loaded", "transform", "aq"],
)
def test_ranks_that_differ_get_the_same_error(ranks: Ranks, function: Any, args: Any, said: str):
    assert said in toy.disagreement(toy.timely(ranks, function, *args))


def other_formats(schedule: str) -> Any:
    """Bits of each step, gradients equal to those of stages made with the second format, and receives left over."""
    first, second = GroupInt(bits=8, group=24), TransformQuant(bits=12)
    run = toy.Run(schedule, toy.lowbit(forward=first, backward=first, warmup_steps=1))
    bits, left = [], []
    for step in range(8):
        if step == 4:
            left = [len(stage.lanes.transport._inbox._posted) for stage in run.stages]
            for stage in run.stages:
                stage.set_codecs(second, second)
                stage.looks_ahead = True
            weights = [p.detach().clone() for stage in run.stages for p in stage.submod.parameters()]
        for stage in run.stages:
            stage.looks_ahead &= step != 3
            stage.traffic.reset()
        grads = run.train(step)
        bits.append([stage.traffic.forward_bits for stage in run.stages])
        if step == 4:
            with torch.no_grad():
                fresh = toy.Run(schedule, toy.lowbit(forward=second, backward=second))
                for parameter, value in zip(
                    (p for stage in fresh.stages for p in stage.submod.parameters()), weights, strict=True
                ):
                    parameter.copy_(value)
            assert toy.same(fresh.train(step), grads), "states start empty"
    return bits, left


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-2"])
def test_formats_change_between_steps(ranks: Ranks, schedule: str):
    bits, left = ranks.run(other_formats, schedule)[0]
    assert left == [0] * len(left), "no receive waits for a message of the old size"
    plain, coded, other = (sum(bits[step]) for step in (0, 3, 7))
    assert plain > coded > 0
    assert other not in (plain, coded)
    assert [sum(each) for each in bits] == [plain, *[coded] * 3, *[other] * 4]
