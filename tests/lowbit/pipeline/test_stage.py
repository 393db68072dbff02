"""`LowBitStage` under PyTorch's schedules, on real ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lowbit.codecs import AQSGD, Codec, RateGoal, TAHQuant, TransformQuant, backward_codec, parse
from lowbit.pipeline import LowBitStage
from lowbit.pipeline import stage as stage_module
from lowbit.wire.checksum import CHECKSUM_BYTES
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.toy import FP32, INT4, INT6
from tests.processes import Ranks, on_ranks
from tests.refused import refused

SHAPE = torch.Size((toy.ROWS, 8, toy.WIDTH))


def message(codec: Codec) -> int:
    """Bytes of a micro-batch."""
    return codec.nbytes(SHAPE) + CHECKSUM_BYTES


# ------------------------------------------------------------------------------------------------ bytes


@on_ranks
def test_every_byte_is_counted() -> None:
    run = toy.Run("interleaved-2", toy.lowbit(forward={0: INT4, 1: FP32, 2: INT4}, backward=INT6, timeout=30))
    for step in range(2):
        run.train(step)
    for stage in run.stages:
        sent, codec = stage.traffic, FP32 if stage.stage_index == 1 else INT4
        up, down = (2 * toy.MICRO_BATCHES * sends for sends in (not stage.is_last, not stage.is_first))
        assert (sent.forward_bytes, sent.backward_bytes) == (up * message(codec), down * message(INT6))
        assert (sent.forward_elements, sent.backward_elements) == (up * SHAPE.numel(), down * SHAPE.numel())
        assert min(sent.codec_seconds, sent.wait_seconds, sent.checksum_seconds) > 0
        assert sent.forward_bits == (8 * message(codec) / SHAPE.numel() if up else 0)
        sent.reset()
        left = type(sent)(peak_bytes=sent.held_bytes, held_bytes=sent.held_bytes)
        assert sent == left  # room for the next step
        assert stage.state_bytes() == 0


@on_ranks
def test_a_warm_up_travels_at_full_precision_and_evaluation_does_not_shorten_it() -> None:
    run = toy.Run("1f1b", toy.lowbit(forward=INT4, backward=INT6, warmup_steps=2))
    plain, [stage], sizes = toy.Run("1f1b", PipelineStage), run.stages, []
    for step in range(4):
        stage.traffic.reset()
        grads, expected = run.train(step), plain.train(step)
        sizes.append(stage.traffic.forward_bytes + stage.traffic.backward_bytes)
        run.evaluate(step)  # does not count as a training step
        assert step >= 2 or toy.same(grads, expected)
    codec = INT6 if run.last else INT4
    assert sizes == [toy.MICRO_BATCHES * message(c) for c in (FP32, FP32, codec, codec)]


# ------------------------------------------------------------------------------------------------ tensors


class Oddly(nn.Module):
    """Passes on tensors whose elements share memory, have gaps, or lie in another order; one has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, toy.WIDTH))

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        rows = x.shape[0]
        if rest:  # as the last stage
            bias, positions, mask, windows, image, gaps, turned, nothing, low = rest
            assert nothing.shape == (0, toy.WIDTH)
            assert torch.equal(positions, torch.arange(8).expand(rows, -1))
            assert mask.all()
            assert low.dtype == torch.bfloat16
            x = x + low.float()
            y = x * self.scale + bias * positions[:, :1, None] + windows.sum(-1) + image.mean((1, 2, 3))[:, None, None]
            return (y + gaps.sum((1, 2))[:, None, None]) * mask + turned.T[:, None, :] + nothing.sum()
        y = x * self.scale
        return (
            y,
            self.scale.expand(rows, 8, -1),  # requires a gradient
            torch.arange(8).unsqueeze(0).expand(rows, -1),  # position_ids, as in Transformers
            torch.tensor(True).expand(rows, 8, toy.WIDTH),
            torch.arange(rows * 8 * toy.WIDTH + 3.0).as_strided(
                (rows, 8, toy.WIDTH, 4), (8 * toy.WIDTH, toy.WIDTH, 1, 1)
            ),
            y[:, :, :16].reshape(rows, 8, 4, 4).contiguous(memory_format=torch.channels_last),
            y[:, ::2, 1::3],
            y[:, 0].T,
            y.new_empty(0, toy.WIDTH),
            y[:, :1].bfloat16(),
        )


def odd_layouts(codec: Codec) -> tuple[list[Tensor], list[Tensor], int]:
    run = toy.Run("gpipe", toy.lowbit(forward=codec, backward=codec, timeout=30), kind=Oddly)
    for step in range(2):
        _, losses, grads = run.take(*toy.batch(step))
    return losses, grads, run.stages[0].traffic.forward_bytes


