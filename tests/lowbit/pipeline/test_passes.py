"""Passes that differ from one to the next: other schedules over the same stages, other batches in the same schedule."""

import gc
import threading
import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lowbit.codecs import Codec, GroupInt, TAHQuant, TransformQuant
from lowbit.wire.agreement import Agreement
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.toy import FP32, data
from tests.processes import Ranks, on_ranks

PLAIN = toy.lowbit(forward=FP32, backward=FP32, timeout=30)
CROSSING = torch.empty(toy.ROWS, 8, toy.WIDTH, requires_grad=True)
DECLARED = toy.lowbit(forward=FP32, backward=FP32, timeout=30, input_args=CROSSING, output_args=CROSSING)
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
    "more ranks": [*both("a", rows=12), *both("a", rows=13, length=5), *both("b", 12, 12), *both("a", rows=12)],
    "declared": [*both("a"), *both("a", length=5), *both("a", rows=7), *both("b", 2), *both("a")],
}  # fmt: skip


def in_one_process(
    run: toy.Run, training: bool, n: int, x: Tensor, target: Tensor, modules: list[nn.Module] | None = None
) -> Any:
    """What a pass of the whole model on this rank gives: what `toy.Run.take` returns."""
    modules = modules or toy.blocks(run.stages[0].num_stages, run.kind)
    model, losses, outputs = nn.Sequential(*modules), [], []
    for part, wanted in zip(x.tensor_split(n), target.tensor_split(n), strict=True):
        with torch.set_grad_enabled(training):
            outputs.append(model(part))
            losses.append(toy.loss_of(outputs[-1], wanted))
        if training:
            losses[-1].backward()
    own = [p for stage in run.stages for p in modules[stage.stage_index].parameters()]
    grads = [p.grad / n for p in own if p.grad is not None]
    if not run.last:
        return None, [], grads
    return None if training else torch.cat(outputs), [loss.detach() for loss in losses], grads


def equal(schedule: str, plan: list[Pass], make: Any) -> int:
    """Each pass gives what one process gives, and bit for bit what PyTorch's stages, made for it alone, give."""
    ours, runners = toy.Run(schedule, make), {}
    for number, (name, training, n, rows, length) in enumerate(plan):
        x, target = data(number, rows, length)
        if name not in runners:
            runners[name] = ours.another(n)
        found = ours.take(x, target, runners[name], training=training)
        expected = in_one_process(ours, training, n, x, target)
        assert (found[0] is None) == (expected[0] is None)
        assert found[0] is None or torch.equal(found[0], expected[0])
        assert toy.same(found[1], expected[1])
        torch.testing.assert_close(found[2], expected[2])  # autograd adds up in another order
        if training and rows % n == 0:  # the only batches that PyTorch's stages take
            stock = toy.Run(schedule, PipelineStage)
            _, losses, grads = stock.take(x, target, stock.another(n))
            assert toy.same(found[1], losses)
            assert toy.same(found[2], grads)
            assert len(grads) == 2 * len(ours.stages)
    return len(plan)


@pytest.mark.parametrize(
    ("schedule", "plan", "count"),
    [
        *(("1f1b", plan, 4 if plan == "more ranks" else 2) for plan in PLANS),
        *((name, "same schedule", 2) for name in toy.SCHEDULES if name != "1f1b" and not toy.sends_to_itself(name)),
        ("interleaved-2", "more ranks", 3),
    ],
)
def test_each_pass_equals_stages_that_were_made_for_it(ranks: Ranks, schedule: str, plan: str, count: int):
    passes = PLANS[plan]
    if schedule.startswith("interleaved") or schedule == "zero-bubble":  # take only multiples of the ranks
        passes = [(name, training, n + -n % count, *rest) for name, training, n, *rest in passes]
    make = DECLARED if plan == "declared" else PLAIN
    assert ranks.run(equal, schedule, passes, make, ranks=count) == [len(passes)] * count


