"""Compressed activations on several ranks: the same gradients as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit.activations import LayerAware, compress_saved_
from lowbit.codecs import Cast
from lowbit.wire.pytorch import version
from tests.lowbit.activations.models import Calls, GatedBlock
from tests.lowbit.pipeline import toy
from tests.processes import on_ranks

FP32 = Cast(dtype=torch.float32)


class Compressed(GatedBlock):
    """A block that fits the toy pipeline."""

    def __init__(self) -> None:
        super().__init__(toy.WIDTH, 40, nn.LayerNorm)
        compress_saved_(self, LayerAware(bits=4))


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, toy.WIDTH, generator=torch.Generator().manual_seed(rank))


@on_ranks
def test_ddp_and_fsdp2() -> None:
    alone, model, sharded = (nn.Sequential(*toy.blocks(2, Compressed)) for _ in range(3))
    for rank in range(2):
        (alone(batch(rank)).square().mean() / 2).backward()
    expected = [p.grad for p in alone.parameters()]
    wrapped = DistributedDataParallel(model)
    wrapped(batch(dist.get_rank())).square().mean().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)

    for part in (*sharded, sharded):
        fully_shard(part)
    with Calls() as calls:
        loss = sharded(batch(dist.get_rank())).square().mean()
    assert calls.count == {"norm_encode": 2, "gated_encode": 2, "group_int_encode": 2}  # gate, and up
    loss.backward()
    for p, grad in zip(sharded.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), grad)  # pyright: ignore


@on_ranks
def test_norms_that_are_sharded_by_themselves_are_named() -> None:
    model = toy.blocks(1, Compressed)[0]
    fully_shard(model.norm)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="one fully_shard for both"):
        model(batch(0)).sum().backward()


@on_ranks
def test_pipelines_of_every_kind() -> None:
    schedules = ["1f1b", "interleaved-2"]
    if version() >= (2, 13):  # older ones lose what is saved between the passes of a backward
        schedules += ["zero-bubble", "zbv"]
    for schedule in schedules:
        make = toy.lowbit(forward=FP32, backward=FP32, timeout=30)
        run = toy.Run(schedule, make, Compressed)
        stages = toy.blocks(2 * toy.SCHEDULES[schedule][1], Compressed)
        x, target = toy.batch(0)
        parts = zip(x.chunk(toy.MICRO_BATCHES), target.chunk(toy.MICRO_BATCHES), strict=True)
        for piece, goal in parts:
            y = nn.Sequential(*stages)(piece)
            (toy.loss_of(y, goal) / toy.MICRO_BATCHES).backward()
        held = toy.held(schedule, dist.get_rank(), 2)
        expected = [p.grad for i in held for p in stages[i].parameters()]
        gradients = run.train(0)
        assert len(gradients) == len(expected)
        for grad, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(grad, other)