@pytest.mark.parametrize("codec", [FP32, INT4], ids=["exact", "coded"])
def test_tensors_of_any_layout_cross_and_integers_and_masks_are_never_coded(ranks: Ranks, codec: Codec):
    outcomes, n = ranks.run(odd_layouts, codec), toy.ROWS
    floating = [(n, 8, 24), (n, 8, 24), (n, 8, 4, 4), (n, 4, 8), (24, n), (n, 1, 24)]
    exact = 4 * n * 8 * 24 * 4 + 8 * 8 * n + 8 * 24 * n  # a constant, integers and booleans
    each = sum(codec.nbytes(shape) for shape in floating) + exact + 9 * CHECKSUM_BYTES
    assert outcomes[0][2] == 2 * toy.MICRO_BATCHES * each
    if codec is FP32:
        first, last, expected = Oddly(), Oddly(), []
        for x, target in zip(*(t.split(toy.ROWS) for t in toy.batch(1)), strict=True):
            expected.append(toy.loss_of(last(*first(x)), target))
            (expected[-1] / toy.MICRO_BATCHES).backward()
        torch.testing.assert_close(outcomes[1][0], [loss.detach() for loss in expected])
        torch.testing.assert_close([grads for _, grads, _ in outcomes], [[first.scale.grad], [last.scale.grad]])


class Masking(toy.Block):
    """A block that makes an additive mask and cosines, or takes them from the one before; it counts changed ones."""

    changed, last = 0, False

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        rows, length, width = x.shape
        own = (
            torch.full((length, length), torch.finfo(x.dtype).min).triu(1).expand(rows, -1, -1),
            torch.arange(length * 1.0).cos()[:, None].expand(-1, width),
        )
        mask, cosines = given or own
        self.changed += bool(mask.any()) and not all(map(torch.equal, given, own))  # trials have zeros
        y = super().forward(x)
        y = y + (y @ y.mT + mask).softmax(-1) @ (y * cosines)
        return y if self.last else (y, mask, cosines)


def masking(codec: Codec, frozen: int, inference: bool, **options: Any) -> Any:
    """Constants that arrived changed, and bytes sent in an evaluation, a training step, and another evaluation."""
    run = toy.Run("interleaved-2", toy.lowbit(forward=codec, timeout=30, **options), kind=Masking)
    for stage in run.stages:
        stage.submod.last = stage.is_last
        stage.submod.requires_grad_(stage.stage_index >= frozen)
    sent = []
    for training in (False, True, False):
        before = sum(stage.traffic.forward_bytes for stage in run.stages)
        with torch.inference_mode(inference and not training):
            run.feed(*toy.batch(0), training=training)
        sent.append(sum(stage.traffic.forward_bytes for stage in run.stages) - before)
    assert [p.requires_grad for p in run.parameters] == [s.stage_index >= frozen for s in run.stages for _ in range(2)]
    return sum(stage.submod.changed for stage in run.stages), sent


@pytest.mark.parametrize(("frozen", "inference"), [(0, False), (0, True), (2, False)])
def test_constants_arrive_exactly_in_training_and_evaluation(ranks: Ranks, frozen: int, inference: bool):
    """Also after frozen stages, whose activations need no gradient but are coded."""
    constants = 4 * (toy.ROWS * 8 * 8 + 8 * toy.WIDTH) + 2 * CHECKSUM_BYTES
    sends = toy.MICRO_BATCHES * (message(INT4) + constants)
    assert ranks.run(masking, INT4, frozen, inference) == [(0, [2 * sends] * 3), (0, [sends] * 3)]


def test_constants_are_coded_if_asked_for(ranks: Ranks):
    shapes = (toy.ROWS, 8, 8), (8, toy.WIDTH)
    sends = toy.MICRO_BATCHES * (message(INT4) + sum(INT4.nbytes(shape) + CHECKSUM_BYTES for shape in shapes))
    (here, sent), (there, _) = ranks.run(partial(masking, code_constants=True), INT4, 0, False)
    assert sent == [2 * sends] * 3
    assert min(here, there) > 0