class Offset(toy.Block):
    """A block that hands over a parameter, which no input leads to, next to its activations."""

    last = False

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.linspace(-1, 1, toy.WIDTH))

    def forward(self, x: Any, offset: Tensor | None = None) -> Any:
        x, offset = x if isinstance(x, tuple) else (x, offset)
        y = super().forward(x)
        y = y if offset is None else y + offset
        return y + self.offset if self.last else (y, self.offset * 2)


def unevenly(schedule: str, kind: Any, frozen: int) -> None:
    """Where some parameters need no gradients, or get them on a way of their own."""
    run = toy.Run(schedule, PLAIN, kind=kind)
    modules = toy.blocks(run.stages[0].num_stages, kind)
    for index, module in [*enumerate(modules), *((s.stage_index, s.submod) for s in run.stages)]:
        module.last = index == len(modules) - 1
        module.requires_grad_(index >= frozen)
    found = run.take(*data(0))
    expected = in_one_process(run, True, N, *data(0), modules=modules)
    torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv", "dual-pipe-v"])
@pytest.mark.parametrize(("kind", "frozen"), [(toy.Block, 1), (toy.Block, 3), (Offset, 0)])
def test_schedules_that_split_backward_lose_no_gradients(ranks: Ranks, schedule: str, kind: Any, frozen: int):
    if toy.sends_to_itself(schedule):
        pytest.skip("PyTorch before 2.12 sends to itself, which Gloo cannot")
    ranks.run(unevenly, schedule, kind, frozen)


# ------------------------------------------------------------------------------------------------ codecs


def coded(codec: Codec) -> Any:
    """Losses of all passes of all plans, and what the two ends of each boundary hold after them."""
    run = toy.Run("interleaved-2", toy.lowbit(forward=codec, backward=codec, timeout=30))
    runners: dict[Any, Any] = {}
    losses: list[Tensor] = []
    for number, (name, training, n, rows, length) in enumerate(PLANS["lengths"] + PLANS["same schedule"]):
        runner = runners.setdefault((name, n), run.another(n))
        losses += run.take(*data(number, rows, length), runner, training=training)[1]
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
    others = {*threading.enumerate()} - {threading.current_thread()}  # left by earlier tests of this process
    run = toy.Run("1f1b", PLAIN)
    counts: Counter[str] = Counter()
    reads = ("get", "check", "wait", "multi_get")
    names = (*reads, "append", "set", "add", "compare_set", "delete_key", "multi_set")
    kinds = dist.Store, dist.PrefixStore, dist.TCPStore  # pyright: ignore
    calls = [(kind, name) for kind in kinds for name in names if name in vars(kind)]

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += threading.current_thread() not in others
            return function(*args, **kwargs)

        return call

    found, runners = [], {"a": run.another(N), "e": run.another(2)}
    plan = [*both("a"), evaluate("e", 2), train("a", rows=7)]
    with ExitStack() as stack:
        for kind, name in [(Agreement, "exchange"), *calls]:
            stack.enter_context(mock.patch.object(kind, name, counting(name, getattr(kind, name))))
        for name, training, _, rows, length in 3 * plan:
            run.take(*data(0, rows, length), runners[name], training=training)
            found.append({name: count for name, count in counts.items() if count})
            counts.clear()
    new, known = found[: len(plan)], found[len(plan) :]
    assert all(each["exchange"] == 2 and each["append"] for each in new), new
    assert known == [{}] * 8, known


@on_ranks
def test_receives_are_posted_for_the_next_pass_of_the_same_kind() -> None:
    """After a training step that evaluations came before."""
    run = toy.Run("1f1b", PLAIN)
    for run_pass in (run.train, run.train, run.evaluate, run.evaluate, run.train):
        run_pass(0)
    # Gradients of the next step; and activations of it, and of the next evaluation.
    assert len(run.stages[0].lanes.transport._inbox._posted) == toy.MICRO_BATCHES * (1 + run.last)


