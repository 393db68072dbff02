"""Means of gradients, stored ones and DDP's: what a slow, obvious computation gives, and one error on all ranks."""

import contextlib
import copy
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit.codecs import AQSGD, BlockFloat8, Cast, Codec, FeatureInt, GroupInt
from lowbit.collectives import AgreementError, PeerError, reduce
from lowbit.gradients import GradientStorage, LowBitReduceScatter, all_reduce_hook
from lowbit.gradients import storage as storages
from lowbit.gradients.storage import average_bytes
from lowbit.wire import pytorch
from lowbit.wire.pytorch import default_group
from tests.lowbit.collectives.traffic import equal_everywhere, sent_bytes
from tests.lowbit.pipeline import toy as pipelines
from tests.processes import Ranks, impatient, on_ranks
from tests.refused import refused

FP8 = BlockFloat8()
INT8 = GroupInt(bits=8, group=128, symmetric=True)
INT4 = GroupInt(bits=4, group=64, symmetric=True)
SHAPES = [(), (3,), (5,), (127,), (128,), (129, 7), (300, 40), (64, 64), (2, 0), (6000,)]
NOWHERE, FIRST_ONLY, ZERO, NAN, INF = 2, 3, 7, 6, 9  # parameters by what is special about their gradients


def gradients(rank: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    every: list[Any] = [torch.randn(shape, generator=generator) * 10.0 ** (i - 4) for i, shape in enumerate(SHAPES)]
    every[NOWHERE] = None
    every[FIRST_ONLY] = every[FIRST_ONLY] if rank == 0 else None
    every[ZERO].zero_()
    every[NAN][:, 0] = math.nan if rank == 1 else 0.0
    every[INF][-1] = math.inf if rank == 0 else 1.0
    return every


def stored(rank: int, codec: BlockFloat8 = FP8, factor: float = 1.0) -> tuple[GradientStorage, list[nn.Parameter]]:
    """A rank's gradients, twice over."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    storage = GradientStorage(parameters, codec=codec)
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients(rank), strict=True):
            if gradient is not None:
                (parameter * gradient).sum().backward()
    storage.scale_(factor)
    return storage, parameters


def payloads(storage: GradientStorage) -> dict[str, Tensor]:
    storage.absorb()
    return {s.name: s.payload for s in storage._stored.values() if s.held and s.payload is not None}


def coded(x: Tensor) -> Tensor:
    """Coded and decoded, few elements as a whole block, too: alone they are stored as plain numbers."""
    padded = torch.nn.functional.pad(x.reshape(-1).float(), (0, -x.numel() % FP8.block))
    return FP8.round_trip(padded)[: x.numel()].view(x.shape)


def expected(factors: list[float], dtype: torch.dtype) -> Iterator[Tensor | None]:
    """Decode all, add in the order of the ranks, divide, code."""
    of_ranks = [stored(rank, factor=factor) for rank, factor in enumerate(factors)]
    common = factors[0] if len(set(factors)) == 1 else 1.0
    for index, shape in enumerate(SHAPES):
        total, missing = torch.zeros(shape, dtype=dtype), True
        for storage, parameters in of_ranks:
            value = storage.gradient(parameters[index])
            if value is not None:
                total, missing = total + coded(value / common).to(dtype), False
        yield None if missing else coded(total / len(factors)) * common


def means(factors: list[float], bucket: int, chunk: int, messages: bool = True, checksums: bool = True) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    storage, parameters = stored(rank, factor=factors[rank])
    present = [p.shape for i, p in enumerate(parameters) if i != NOWHERE]
    with mock.patch.object(storages, "BUCKET", bucket), mock.patch.object(reduce, "CHUNK", chunk):
        with sent_bytes() as sent:
            storage.average(checksums=checksums)
        nbytes = average_bytes(present, FP8, count=len(SHAPES), rank=rank, ranks=ranks, checksums=checksums)
        assert sum(sent) == (nbytes if messages else 0)
    assert equal_everywhere(*payloads(storage).values())
    references = zip(expected(factors, torch.float32), expected(factors, torch.float64), strict=True)
    for index, (mean, exact) in enumerate(references):
        mine: Any = storage.gradient(parameters[index])
        if mean is None or exact is None:
            assert mine is parameters[index].grad is None
            continue
        assert torch.equal(mine.isnan(), mean.isnan())
        assert torch.equal(mine.nan_to_num(), mean.nan_to_num()), index
        # The order of a float32 sum may decide between two neighbours in the format, 1/8 apart at most.
        assert torch.allclose(mine, exact.float(), rtol=1 / 8, atol=0, equal_nan=True), index
        assert mine.isnan().any() == (index in (NAN, INF))
    assert storage.gradient(parameters[ZERO]).any() == False  # noqa: E712


@pytest.mark.parametrize("count", [2, 3, 4])
def test_means_are_those_of_the_obvious_computation(ranks: Ranks, count: int):
    """Buckets and chunks that cut parameters, and those that hold all of them; a common factor costs nothing."""
    ranks.run(means, [1.0] * count, storages.BUCKET, reduce.CHUNK, ranks=count)
    ranks.run(means, [1 / 3] * count, 4096, 512, ranks=count)


@on_ranks(3)
def test_factors_that_differ_other_transports_and_rounding() -> None:
    ranks = dist.get_world_size()
    means([1.0, *[0.3] * (ranks - 1)], 4096, 512, checksums=False)
    with mock.patch.object(pytorch, "carries", return_value=False):  # as on a GPU: PyTorch's collectives
        means([0.5] * ranks, 4096, 512, messages=False)
    storage, _ = stored(dist.get_rank(), [BlockFloat8(rounding="stochastic"), FP8][dist.get_rank() % 2])
    storage.average()
    assert equal_everywhere(*payloads(storage).values())


@pytest.mark.parametrize("what", ["codec", "parameters", "nothing"])
@on_ranks
def test_ranks_that_store_otherwise_get_one_error_before_a_byte(what: str) -> None:
    rank = dist.get_rank()
    codec = BlockFloat8(block=64) if what == "codec" and rank else FP8
    shape = (9,) if what == "parameters" and rank else (8,)
    parameters = [] if what == "nothing" and rank else [nn.Parameter(torch.zeros(shape))]
    storage = GradientStorage(parameters, codec=codec)
    for parameter in parameters:
        parameter.grad = torch.ones(shape)
    before = copy.deepcopy(payloads(storage))
    fact = "codec" if what == "codec" else "parameters"
    with sent_bytes() as sent, pytest.raises(AgreementError, match=rf"{fact}: .*\n?.*rank 0"):
        storage.average(timeout=20)
    assert all(torch.equal(payload, before[name]) for name, payload in payloads(storage).items())
    assert sum(sent) == 0


@on_ranks
def test_a_peer_that_hangs_is_named_in_time() -> None:
    """In the middle of a mean: the other has told its factors, but sends no gradients."""
    (storage, _), store = stored(dist.get_rank()), default_group().get_group_store()
    storage.average(timeout=10)
    if dist.get_rank() == 1:
        with mock.patch.object(storages, "average_coded"):
            storage.average(timeout=10)
        return store.wait(["said"], timedelta(seconds=30))
    start = time.monotonic()
    with impatient(0.5), pytest.raises(PeerError, match="rank 1"):
        storage.average(timeout=10)
    store.set("said", "")
    assert time.monotonic() - start < 5


@on_ranks(1)
def test_formats_that_are_not_cut_are_refused_and_one_rank_keeps_its_gradients() -> None:
    parameter, other = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    coded, alone = GradientStorage([other], codec=GroupInt(bits=8, symmetric=True)), GradientStorage([parameter])
    refused(
        (coded.average, TypeError, "codec is GroupInt.*cannot be cut into parts; allowed: BlockFloat8, or all_red"),
        (lambda: alone.average(timeout="soon"), TypeError, "timeout is 'soon'"),  # pyright: ignore
    )
    parameter.grad = torch.arange(4.0)
    alone.average()
    alone.close()
    alone.average()
    assert list(payloads(alone)) == ["0"]
    assert parameter.grad is None
    assert str(alone.gradient(parameter)) == str(torch.arange(4.0))


@on_ranks
def test_the_next_backward_works_after_an_average_in_inference_mode() -> None:
    storage, parameters = stored(dist.get_rank())
    with torch.inference_mode():
        storage.average()
    assert equal_everywhere(*payloads(storage).values())
    for parameter in parameters:  # as in the next step
        parameter.sum().backward()


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
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("codec", "options", "near"),
    [
        (Cast(), {}, 1e-5),
        (FP8, {}, 0.03),
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
    ddp.register_comm_hook(None, all_reduce_hook(FP8, group=group, small=0))
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
    sparse.register_comm_hook(None, all_reduce_hook(FP8))
    text = r"the gradient of a parameter of shape \[50, 96\] is sparse; allowed: dense gradients"
    refused((lambda: sparse(torch.arange(6)).square().sum().backward(), Exception, text))