@on_ranks
def test_declared_tensors_without_gradients_are_constants() -> None:
    """Of any floating dtype."""
    shapes = SHAPE, (toy.ROWS, 8, 8)
    declared = [torch.empty(SHAPE, requires_grad=True), torch.empty(toy.ROWS, 8, 8, dtype=torch.float64)]
    one = torch.empty(SHAPE, requires_grad=True)
    inputs, outputs = ([one], declared) if dist.get_rank() == 0 else (declared, [one])
    make = toy.lowbit(forward=INT4, input_args=tuple(inputs), output_args=tuple(outputs))
    run = toy.Run("1f1b", make, kind=Doubling)
    for training in (False, True):
        run.feed(*toy.batch(0), training=training)
    each = message(INT4) + 8 * torch.Size(shapes[1]).numel() + CHECKSUM_BYTES
    assert run.stages[0].traffic.forward_bytes == (0 if run.last else 2 * toy.MICRO_BATCHES * each)


class Doubling(toy.Block):
    """A block that hands over a mask in float64."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y, own = super().forward(x), torch.full((x.shape[0], 8, 8), -1e300, dtype=torch.float64)
        if mask is None:
            return y, own
        assert torch.equal(mask, own)
        return y


class Poison(toy.Block):
    """A block that gives NaN for the second micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        poisoned = torch.equal(x, toy.batch(0)[0][toy.ROWS : 2 * toy.ROWS])
        y = super().forward(x)
        return torch.where(torch.arange(toy.WIDTH) == 5, torch.nan, y) if poisoned else y


@on_ranks
def test_nan_reaches_the_loss() -> None:
    run = toy.Run("gpipe", toy.lowbit(forward=TAHQuant(), backward=INT6), kind=Poison)
    run.train(0)
    assert [bool(loss.isnan()) for loss in run.losses] == [False, True, False, False] * run.last


