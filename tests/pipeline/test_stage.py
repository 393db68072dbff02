"""`LowBitStage` under PyTorch's schedules, on real ranks."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from lowbit.codecs import AQSGD, Codec, TAHQuant, TransformQuant, backward_codec
from lowbit.pipeline import LowBitStage
from lowbit.wire.checksum import CHECKSUM_BYTES
from tests.pipeline import toy
from tests.pipeline.toy import FP32, INT4, INT6
from tests.processes import Ranks, on_ranks
from tests.refused import refused


# ------------------------------------------------------------------------------------------------ FP32 wire


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


# ------------------------------------------------------------------------------------------------ codecs


def trains_with(schedule: str, forward: Any, backward: Any) -> Any:
    run = toy.Run(schedule, toy.lowbit(forward=forward, backward=backward, timeout=30))
    for step in range(2):
        run.train(step)
    return (run.losses, [stage.traffic for stage in run.stages], [s.state_bytes() for s in run.stages])


def test_every_byte_is_counted(ranks: Ranks):
    outcome = ranks.run(trains_with, "interleaved-2", INT4, INT6)
    shape = (toy.ROWS, 8, toy.WIDTH)
    messages, numel = 2 * toy.MICRO_BATCHES, toy.ROWS * 8 * toy.WIDTH
    for rank, (_, traffic, state) in enumerate(outcome):
        for stage, sent in zip((rank, rank + 2), traffic, strict=True):
            up, down = messages * (stage < 3), messages * (stage > 0)
            assert sent.forward_bytes == up * (INT4.nbytes(shape) + CHECKSUM_BYTES)
            assert sent.backward_bytes == down * (INT6.nbytes(shape) + CHECKSUM_BYTES)
            assert sent.forward_elements == up * numel
            assert sent.backward_elements == down * numel
            assert sent.codec_seconds > 0
            assert sent.wait_seconds > 0
            bits = 8 * (INT4.nbytes(shape) + CHECKSUM_BYTES) / numel
            assert sent.forward_bits == (bits if up else 0)
            assert sent.checksum_seconds > 0
            sent.reset()
            left = type(sent)(peak_bytes=sent.held_bytes, held_bytes=sent.held_bytes)
            assert sent == left  # room for the next step
        assert state == [0, 0]


def test_gradients_get_the_format_beside_that_of_each_boundary(ranks: Ranks):
    codecs = {0: INT4, 1: FP32, 2: TransformQuant()}
    beside = {i: backward_codec(codec) for i, codec in codecs.items()}
    outcome, expected = (ranks.run(trains_with, "1f1b", codecs, backward, ranks=4) for backward in (None, beside))
    for (losses, _, _), (expected_losses, _, _) in zip(outcome, expected, strict=True):
        assert toy.same(losses, expected_losses)
    sent = [[(t.forward_bytes, t.backward_bytes) for _, [t], _ in each] for each in (outcome, expected)]
    assert sent[0] == sent[1]
    shape, n = (toy.ROWS, 8, toy.WIDTH), 2 * toy.MICRO_BATCHES
    sizes = [[n * (c.nbytes(shape) + CHECKSUM_BYTES) for c in each.values()] for each in (codecs, beside)]
    assert sent[0] == list(zip([*sizes[0], 0], [0, *sizes[1]], strict=True))


def warms_up() -> tuple[list[Tensor], list[int]]:
    run = toy.Run("1f1b", toy.lowbit(forward=INT4, backward=INT6, warmup_steps=2))
    plain = toy.Run("1f1b", PipelineStage)
    sizes = []
    for step in range(4):
        grads, expected = run.train(step), plain.train(step)
        sizes.append(run.stages[0].traffic.forward_bytes + run.stages[0].traffic.backward_bytes)
        run.stages[0].traffic.reset()
        run.evaluate(step)  # does not count as a training step
        run.stages[0].traffic.reset()
        if step < 2:
            assert toy.same(grads, expected)
    return run.losses, sizes


def test_a_warm_up_travels_at_full_precision_and_evaluation_does_not_shorten_it(ranks: Ranks):
    shape = (toy.ROWS, 8, toy.WIDTH)
    for (_, sizes), codec in zip(ranks.run(warms_up), (INT4, INT6), strict=True):
        codecs = (FP32, FP32, codec, codec)
        each = [toy.MICRO_BATCHES * (c.nbytes(shape) + CHECKSUM_BYTES) for c in codecs]
        assert sizes == each


# ------------------------------------------------------------------------------------------------ tensors


class Oddly(nn.Module):
    """Passes on tensors whose elements share memory, have gaps, or lie in another order; one has no element."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, toy.WIDTH))
        self.last = last

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        rows = x.shape[0]
        if self.last:
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
            torch.arange(8).unsqueeze(0).expand(rows, -1),  # position_ids
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
    make: Any = toy.lowbit(forward=codec, backward=codec, timeout=30)
    modules, rank = [Oddly(last=False), Oddly(last=True)], dist.get_rank()
    stage = make(modules[rank], rank, 2, toy.CPU)
    runner = ScheduleGPipe(stage, toy.MICRO_BATCHES, loss_fn=toy.loss_of)
    losses: list[Tensor] = []
    for step in range(2):
        modules[rank].zero_grad()
        x, target = toy.batch(step)
        runner.step(*([x] if rank == 0 else []), target=target if rank else None, losses=losses)
    grads = [p.grad for p in modules[rank].parameters() if p.grad is not None]
    return [loss.detach() for loss in losses], grads, stage.traffic.forward_bytes


