"""Streams beside a GPU's computation: the calls that order them, and, where there is a GPU, what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowbit.codecs import Cast, GroupInt, TAHQuant
from lowbit.pipeline import LowBitStage, transport
from lowbit.pipeline.transport import CudaStreams, Staged
from tests.pipeline import toy
from tests.processes import Ranks

CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Stream:
    """Notes what a stream is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Tensor:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"x is read by {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    names = iter(("leaving", "arriving"))

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    cuda = transport.torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device, priority: Stream(next(names), log))
    monkeypatch.setattr(cuda, "current_stream", lambda device: Stream("computation", log))
    monkeypatch.setattr(cuda, "stream", on)
    return log


def test_what_leaves_waits_for_the_computation_and_never_the_other_way(log: list[str]):
    with CudaStreams(CUDA).leaving(Tensor(log)):
        log.append("encode")
    assert sorted(log[:2]) == ["leaving waits for computation", "x is read by leaving"]
    assert log[2:] == ["on leaving", "encode", "off leaving"]


def test_what_arrives_waits_for_a_fence_only_and_is_waited_for(log: list[str]):
    streams = CudaStreams(CUDA)
    streams.fence()
    with streams.arriving():
        log.append("decode")
    assert log == [
        "arriving waits for computation",
        "on arriving",
        "decode",
        "off arriving",
        "computation waits for arriving",
    ]


def test_where_a_payload_lands_is_kept_for_the_computation(log: list[str], monkeypatch: pytest.MonkeyPatch):
    streams, layout = CudaStreams(CUDA), torch.empty(2, 3, device="meta")
    monkeypatch.setattr(transport.torch, "empty_strided", lambda *args, **kwargs: Tensor(log))
    with streams.arriving():
        # As within the block: what is current there is the arriving stream.
        monkeypatch.setattr(transport.torch.cuda, "current_stream", lambda device: Stream("arriving", log))
        streams.landing(layout)
    assert log == ["on arriving", "x is read by computation", "off arriving", "computation waits for arriving"]


@needs_gpu
def test_bytes_reach_the_host_and_come_back_while_the_device_computes():
    streams, busy = CudaStreams(CUDA), torch.randn(4096, 4096, device=CUDA)
    x_bytes = 1 << 20
    back = torch.zeros(x_bytes, dtype=torch.uint8, device=CUDA)
    streams.fence()
    for value in range(5):
        for _ in range(20):
            busy = busy @ busy * 1e-4
        x = torch.full((x_bytes,), value, dtype=torch.uint8, device=CUDA)
        with streams.leaving(x):
            host, copied = streams.to_host(x + 1, 8)
        del x
        copied.synchronize()
        assert host.is_pinned()
        assert host.shape == (x_bytes + 8,)
        assert host[:x_bytes].unique().tolist() == [value + 1]
        with streams.arriving():
            landed = streams.landing(torch.empty(x_bytes, dtype=torch.uint8, device="meta"))
            landed.copy_(streams.to_device(host[:x_bytes]) + 1)
        back.copy_(landed)
        del host, landed
        assert back.unique().tolist() == [value + 2]


def on_one_gpu(schedule: str, options: Any) -> Any:
    run = toy.Run(schedule, toy.lowbit(**options), device=CUDA)
    for step in range(3):
        run.train(step)
        run.evaluate(step)
    for stage in run.stages:
        assert isinstance(stage, LowBitStage)
        assert isinstance(stage.lanes.transport, Staged)
    return [loss.cpu() for loss in run.losses]


def on_the_cpu(schedule: str, options: Any) -> Any:
    run = toy.Run(schedule, toy.lowbit(**options))
    for step in range(3):
        run.train(step)
        run.evaluate(step)
    return run.losses


@needs_gpu
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-2", "zbv"])
@pytest.mark.parametrize(
    ("forward", "backward", "tolerance"),
    [
        (Cast(), Cast(), 1e-5),
        # A last bit that differs may fall to the other side of a rounding.
        (TAHQuant(), GroupInt(bits=6, group=32, symmetric=True), 1e-2),
    ],
)
def test_gloo_between_ranks_that_share_a_gpu_trains_as_on_the_cpu(
    ranks: Ranks, schedule: str, forward: Any, backward: Any, tolerance: float
):
    options = {"forward": forward, "backward": backward}
    found = ranks.run(on_one_gpu, schedule, options, timeout=120)
    expected = ranks.run(on_the_cpu, schedule, options)
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def over_nccl() -> list[torch.Tensor]:
    """A group of its own over NCCL, a device for each rank."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    run = toy.Run("1f1b", toy.lowbit(forward=Cast(), backward=Cast()), group=group, device=device)
    for step in range(3):
        run.train(step)
    return [loss.cpu() for loss in run.losses]


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="NCCL needs two CUDA devices")
def test_nccl_carries_payloads_directly(ranks: Ranks):
    found = ranks.run(over_nccl, timeout=120)
    expected = ranks.run(on_the_cpu, "1f1b", {"forward": Cast(), "backward": Cast()})
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
