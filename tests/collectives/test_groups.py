"""Groups that torch.distributed has not made, as torchft's: bare, behind a wrapper, in another order than the job's."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from lowbit.codecs import GroupInt
from lowbit.collectives import AgreementError, PeerError, agree, algorithms, all_gather, all_reduce, reduce_scatter
from lowbit.gradients import all_reduce_hook
from lowbit.wire.messages import gather_json
from tests.processes import Ranks, on_ranks

INT8 = GroupInt(bits=8, group=128, symmetric=True)
TIMEOUT = 8.0


class Wrapper(dist.ProcessGroup):
    """As torchft's: a group that PyTorch does not know around one that changes."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.inside: dist.ProcessGroup | None = None

    @property
    def parent(self) -> dist.ProcessGroup:
        assert self.inside is not None, "not connected"
        return self.inside


def bare(name: str, ranks: list[int]) -> dist.ProcessGroup:
    store: Any = PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank, limit = ranks.index(dist.get_rank()), timedelta(seconds=TIMEOUT)
    group: Any = dist.ProcessGroup(store, rank, len(ranks))
    gloo: Any = dist.ProcessGroupGloo
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo(store, rank, len(ranks), limit)
    )
    return group


def data(rank: int) -> Tensor:
    return torch.randn(20_001, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("transport", ["messages", "collectives"])
@on_ranks(3)
def test_sums_in_a_group_in_another_order(transport: Any) -> None:
    group, job = bare(f"other-{transport}", [2, 1, 0]), dist.get_rank()
    known = dist.new_group([0, 1, 2])
    expected = torch.stack([data(rank) for rank in range(3)]).sum(0)
    for algorithm in ("two_shot", "one_shot"):
        x = data(job)
        all_reduce(x, INT8, group, algorithm=algorithm, transport=transport, small=0)  # pyright: ignore
        assert (x - expected).abs().max() < 0.2
        assert len(set(gather_json(x.double().sum().item(), group))) == 1
    small = data(job)[:100]
    all_reduce(small, INT8, group)  # by PyTorch's own sum
    assert torch.allclose(small, expected[:100], atol=1e-5)
    gathered, part = torch.empty(3 * 20_001), torch.empty(6667)
    all_gather(gathered, data(job), INT8, group, transport=transport)
    for place, rank in enumerate([2, 1, 0]):  # the ranks of the group, not of the job
        assert (gathered.view(3, -1)[place] - data(rank)).abs().max() < 0.05
    reduce_scatter(part, data(job), INT8, group, transport=transport)
    assert (part - expected.view(3, -1)[2 - job]).abs().max() < 0.2
    assert gather_json(job, group) == [2, 1, 0]
    agree(group, {"format": "int8"})
    all_reduce(data(job), INT8, known)  # PyTorch's groups go on beside it


@on_ranks
def test_what_differs_is_said_on_all_ranks() -> None:
    group, job = bare("differ", [1, 0]), dist.get_rank()
    with pytest.raises(AgreementError, match=r"codec: .* on rank 0; .* on rank 1"):
        all_reduce(data(job), INT8 if job else GroupInt(bits=4, group=64, symmetric=True), group, timeout=TIMEOUT)
    with pytest.raises(TypeError, match="allowed: a ProcessGroup, such as"):
        all_reduce(data(job), INT8, "world")
    with pytest.raises(ValueError, match="which has no store in this process; allowed"):
        all_reduce(data(job), INT8, Wrapper())


@on_ranks
def test_a_hook_follows_a_wrapper_to_its_next_group() -> None:
    wrapper, job = Wrapper(), dist.get_rank()
    wrapper.inside = bare("first", [1, 0])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(200, 200, bias=False))
    model.register_comm_hook(None, all_reduce_hook(INT8, group=wrapper, error_feedback=True, small=0))
    for name in ("first", "second"):
        if name == "second":
            wrapper.inside = bare(name, [0, 1])
        model.zero_grad()
        model(data(job)[:200]).sum().backward()
        mean = (data(0)[:200] + data(1)[:200]) / 2
        grad = model.module.weight.grad
        assert (grad - mean).abs().max() < 0.05  # type: ignore[operator]


def die() -> None:
    group, job = bare("die", [2, 1, 0]), dist.get_rank()
    all_reduce(data(job), INT8, group, timeout=TIMEOUT)
    if job == 2:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 0 closed its connection") as caught:  # of the group
        all_reduce(data(job), INT8, group, timeout=TIMEOUT)
    assert caught.value.rank == 0
    assert time.monotonic() - start < TIMEOUT


def die_between() -> None:
    """Rank 2 dies when rank 0 has its part of the sum, and rank 1 has not: rank 0 then waits for rank 1."""
    job, patient, parts = dist.get_rank(), 60.0, []
    all_reduce(data(job), INT8, small=0, timeout=patient)
    encode = algorithms._encode

    def dying(*args: Any, **settings: Any) -> None:
        parts.append(args)
        if len(parts) == 2:
            time.sleep(1)  # the first has left
            os.kill(os.getpid(), 9)
        encode(*args, **settings)

    if job == 2:  # its process ends with it
        algorithms._encode = dying
    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 2") as caught:
        all_reduce(data(job), INT8, small=0, timeout=patient)
    assert caught.value.rank == 2
    assert time.monotonic() - start < 0.3 * patient


@pytest.mark.parametrize("dying", [die, die_between])
def test_a_rank_that_dies_is_named(ranks: Ranks, dying: Any):
    outcomes = ranks.outcomes(dying, ranks=3)
    assert [getattr(outcome, "kind", outcome) for outcome in outcomes] == [None, None, "ended"]