@pytest.mark.parametrize("codec", [FP32, INT4], ids=["exact", "coded"])
def test_tensors_of_any_layout_cross_and_integers_and_masks_are_never_coded(ranks: Ranks, codec: Codec):
    """Expanded ones among them, such as position_ids of Transformers."""
    outcomes, n = ranks.run(odd_layouts, codec), toy.ROWS
    floating = [(n, 8, 24), (n, 8, 24), (n, 8, 24, 4), (n, 8, 4, 4), (n, 4, 8), (24, n), (n, 1, 24)]
    each = sum(codec.nbytes(shape) for shape in floating) + 8 * 8 * n + 8 * 24 * n + 9 * CHECKSUM_BYTES
    assert outcomes[0][2] == 2 * toy.MICRO_BATCHES * each
    if codec is not FP32:
        return
    first, last = Oddly(last=False), Oddly(last=True)
    expected = []
    for x, target in zip(*(t.split(toy.ROWS) for t in toy.batch(1)), strict=True):
        expected.append(toy.loss_of(last(*first(x)), target))
        (expected[-1] / toy.MICRO_BATCHES).backward()
    torch.testing.assert_close(outcomes[1][0], [loss.detach() for loss in expected])
    for (_, grads, _), module in zip(outcomes, (first, last), strict=True):
        torch.testing.assert_close(grads, [p.grad for p in module.parameters()])


