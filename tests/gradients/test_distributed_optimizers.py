"""Optimizers of `torch.distributed` around another one: their steps with stored gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

from lowbit.codecs import BlockFloat8
from lowbit.collectives import all_reduce
from lowbit.gradients import GradientStorage
from tests.gradients.test_sharded import toy
from tests.processes import Ranks, on_ranks


def trained(model: nn.Module, optimizer: Any) -> GradientStorage:
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
    trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as sent:
        storage = trained(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
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
    trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    averager = PeriodicModelAverager(period=1, warmup_steps=2)
    trained(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert averager.step == 3
