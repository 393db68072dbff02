"""Means of stored gradients: the bytes that a slow, obvious computation gives, and one error where there are none."""

import copy
import math
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.codecs import BlockFloat8, GroupInt
from lowbit.collectives import AgreementError, PeerError, algorithms, reduce
from lowbit.gradients import GradientStorage
from lowbit.gradients import storage as storages
from lowbit.gradients.storage import average_bytes
from lowbit.wire import pytorch
from tests.collectives.traffic import equal_everywhere, sent_bytes
from tests.processes import Ranks, on_ranks
from tests.refused import refused

FP8 = BlockFloat8()
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


class Floats(TorchDispatchMode):
    """The most elements of a floating-point tensor that an operator has made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            Floats.most = max(Floats.most, out.untyped_storage().nbytes() // out.element_size())
        return out


@on_ranks
def test_no_more_than_a_chunk_is_ever_decoded() -> None:
    work = algorithms.two_shot_coded

    def two_shot_coded(*args: Any, **options: Any) -> None:
        with Floats():
            work(*args, **options)

    parameter = nn.Parameter(torch.zeros(1 << 16))
    storage = GradientStorage([parameter])
    parameter.grad = torch.randn(1 << 16)
    Floats.most = 0
    storage.absorb()
    chunks = mock.patch.object(reduce, "CHUNK", 2048)
    with mock.patch.object(algorithms, "two_shot_coded", two_shot_coded), chunks, Floats():
        storage.average()
    assert 0 < Floats.most <= 2048
    with Floats():
        storage.gradient(parameter)
    assert Floats.most == 1 << 16, "a whole one is seen"


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


def hangs() -> float:
    """In the middle of a mean: the other has told its factors, but sends no gradients."""
    storage, _ = stored(dist.get_rank())
    storage.average(timeout=3)
    start = time.monotonic()
    if dist.get_rank() == 1:
        with mock.patch.object(storages, "average_coded"):
            storage.average(timeout=3)
        time.sleep(5)
        return 0.0
    with pytest.raises(PeerError, match="rank 1"):
        storage.average(timeout=3)
    return time.monotonic() - start


def test_a_peer_that_hangs_is_named_in_time(ranks: Ranks):
    ranks.start(2)
    assert ranks.run(hangs)[0] < 5


@on_ranks(1)
def test_formats_that_are_not_cut_are_refused_and_one_rank_keeps_its_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    coded, alone = (GradientStorage([parameter], codec=c) for c in (GroupInt(bits=8, symmetric=True), FP8))
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
