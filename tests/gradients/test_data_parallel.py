"""DDP with gradients in few bits: near to what 32 bits give, and the same on all ranks."""

import contextlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit.codecs import AQSGD, BlockFloat8, Cast, Codec, FeatureInt, GroupInt
from lowbit.gradients import LowBitReduceScatter, all_reduce_hook
from tests.collectives.traffic import equal_everywhere
from tests.pipeline import toy as pipelines
from tests.processes import Ranks, on_ranks
from tests.refused import refused

INT8 = GroupInt(bits=8, group=128, symmetric=True)
INT4 = GroupInt(bits=4, group=64, symmetric=True)


def toy() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(96, 96) for _ in range(6)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Different on every rank: targets are a fixed function of the inputs."""
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x.roll(1, 1).tanh()


def trained(model: nn.Module, *, steps: int, micro_batches: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(micro_batches):
            last = i == micro_batches - 1
            context = contextlib.nullcontext() if last else model.no_sync()  # pyright: ignore
            with context:
                x, y = batch(step * micro_batches + i, dist.get_rank())
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def ddp(codec: Codec | None, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(toy(), bucket_cap_mb=0.08, gradient_as_bucket_view=True)
    if codec is not None:
        model.register_comm_hook(None, all_reduce_hook(codec, small=0, **options))
    return model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    ("codec", "options", "near"),
    [
        (Cast(), {}, 1e-5),
        (BlockFloat8(), {}, 0.03),
        (INT4, {"error_feedback": True}, 0.1),
        (INT8, {"algorithm": "one_shot"}, 0.01),
    ],
)
@on_ranks(3)
def test_ddp_learns_as_with_full_precision(codec: Codec, options: dict[str, Any], near: float) -> None:
    """Seven buckets, rebuilt after the first step; with and without accumulation."""
    for micro_batches in (1, 2):
        plain, low, start = ddp(None), ddp(codec, **options), weights(toy())
        trained(plain, steps=8, micro_batches=micro_batches)
        trained(low, steps=8, micro_batches=micro_batches)
        assert equal_everywhere(weights(low))
        moved, apart = weights(plain) - start, weights(low) - weights(plain)
        share = float(apart.norm() / moved.norm())
        assert share < near, share
        assert share > 0 or isinstance(codec, Cast)


@on_ranks
def test_error_feedback_makes_up_for_two_bits() -> None:
    exact, results = ddp(None), []
    trained(exact, steps=30)
    for feedback in (False, True):
        model = ddp(GroupInt(bits=2, group=64, symmetric=True), error_feedback=feedback)
        trained(model, steps=30)
        assert equal_everywhere(weights(model))
        results.append(float((weights(model) - weights(exact)).norm()))
    without, with_feedback = results
    assert with_feedback < 0.8 * without


@on_ranks(4)
def test_models_of_several_groups_do_not_meet() -> None:
    rank, found = dist.get_rank(), [None] * 4
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    assert isinstance(group, dist.ProcessGroup)
    torch.manual_seed(rank // 2)
    model = nn.Linear(64, 64)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(None, all_reduce_hook(BlockFloat8(), group=group, small=0))
    for step in range(2):
        ddp(torch.full((4, 64), float(rank + step))).square().mean().backward()
    assert model.weight.grad is not None
    dist.all_gather_object(found, model.weight.grad.tolist())
    assert found[0] == found[1] != found[2] == found[3]


def dies() -> None:
    model = ddp(INT8, timeout=10)
    if dist.get_rank() == 1:
        trained(model, steps=2)
        os._exit(4)
    trained(model, steps=50)


def test_a_rank_that_dies_ends_the_backward_pass_of_the_others(ranks: Ranks):
    left, dead = pipelines.timely(ranks, dies)
    assert dead.kind == "ended"
    assert left.kind == "RuntimeError"
    assert "rank 1" in left.text


@on_ranks(4)
def test_what_a_hook_cannot_do_is_refused() -> None:
    def hook(codec: Codec = INT8, **options: Any) -> Any:
        return lambda: all_reduce_hook(codec, **options)

    rows = FeatureInt.fit([torch.ones(1, 8)])
    refused(
        (hook(AQSGD()), TypeError, "keeps state between messages"),
        (hook(error_feedback=1), TypeError, "error_feedback is 1"),
        (hook(rows), ValueError, "for rows of 8 elements; allowed for gradients"),
        (lambda: LowBitReduceScatter(rows), ValueError, "for rows of 8 elements; allowed for gradients"),
        (hook(algorithm="ring"), ValueError, "algorithm is 'ring'"),
    )
    model = nn.Sequential(nn.Embedding(50, 96, sparse=True), nn.Linear(96, 8))
    sparse = DistributedDataParallel(model)
    sparse.register_comm_hook(None, all_reduce_hook(BlockFloat8()))
    text = r"the gradient of a parameter of shape \[50, 96\] is sparse; allowed: dense gradients"
    refused((lambda: sparse(torch.arange(6)).square().sum().backward(), Exception, text))