@on_ranks
def test_a_pipeline_that_is_dropped_lets_go_of_its_connections() -> None:
    """Without the garbage collector."""
    gc.disable()
    try:
        run = toy.Run("1f1b", PLAIN)
        run.train(0)
        stage = run.stages[0]
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
    assert len(run.stages[0]._passes._agreed) == 2


class Scaled(toy.Block):
    """A block with a keyword input."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x if scale is None else x * scale.sum())


@on_ranks
def test_declared_layouts_stand_whatever_keywords_look_like() -> None:
    """Keyword inputs whose parts differ in length, where layouts of what crosses are declared."""
    run = toy.Run("1f1b", DECLARED, kind=Scaled)
    _, losses = run.feed(*data(0, ROWS, 3), **({"scale": torch.ones(N + 1)} if run.first else {}))
    assert len(losses) == N * run.last


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
    run, modules = toy.Run("1f1b", PLAIN, kind=Replacing), toy.blocks(2, Replacing)
    x, target = data(0, ROWS, 3)
    assert toy.same(run.take(x, target)[1], in_one_process(run, True, N, x, target, modules)[1])
    assert torch.equal(run.stages[0].submod.mean, modules[dist.get_rank()].get_buffer("mean"))


class Remembering(toy.Block):
    """A block with its last output in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(toy.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.get_buffer("seen").copy_(y[0, 0])
        return y


@on_ranks
def test_the_trial_of_an_evaluation_leaves_no_graph_in_buffers() -> None:
    run = toy.Run("1f1b", PLAIN, kind=Remembering)
    for number in range(2):
        run.feed(*data(number), training=False)
    seen = run.stages[0].submod.get_buffer("seen")
    assert seen.any()
    assert not seen.requires_grad


class InPlace(toy.Block):
    """A block that changes its input in place, as few do outside evaluations."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class Inner(toy.Block):
    """A block that takes gradients itself, as for forces or for training at test time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            [force] = torch.autograd.grad(z.pow(3).sum(), z)
        return super().forward(x) + force + torch.func.grad(lambda z: z.pow(3).sum())(x.detach())


@pytest.mark.parametrize("kind", [InPlace, Inner])
@on_ranks
def test_evaluations_take_what_changes_inputs_and_what_differentiates(kind: Any) -> None:
    run = toy.Run("interleaved-2", PLAIN, kind=kind)
    found = run.take(*data(1), training=False)
    expected = in_one_process(run, False, N, *data(1))
    if run.last:
        torch.testing.assert_close(found[:2], expected[:2])


def other_formats(schedule: str) -> Any:
    """Bits of each step, gradients equal to those of stages made with the second format, and receives left over."""
    first, second = GroupInt(bits=8, group=24), TransformQuant(bits=12)
    run = toy.Run(schedule, toy.lowbit(forward=first, backward=first, warmup_steps=1))
    fresh = toy.Run(schedule, toy.lowbit(forward=second, backward=second))
    bits, left = [], []
    for step in range(8):
        if step == 4:
            left = [len(stage.lanes.transport._inbox._posted) for stage in run.stages]
            for stage in run.stages:
                stage.set_codecs(second, second)
            fresh.continues(run)
        for stage in run.stages:
            stage.looks_ahead = step != 3
            stage.traffic.reset()
        grads = run.train(step)
        bits.append(sum(stage.traffic.forward_bits for stage in run.stages))
        if step == 4:
            assert toy.same(fresh.train(step), grads), "states start empty"
    return bits, left


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-2"])
def test_formats_change_between_steps(ranks: Ranks, schedule: str):
    bits, left = ranks.run(other_formats, schedule)[0]
    assert left == [0] * len(left), "no receive waits for a message of the old size"
    plain, coded, other = bits[0], bits[3], bits[7]
    assert plain > coded > 0
    assert other not in (plain, coded)
    assert bits == [plain, *[coded] * 3, *[other] * 4]