class Poison(nn.Module):
    """A block that gives NaN for the second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toy.Block()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        poisoned = torch.equal(x, toy.batch(0)[0][toy.ROWS : 2 * toy.ROWS])
        return torch.where(torch.arange(toy.WIDTH) == 5, torch.nan, y) if poisoned else y


def poisoned() -> list[Tensor]:
    run = toy.Run("gpipe", toy.lowbit(forward=TAHQuant(), backward=INT6), kind=Poison)
    run.train(0)
    return run.losses


def test_nan_reaches_the_loss(ranks: Ranks):
    losses = ranks.run(poisoned)[1]
    assert [bool(loss.isnan()) for loss in losses] == [False, True, False, False]


# ------------------------------------------------------------------------------------------------ state


def keyed(codec: Codec, stop_after: int | None = None, backward: Codec = INT6) -> Any:
    """Train on the same two batches in turn, restarting from a checkpoint after some steps."""
    run = toy.Run("1f1b", toy.lowbit(forward=codec, backward=backward, warmup_steps=1, timeout=30))
    losses = []
    for step in range(5):
        if step == stop_after:
            run = run.restarted()
        batch = step % 2
        ids = torch.arange(8) + 100 * batch
        for stage in run.stages:
            stage.set_samples(ids)
        run.train(batch)
        if step == 3:
            run.evaluate(0)
        losses += run.losses[-toy.MICRO_BATCHES :]
    stage = run.stages[0]
    return losses, stage.traffic, stage.state_bytes(), stage.chosen()


def test_a_codec_that_remembers_samples_resumes_exactly(ranks: Ranks):
    through, resumed = (ranks.run(keyed, AQSGD(inner=INT4), stop) for stop in (None, 3))
    assert toy.same(through[1][0], resumed[1][0])
    sample = 8 * toy.WIDTH
    for _, _, state, _ in through:
        assert state == 16 * sample * 4  # all samples, in float32, at both ends
    # A warm-up step and an evaluation at full precision; two first visits; two later ones.
    first, later = 8 * sample * 4, 8 * INT4.nbytes((8, toy.WIDTH))
    checksums = 6 * toy.MICRO_BATCHES * CHECKSUM_BYTES
    assert through[0][1].forward_bytes == 2 * first + 2 * first + 2 * later + checksums


@pytest.mark.parametrize("auto", [False, True], ids=["fixed", "auto"])
def test_directions_are_learned_alike_at_both_ends_and_resume_exactly(ranks: Ranks, auto: bool):
    codec, backward = TransformQuant(bits=9), TransformQuant(bits=9, step="message")
    chosen = [(codec, backward)] * 2
    if auto:
        codec, backward = (replace(c, bits="auto") for c in (codec, backward))
    through = ranks.run(keyed, codec, None, backward)
    for stop in (1, 3) if auto else (3,):
        resumed = ranks.run(keyed, codec, stop, backward)
        assert toy.same(through[1][0], resumed[1][0])
        assert [o[3] for o in resumed] == [o[3] for o in through]
    if auto:
        ((there,), (back,)) = (list(outcome[3].items()) for outcome in through)
        assert there[0] == "boundary 0 forward, tensor 0, width 24"
        assert back[0] == "boundary 0 backward, tensor 0, width 24"
        assert there[1] == replace(codec, bits=there[1].bits)
        chosen = [(there[1], back[1])] * 2
    # Five steps and an evaluation, of which one step at full precision.
    shape = (toy.ROWS, 8, toy.WIDTH)
    for (_, _, state, _), pair in zip(through, chosen, strict=True):
        assert state == sum(c.open(shape=shape, dtype=torch.float32).state_bytes() for c in pair)
    first = 4 * math.prod(shape) + 16 * auto
    first += CHECKSUM_BYTES
    there, back = (c.nbytes(shape) + CHECKSUM_BYTES for c in chosen[0])
    assert through[0][1].forward_bytes == 4 * (first + 5 * there)
    assert through[1][1].backward_bytes == 4 * (first + 4 * back)


# ------------------------------------------------------------------------------------------------ arguments


@on_ranks
def test_defaults_are_recommended_and_bad_arguments_named() -> None:
    def stage(**changes: Any) -> Callable[[], LowBitStage]:
        options: Any = {"forward": INT4, "backward": INT6} | changes
        return lambda: LowBitStage(nn.Identity(), dist.get_rank(), 2, toy.CPU, **options)

    good = stage()()
    by_default = LowBitStage(nn.Identity(), dist.get_rank(), 2, toy.CPU).lanes.by_name()
    assert {lane.direction: lane.codec for lane in by_default.values()} == {
        "forward": TransformQuant(),
        "backward": backward_codec(TransformQuant()),
    }
    refused(
        (stage(forward="int4"), TypeError, "forward.*'int4'"),
        (stage(backward={1: INT6}), ValueError, "backward.*boundary 0"),
        (stage(forward={0: INT4, 5: INT4}), ValueError, "forward has codecs for boundaries 0, 5; there are 0 to 0"),
        (stage(forward={0: None}), TypeError, "forward is None"),
        (stage(warmup_steps=-1), ValueError, "warmup_steps.*-1"),
        (stage(warmup_steps=2.5), TypeError, "warmup_steps.*2.5"),
        (stage(timeout=0), ValueError, "timeout.*0"),
        (stage(timeout="soon"), TypeError, "timeout.*'soon'"),
        (stage(checksums="yes"), TypeError, "checksums is 'yes'; allowed: True or False"),
        (stage(forward={0: TransformQuant(bits="auto")}), ValueError, "warmup_steps.*forward.*'auto'"),
        (lambda: good.set_samples(torch.zeros(2)), TypeError, "float32"),
        (lambda: good.set_samples([True, False]), TypeError, "bool"),
        (lambda: good.set_samples([1, 2, 3, 1]), ValueError, "a sample twice"),
        (lambda: good.set_codecs("int4", FP32), TypeError, "forward is 'int4'; allowed: a codec"),
        (
            lambda: good.set_codecs(FP32, TransformQuant(bits="auto")),
            ValueError,
            "warmup_steps is 0, and backward has",
        ),
        (lambda: good.set_samples(torch.zeros(2, 2, dtype=torch.int64)), ValueError, r"\(2, 2\)"),
        (lambda: good.set_samples([[3], [3]]), ValueError, r"\(2, 1\)"),
        (
            lambda: good.load_codec_state_dict({"steps": 3, "lanes": {"boundary 7 forward": {}}}),
            ValueError,
            "boundary 7 forward",
        ),
    )
