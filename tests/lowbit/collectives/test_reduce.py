"""Sums in few bits: right, the same on all ranks, and the same error on all ranks where there is none."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import AQSGD, Cast, Codec, GroupInt, TAHQuant
from lowbit.collectives import PeerError, all_reduce, all_reduce_bytes
from lowbit.collectives import calls as queue
from lowbit.wire.pytorch import default_group
from tests.lowbit.collectives.traffic import equal_everywhere, sent_bytes
from tests.lowbit.pipeline import toy
from tests.processes import Ranks, on_ranks
from tests.refused import refused

INT8 = GroupInt(bits=8, group=128, symmetric=True)
INT4 = GroupInt(bits=4, group=64, symmetric=True)
BF16 = Cast(dtype=torch.bfloat16)
PIECES = {"chunk": 4096, "small": 0}  # several chunks even of a small tensor


def data(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def exact(ranks: int, numel: int, dtype: torch.dtype, op: str) -> Tensor:
    total = torch.stack([data(r, numel, dtype).double() for r in range(ranks)]).sum(0)
    return total / ranks if op == "avg" else total


def bound(codec: Codec, ranks: int, numel: int, dtype: torch.dtype, op: str) -> float:
    """Half a step of each rank's largest value, and of the sum's; then the rounding to the dtype."""
    if isinstance(codec, Cast):
        steps = 2.0**-8 if codec.dtype == torch.bfloat16 else 2.0**-23
    else:
        assert isinstance(codec, GroupInt)
        steps = 0.51 / (2 ** (codec.bits - 1) - 1)
    largest = [float(data(r, numel, dtype).abs().max()) for r in range(ranks)]
    total = float(exact(ranks, numel, dtype, "sum").abs().max())
    error = steps * (sum(largest) + 2 * total) + torch.finfo(dtype).eps * total + 1e-6
    return error / ranks if op == "avg" else error


def sums(cases: list[tuple[int, Codec, torch.dtype, dict[str, Any]]]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for numel, codec, dtype, options in cases:
        x, how = data(rank, numel, dtype), PIECES | options
        with sent_bytes() as sent:
            assert all_reduce(x, codec, **how) is None
        op = options.get("op", "sum")
        if numel:
            error = float((x.double() - exact(ranks, numel, dtype, op)).abs().max())
            assert error <= bound(codec, ranks, numel, dtype, op), (numel, codec, dtype, options)
        assert equal_everywhere(x), (numel, codec, dtype, options)
        if how.pop("transport") == "messages":
            how.pop("op", None)
            assert sum(sent) == all_reduce_bytes(numel, codec, rank=rank, ranks=ranks, **how), (numel, options)


@pytest.mark.parametrize(("count", "transport"), [(2, "messages"), (3, "collectives"), (4, "messages")])
def test_sums_of_any_length_and_world_size(ranks: Ranks, count: int, transport: str):
    """Also the bytes that travel, which are known before."""
    how = {"transport": transport}
    cases = [(n, INT8, torch.float32, how) for n in (0, 1, 7, 63, 1000, 40_001)]
    cases += [(n, BF16, torch.float32, how | {"op": "avg"}) for n in (5, 40_001)]
    cases += [(9001, INT4, torch.float32, how | {"algorithm": "one_shot", "op": "avg"})]
    cases += [(9001, INT8, d, how | {"op": "avg"}) for d in (torch.bfloat16, torch.float16)]
    ranks.run(sums, cases, ranks=count)


@on_ranks(3)
def test_small_tensors_are_summed_exactly_by_pytorch() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = data(rank, 500)
    all_reduce(x, INT4, op="avg", small=501)
    assert torch.allclose(x.double(), exact(ranks, 500, torch.float32, "avg"), atol=1e-6)
    x = data(rank, 500)
    all_reduce(x, INT4, op="avg", small=500)
    assert not torch.allclose(x.double(), exact(ranks, 500, torch.float32, "avg"), atol=1e-3)


@on_ranks
def test_strides_do_not_matter() -> None:
    x = data(dist.get_rank(), 120 * 70)
    for strided in (x.clone().view(120, 70).t(), x.clone()[::2]):
        packed = strided.clone(memory_format=torch.contiguous_format)
        all_reduce(strided, INT8, **PIECES)
        all_reduce(packed, INT8, **PIECES)
        assert torch.equal(strided, packed)


@on_ranks(3)
def test_asynchronous_calls_give_the_same() -> None:
    xs = [data(dist.get_rank(), n) for n in (30_000, 5000, 70_001)]
    alone = [x.clone() for x in xs]
    pending = [all_reduce(x, INT8, async_op=True, **PIECES) for x in xs]
    for work in reversed(pending):
        work.wait()
        assert work.is_completed()
    for x, y in zip(xs, alone, strict=True):
        all_reduce(y, INT8, **PIECES)
        assert torch.equal(x, y)


@on_ranks
def test_nan_and_infinity_of_one_rank_are_seen_by_all() -> None:
    rank = dist.get_rank()
    for bad in (float("nan"), float("inf")):
        for options in ({}, {"algorithm": "one_shot"}):
            x = data(rank, 20_000)
            if rank == 1:
                x[12_345] = bad
            all_reduce(x, INT8, **PIECES, **options)
            assert torch.isnan(x[12_345])
            assert torch.isfinite(x[:10_000]).all()
            assert equal_everywhere(x)
    zeros = torch.zeros(5000)
    all_reduce(zeros, INT8, **PIECES)
    assert not zeros.any()
    tiny = torch.full((5000,), 1e-41)
    all_reduce(tiny, BF16, **PIECES)
    assert torch.isfinite(tiny).all()


@on_ranks(3)
def test_error_feedback_loses_nothing() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, errors = data(rank, 9000), torch.zeros(9000)
    sent, received = torch.zeros(9000), torch.zeros(9000)
    for _ in range(20):
        part = x + errors
        sent += x
        all_reduce(part, INT4, errors=errors, **PIECES)
        received += part
    dist.all_reduce(sent)
    remaining = errors.clone()
    dist.all_reduce(remaining)
    # What went in is what came out, but for what is still to be made up for.
    assert torch.allclose(received + remaining, sent, atol=1e-3)
    assert float((received - sent).norm() / sent.norm()) < 0.02 < 0.05 < 1 / ranks


def differs(calls: list[list[tuple[int, Codec]]]) -> None:
    with mock.patch.multiple(queue, _SLOW=0.1, _LOOK=0.1):  # rather than wait for seconds
        for numel, codec in calls[dist.get_rank()]:
            all_reduce(torch.ones(numel), codec, timeout=40, **PIECES)


@pytest.mark.parametrize(("one", "other", "message"), [
    ([(5000, INT8)], [(5001, INT8)], "tensor: float32 (5000,) on rank 0"),
    ([(5000, INT8)], [(5000, INT4)], "codec: GroupInt(bits=8"),
    # What both have agreed on before does not protect a later call by itself.
    ([(5000, INT8), (6000, INT8), (5000, INT8)], [(5000, INT8), (6000, INT8), (6000, INT8)], "(5000,) on rank 0"),
    ([(5000, INT8), (5000, INT8)], [(5000, INT8), (7000, INT8)], "(5000,) on rank 0; float32 (7000,) on rank 1"),
])  # fmt: skip
def test_different_calls_are_the_same_error_on_all(ranks: Ranks, one: Any, other: Any, message: str):
    assert message in toy.disagreement(toy.timely(ranks, differs, [one, other]))


def dies() -> None:
    x = data(dist.get_rank(), 3_000_000)
    for i in range(4):
        if i == 1 and dist.get_rank() == 2:
            os._exit(5)
        all_reduce(x, INT8, small=0, chunk=1 << 16, timeout=20, transport="collectives")


def test_a_rank_that_dies_ends_the_others_when_pytorch_sends(ranks: Ranks):
    outcomes = ranks.outcomes(dies, ranks=3)
    assert [o.kind for o in outcomes] == ["PeerError", "PeerError", "ended"], outcomes


@on_ranks
def test_a_rank_that_hangs_ends_what_pytorch_does() -> None:
    x, store = data(dist.get_rank(), 1000), default_group().get_group_store()  # so few that PyTorch sums them
    all_reduce(x, INT8, timeout=20)
    if dist.get_rank() == 1:
        return store.wait(["said"], timedelta(seconds=30))
    start = time.monotonic()
    with pytest.raises(PeerError, match="did not"):
        all_reduce(x, INT8, timeout=0.5)
    store.set("said", "")
    assert 0.4 < time.monotonic() - start < 3


@on_ranks(1)
def test_bad_arguments_are_refused_and_one_rank_keeps_its_tensor() -> None:
    def summing(codec: Any, tensor: Tensor | None = None, **options: Any) -> Callable[[], Any]:
        return lambda: all_reduce(torch.ones(4) if tensor is None else tensor, codec, **options)

    refused(
        (summing(AQSGD()), TypeError, "keeps state between messages"),
        (summing(TAHQuant()), TypeError, "tokens of activations"),
        (summing("int8"), TypeError, "codec is 'int8'"),
        (summing(INT8, torch.ones(4, dtype=torch.int32)), TypeError, "tensor has dtype torch.int32"),
        (summing(INT8, op="max"), ValueError, "op is 'max'"),
        (summing(INT8, algorithm="ring"), ValueError, "algorithm is 'ring'"),
        (summing(INT8, chunk=17), ValueError, "chunk is 17"),
        (summing(INT8, timeout=0), ValueError, "timeout is 0"),
        (summing(INT8, timeout=9e9), ValueError, "timeout is 9000000000.0; allowed: a number of seconds from 0.001 to"),
        (summing(INT8, timeout=1e-9), ValueError, "timeout is 1e-09"),
        (summing(INT8, errors=torch.ones(3)), ValueError, r"errors is float32 \(3,\)"),
        (summing(INT8, checksums=1), TypeError, "checksums is 1; allowed: True or False"),
    )
    x = data(0, 50_000)
    y = x.clone()
    all_reduce(y, INT4, op="avg")
    assert torch.equal(x, y)