def in_subgroups() -> list[Tensor]:
    """Two pipelines side by side, whose ranks in their groups are not those in the job."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    own = groups[dist.get_rank() % 2]
    run = toy.Run("interleaved-2", toy.lowbit(forward=FP32, backward=FP32), group=own)
    for step in range(2):
        run.train(step)
    return run.losses


def test_pipelines_side_by_side_in_groups_of_their_own(ranks: Ranks):
    _, _, first, second = ranks.run(in_subgroups, ranks=4)
    assert len(first) == 2 * toy.MICRO_BATCHES
    assert toy.same(first, second)


# ------------------------------------------------------------------------------------------------ state


def keyed(codec: Codec, stop_after: int | None, backward: Codec) -> Any:
    """Train on the same two batches in turn, restarting from a checkpoint after some steps."""
    run = toy.Run("1f1b", toy.lowbit(forward=codec, backward=backward, warmup_steps=1, timeout=30))
    for step in range(5):
        if step == stop_after:
            run = run.restarted()
        [stage] = run.stages
        stage.set_samples(torch.arange(8) + 100 * (step % 2))
        run.train(step % 2)
        if step == 3:
            run.evaluate(0)
    return run.losses, stage.traffic, stage.state_bytes()


def test_a_codec_that_remembers_samples_resumes_exactly(ranks: Ranks):
    through, resumed = (ranks.run(keyed, AQSGD(inner=INT4), stop, INT6) for stop in (None, 3))
    assert toy.same(through[1][0], resumed[1][0])
    sample = 8 * toy.WIDTH
    for _, _, state in through:
        assert state == 16 * sample * 4  # all samples, in float32, at both ends
    # A warm-up step and an evaluation at full precision; two first visits; two later ones.
    first, later = 8 * sample * 4, 8 * INT4.nbytes((8, toy.WIDTH))
    checksums = 6 * toy.MICRO_BATCHES * CHECKSUM_BYTES
    assert through[0][1].forward_bytes == 2 * first + 2 * first + 2 * later + checksums


def test_directions_are_learned_alike_at_both_ends_and_resume_exactly(ranks: Ranks):
    codecs = TransformQuant(bits=9), TransformQuant(bits=9, step="message")
    through, resumed = (ranks.run(keyed, codecs[0], stop, codecs[1]) for stop in (None, 3))
    assert toy.same(through[1][0], resumed[1][0])
    # Five steps and an evaluation, of which one step at full precision.
    for _, _, state in through:
        assert state == sum(c.open(shape=SHAPE, dtype=torch.float32).state_bytes() for c in codecs)
    assert through[0][1].forward_bytes == 4 * (message(FP32) + 5 * message(codecs[0]))
    assert through[1][1].backward_bytes == 4 * (message(FP32) + 4 * message(codecs[1]))


# ------------------------------------------------------------------------------------------------ arguments


@on_ranks
def test_defaults_are_recommended_and_bad_arguments_named() -> None:
    def stage(**changes: Any) -> Callable[[], LowBitStage]:
        options: Any = {"forward": INT4, "backward": INT6} | changes
        return lambda: LowBitStage(nn.Identity(), dist.get_rank(), 2, toy.CPU, **options)

    good = stage()()
    of_each = {0: INT4, 1: FP32, 2: INT6}
    for given, codecs in (({}, dict.fromkeys(range(3), TransformQuant())), ({"forward": of_each}, of_each)):
        lanes = LowBitStage(nn.Identity(), dist.get_rank(), 4, toy.CPU, **given).lanes.by_name()
        expected = {"forward": codecs, "backward": {i: backward_codec(codec) for i, codec in codecs.items()}}
        assert len(lanes) == 2 + 2 * dist.get_rank()
        for lane in lanes.values():
            assert lane.codec == expected[lane.direction][lane.boundary]
    goal, elsewhere = RateGoal(), {"steps": 3, "lanes": {"boundary 7 forward": {}}}
    of_another = {"steps": 3, "lanes": {}, "formats": {"boundary 9 forward": "fp32"}}
    refused(
        (stage(forward="int4"), TypeError, "forward.*'int4'"),
        (stage(backward={1: INT6}), ValueError, "backward.*boundary 0"),
        (stage(forward={0: INT4, 5: INT4}), ValueError, "forward has codecs for boundaries 0, 5; there are 0 to 0"),
        (stage(forward={0: None}), TypeError, "forward is None"),
        (stage(forward={"0": INT4}), ValueError, "forward has no codec for boundary 0; given: '0'"),
        (stage(warmup_steps=-1), ValueError, "warmup_steps.*-1"),
        (stage(warmup_steps=2.5), TypeError, "warmup_steps.*2.5"),
        (stage(timeout=0), ValueError, "timeout.*0"),
        (stage(timeout="soon"), TypeError, "timeout.*'soon'"),
        (stage(checksums="yes"), TypeError, "checksums is 'yes'; allowed: True or False"),
        (stage(code_constants=1), TypeError, "code_constants is 1; allowed: True or False"),
        (stage(forward={0: goal}), TypeError, "forward is RateGoal.*; allowed: a codec"),
        (lambda: good.set_samples(torch.zeros(2)), TypeError, "float32"),
        (lambda: good.set_samples([True, False]), TypeError, "bool"),
        (lambda: good.set_samples([1, 2, 3, 1]), ValueError, "a sample twice"),
        (lambda: good.set_samples(torch.zeros(2, 2, dtype=torch.int64)), ValueError, r"\(2, 2\)"),
        (lambda: good.set_samples([[3], [3]]), ValueError, r"\(2, 1\)"),
        (lambda: good.set_codecs("int4", FP32), TypeError, "forward is 'int4'; allowed: a codec"),
        (lambda: good.load_codec_state_dict(elsewhere), ValueError, "boundary 7 forward"),
        (lambda: good.load_codec_state_dict({}), TypeError, "state is {}; allowed: what codec_state_dict returns"),
        (lambda: good.load_codec_state_dict({"steps": -1, "lanes": {}}), ValueError, "steps is -1"),
        (lambda: good.load_codec_state_dict(of_another), ValueError, "state has boundary 9 forward; this stage has b"),
        (lambda: LowBitStage(None, 0, 2, toy.CPU), TypeError, "submodule is None; allowed: a torch.nn.Module"),
        (lambda: LowBitStage(nn.Identity(), -1, 2, toy.CPU), ValueError, "stage_index is -1; allowed: 0 to 1"),
        (lambda: LowBitStage(nn.Identity(), 2, 2, toy.CPU), ValueError, "stage_index is 2; allowed: 0 to 1"),
    )


def test_a_state_that_was_saved_with_other_formats_is_named(ranks: Ranks):
    assert ranks.run(_loaded_with_other_formats, ranks=2) == [True, True]


def _loaded_with_other_formats() -> bool:
    saved, other = (
        LowBitStage(nn.Identity(), dist.get_rank(), 2, toy.CPU, forward=c, backward=INT6) for c in (INT4, FP32)
    )
    state = saved.codec_state_dict()
    assert {name: parse(text) for name, text in state["formats"].items()} == {
        "boundary 0 forward": INT4, "boundary 0 backward": INT6,
    }  # fmt: skip
    with mock.patch.object(stage_module.log, "warning") as warned:
        saved.load_codec_state_dict(state)
        assert not warned.called
        other.load_codec_state_dict(state)
    ((text, *about),) = (call.args for call in warned.call_args_list)
    assert text % tuple(about) == f"boundary 0 forward: the saved state is of {INT4}, but this stage uses {FP32}"
    return True
