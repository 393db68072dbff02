"""Payloads that pass through the host's memory on streams that run late, and on those of a GPU where there is one."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import AQSGD, Cast, GroupInt, TAHQuant
from lowbit.collectives import PeerError
from lowbit.pipeline import LowBitStage, Traffic, transport
from lowbit.pipeline import stage as stage_module
from lowbit.pipeline.layouts import receive_layouts, send_layouts
from lowbit.pipeline.transport import CudaStreams, Early, Staged
from lowbit.wire import mailbox
from lowbit.wire.checksum import Checksums
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Route
from lowbit.wire.pytorch import default_group
from tests.pipeline import toy
from tests.processes import Ranks, on_ranks

FIT = {"forward": GroupInt(bits=4, group=64), "backward": GroupInt(bits=6, group=32, symmetric=True)}


class Late:
    """A device whose copies to the host are done some time after they were asked for, when told to, or never."""

    def __init__(self, held: bool = False, error: str = "") -> None:
        self.error = error
        self.held: list[Callable[[], None]] | None = [] if held else None
        self.stream = "computation"
        self.log: list[str] = []
        self.sources: list[Tensor] = []

    def leaving(self, source: Tensor) -> contextlib.AbstractContextManager[None]:
        self.sources.append(source)
        return self._on("leaving")

    def arriving(self) -> contextlib.AbstractContextManager[None]:
        return self._on("arriving")

    def fence(self) -> None:
        assert self.stream == "computation"
        self.log.append("fence")

    def landing(self, layout: Tensor) -> Tensor:
        assert self.stream == "arriving"
        return torch.full(layout.shape, 0xEE, dtype=layout.dtype)

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def to_host(self, payload: Tensor, room: int) -> "tuple[Tensor, Copied]":
        assert self.stream == "leaving"
        host, copied = self.host_buffer(payload.numel() + room), Copied(self.error)
        payload = payload.clone()

        def copy() -> None:
            host[: payload.numel()].copy_(payload)
            copied.done.set()

        if self.held is None:
            threading.Timer(0.01, copy).start()
        else:
            self.held.append(copy)
        return host, copied

    def to_device(self, host: Tensor) -> Tensor:
        assert self.stream == "arriving"
        self.log.append("arrival")
        return host.clone()

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        assert self.stream == "computation"
        self.stream = stream
        yield
        self.stream = "computation"


class Copied:
    def __init__(self, error: str) -> None:
        self.done, self.error = threading.Event(), error

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.done.wait()
        if self.error:
            raise RuntimeError(self.error)


@contextlib.contextmanager
def staged_on(ranks: tuple[int, ...]) -> Iterator[None]:
    before = stage_module.choose
    if dist.get_rank() in ranks:
        stage_module.choose = lambda group, device, *rest: Staged(group, *rest, Late())
    try:
        yield
    finally:
        stage_module.choose = before


def trained(schedule: str, staged: tuple[int, ...], options: Any) -> Any:
    """Losses of some steps, and what evaluation between them gives."""
    with staged_on(staged):
        run = toy.Run(schedule, toy.lowbit(**options))
    outputs = []
    for step in range(3):
        for stage in run.stages:
            assert isinstance(stage, LowBitStage)
            stage.set_samples(range(toy.ROWS * toy.MICRO_BATCHES))
        run.train(step)
        outputs.append(run.evaluate(step))
    for stage in run.stages:
        assert isinstance(stage, LowBitStage)
        assert isinstance(stage.lanes.transport, Staged if dist.get_rank() in staged else Early)
        assert len(stage.lanes.transport._outbox.entries) == 0
    return run.losses, [y for y in outputs if y is not None]


@pytest.mark.parametrize(
    ("schedule", "staged", "options"),
    [
        ("1f1b", (0, 1), FIT | {"warmup_steps": 1}),
        ("zbv", (0, 1), FIT),
        ("interleaved-2", (1,), FIT),  # the other rank has no such device
        ("gpipe", (0,), FIT | {"forward": AQSGD()}),
    ],
)
def test_staging_changes_no_loss(ranks: Ranks, schedule: str, staged: tuple[int, ...], options: Any):
    found = ranks.run(trained, schedule, staged, options)
    expected = ranks.run(trained, schedule, (), options)
    for rank in range(2):
        assert len(found[rank][0]) == len(expected[rank][0])
        for ours, theirs in zip(chain(*found[rank]), chain(*expected[rank]), strict=True):
            assert torch.equal(ours, theirs)


def opened(late: Late, topic: str = "test", timeout: float = 10.0) -> Staged:
    group = default_group()
    transport = Staged(group, Traffic(), Checksums("test"), late)
    names = [f"rank {rank}" for rank in range(dist.get_world_size())]
    transport.begin(FailureBoard(group, topic, names, timeout), 0)
    return transport


@on_ranks
def test_the_schedule_does_not_wait_for_copies() -> None:
    """Only `drain` waits for the device and for the peer; the tensor is known to be read meanwhile."""
    late = Late(held=True)
    transport, other = opened(late), 1 - dist.get_rank()
    transport.expect([(Route(other, tag), 64) for tag in range(2)])
    x = torch.ones(64)
    with transport.leaving(x):
        payload = torch.full((64,), 7, dtype=torch.uint8)
        assert transport.send(Route(other, 0), payload) == []
        assert transport.send(Route(other, 1), payload + 1) == []
    assert late.sources[0] is x
    assert late.held is not None
    for copy in late.held:  # all of them: nothing before this line has waited for one
        copy()
    for tag in (1, 0):
        with transport.arriving():
            assert transport.landing(torch.empty(2, 3, dtype=torch.float16, device="meta")).dtype == torch.float16
            assert transport.take(Route(other, tag), 64).unique().tolist() == [7 + tag]
    transport.drain()
    assert len(transport._outbox.entries) == 0
    assert late.log == ["fence", "fence", "arrival", "arrival"]  # the pass, and what it brings


@on_ranks
def test_a_device_that_fails_is_not_the_peers_fault() -> None:
    transport = opened(Late(error="device lost"))
    with transport.leaving(torch.ones(8)):
        transport.send(Route(1 - dist.get_rank(), 0), torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="^device lost$") as caught:
        transport.drain()
    assert not isinstance(caught.value, PeerError)
    dist.barrier()


@on_ranks
def test_a_send_that_can_not_start_names_the_peer() -> None:
    if dist.get_rank() == 0:
        transport = opened(Late())
        with mock.patch.object(mailbox, "_started", return_value=RuntimeError("reset")):
            with transport.leaving(torch.ones(8)):
                transport.send(Route(1, 0), torch.zeros(8, dtype=torch.uint8))
            with pytest.raises(PeerError, match="rank 1 closed its connection") as caught:
                transport.drain()
        assert caught.value.rank == 1
    dist.barrier()


@on_ranks
def test_layouts_travel_where_the_process_group_can_reach_them() -> None:
    stage = LowBitStage(toy.Block().to("meta"), dist.get_rank(), 2, toy.CPU, timeout=20, **FIT)
    stage.device = torch.device("meta")
    layout = torch.empty(2, 3, device="meta", dtype=torch.bfloat16).t().requires_grad_()
    if stage.is_first:
        send_layouts([layout], None, 1, stage.lanes.transport.device, 20)
        return
    [found] = receive_layouts(None, 0, stage.lanes.transport.device, 20)
    facts = [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in (found, layout)]
    assert facts[0] == facts[1]


CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Stream:
    """Notes what a stream is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Logged:
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
    with CudaStreams(CUDA).leaving(Logged(log)):
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
    monkeypatch.setattr(transport.torch, "empty_strided", lambda *args, **kwargs: Logged(log))
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
