"""`GradientStorage` of sharded parameters (FSDP2, tensor-parallel layers), and optimizers of `torch.distributed`."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from lowbit.codecs import BlockFloat8, GroupInt
from lowbit.collectives import all_reduce
from lowbit.gradients import GradientStorage, LowBitReduceScatter
from lowbit.gradients.stored import StoredGradient
from tests.processes import Ranks, on_ranks

CODEC = BlockFloat8()


def toy() -> nn.Sequential:
    """Widths that two and three ranks do not share evenly, and a matrix with a single row."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(48, 97), nn.Tanh(), nn.Linear(97, 48), nn.Tanh(), nn.Linear(48, 1))


def sharded(*, low_bit: bool) -> nn.Sequential:
    model = toy()
    for part in (model[0], model[2], model[4], model):
        fully_shard(part)
        if low_bit:
            part.set_custom_reduce_scatter(LowBitReduceScatter(GroupInt(bits=8, group=64, symmetric=True)))  # pyright: ignore
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    return x, x[:, :5].sum(1, keepdim=True).tanh()


def trained(model: nn.Module, *, steps: int) -> tuple[list[float], list[float]]:
    """By a loop that does not know how gradients are stored: losses, and norms before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(steps):
        for i in range(2):
            x, y = batch(2 * step + i)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        losses.append(loss.item())
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def whole(model: nn.Module) -> Tensor:
    parameters: list[Any] = list(model.parameters())
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().reshape(-1) for p in parameters])


def eight_bits_stored_and_reduced() -> tuple[list[float], float]:
    plain, low = sharded(low_bit=False), sharded(low_bit=True)
    start = whole(plain)
    storage = GradientStorage(low)
    (losses, norms), (low_losses, low_norms) = trained(plain, steps=10), trained(low, steps=10)
    assert low_losses == pytest.approx(losses, rel=0.05, abs=0.01)
    assert low_norms == pytest.approx(norms, rel=0.1)
    apart = (whole(low) - whole(plain)).norm() / (whole(plain) - start).norm()
    assert apart < 0.15

    elements = sum(p.to_local().numel() for p in low.parameters())  # pyright: ignore
    assert elements < storage.nbytes < 1.1 * elements
    x, y = batch(99)
    nn.functional.mse_loss(low(x), y).backward()
    for p in low.parameters():
        assert isinstance(p.grad, DTensor)
        assert isinstance(p.grad._local_tensor, StoredGradient)
    norm = storage.norm()
    full: Any = nn.utils.get_total_norm([p.grad for p in low.parameters() if p.grad is not None])
    assert norm == pytest.approx(full.full_tensor().item(), rel=1e-5)
    assert storage.clip_(2 * norm) == norm == storage.norm()
    assert storage.clip_(norm / 2) == norm
    assert storage.norm() == pytest.approx(norm / 2, rel=1e-4)
    gradient: Any = storage.gradient(low[0].weight)
    assert gradient.full_tensor().shape == (97, 48)
    storage.put(low[0].weight, gradient * 0)
    assert storage.norm() < norm / 2
    return low_losses, norm


def test_fsdp_stores_and_reduces_in_8_bits(ranks: Ranks):
    found = ranks.run(eight_bits_stored_and_reduced, ranks=3)
    assert len({norm for _, norm in found}) == 1


@on_ranks
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    model = sharded(low_bit=True)
    GradientStorage(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved = []
    for step in range(3):
        before = whole(model)
        x, y = batch(step)
        loss = scaler.scale(nn.functional.mse_loss(model(x), y))
        bad = step == 1 and dist.get_rank() == 1
        (loss * (math.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not torch.equal(whole(model), before))
    assert scaler.get_scale() == 512.0
    assert moved == [True, False, True]


def block() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


@on_ranks
def test_tensor_parallel_layers() -> None:
    """Column-wise and row-wise layers, and a replicated norm, whose gradient is a partial sum on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, model = block(), block()
    parallelize_module(
        model, mesh,
        {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()},
    )  # fmt: skip
    storage = GradientStorage(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(2):
        for seed in (2 * step, 2 * step + 1):
            x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(seed))
            plain(x).square().sum().backward()
            model(x.chunk(dist.get_world_size(), 1)[dist.get_rank()]).square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            gradient: Any = storage.gradient(q)
            assert gradient.placements == q.placements  # pyright: ignore
            assert isinstance(q.grad, DTensor)
            assert isinstance(q.grad._local_tensor, StoredGradient)
            assert p.grad is not None
            error = (gradient.full_tensor() - p.grad).norm() / p.grad.norm()
            assert error < 0.05, (q.shape, q.placements, step)
            p.grad = gradient.full_tensor()
        expected: Any = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        assert storage.norm() == pytest.approx(float(expected), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.allclose(whole(plain), whole(model), rtol=1e-5, atol=1e-7)


def averaged(model: nn.Module, optimizer: Any) -> GradientStorage:
    """Three steps with gradients of this rank's data, averaged in 8 bits and clipped."""
    storage = GradientStorage(model)
    for step in range(3):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        storage.all_reduce(lambda flat: all_reduce(flat, BlockFloat8(), None, "avg", small=1))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
    return storage


def zero() -> list[int]:
    plain, model = toy(), toy()
    averaged(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as sent:
        storage = averaged(model, optimizer)
    assert torch.equal(whole(plain), whole(model))
    states = optimizer.optim.state.values()
    return [sent.call_count, storage.nbytes, sum(x.numel() for state in states for x in state.values() if x.dim())]


def test_zero_steps_as_the_plain_optimizer_and_sends_weights_once(ranks: Ranks):
    found = ranks.run(zero)
    count = sum(p.numel() for p in toy().parameters())
    messages = len(list(toy().parameters()))
    for sent, stored, states in found:
        assert sent <= 3 * messages  # a step by portions would send all weights for each portion
        assert stored < 1.05 * count
        assert states < 1.1 * count  # two of each parameter, for half of them
    assert sum(states for *_, states in found) == 2 * count


@on_ranks
def test_a_step_of_an_averaging_optimizer_counts_once() -> None:
    plain, model = toy(), toy()
    averaged(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    averager = PeriodicModelAverager(period=1, warmup_steps=2)
    averaged(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))
    assert torch.allclose(whole(plain), whole(model), atol=1e-6)
    assert averager.step == 3
