"""Payloads that pass through the host's memory on streams that run late, and on those of a GPU where there is one."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest import mock
from unittest.mock import call

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import AQSGD, Cast, TAHQuant
from lowbit.collectives import PeerError
from lowbit.pipeline import Traffic, transport
from lowbit.pipeline import stage as stage_module
from lowbit.pipeline.transport import CudaStreams, Staged, Transport
from lowbit.wire import mailbox
from lowbit.wire.checksum import Checksums
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Route
from lowbit.wire.pytorch import default_group
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.toy import INT4, INT6
from tests.processes import Ranks, on_ranks

FIT = {"forward": INT4, "backward": INT6}


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
def over(kind: str, ranks: tuple[int, ...] = (0, 1)) -> Iterator[None]:
    """Stages that are made in the block have this transport on these ranks, and elsewhere that of PyTorch's group."""
    if kind == "staged" and dist.get_rank() in ranks:
        staged = lambda group, device, *rest: Staged(group, *rest, Late())  # noqa: E731
        with mock.patch.object(stage_module, "choose", staged):
            yield
    else:
        yield


def trained(schedule: str, kind: str, ranks: tuple[int, ...], options: Any) -> Any:
    """Losses of some steps, and what evaluation between them gives."""
    with over(kind, ranks):
        run = toy.Run(schedule, toy.lowbit(**options))
    outputs = []
    for step in range(3):
        for stage in run.stages:
            stage.set_samples(range(toy.ROWS * toy.MICRO_BATCHES))
        run.train(step)
        outputs.append(run.evaluate(step))
    expected = Staged if kind == "staged" and dist.get_rank() in ranks else Transport
    for stage in run.stages:
        assert type(stage.lanes.transport) is expected
        assert len(stage.lanes.transport._outbox.entries) == 0
    return run.losses, [y for y in outputs if y is not None]


@pytest.mark.parametrize(
    ("schedule", "kind", "on", "options"),
    [
        ("1f1b", "staged", (0, 1), FIT | {"warmup_steps": 1}),
        ("zbv", "staged", (0, 1), FIT),
        ("interleaved-2", "staged", (1,), FIT),  # the other rank has no such device
        ("gpipe", "staged", (0,), FIT | {"forward": AQSGD()}),
    ],
)
def test_no_transport_changes_a_loss(ranks: Ranks, schedule: str, kind: str, on: tuple[int, ...], options: Any):
    found = ranks.run(trained, schedule, kind, on, options)
    for ours, theirs in zip(found, ranks.run(trained, schedule, "early", on, options), strict=True):
        assert toy.same([*chain(*ours)], [*chain(*theirs)])
    assert len(found[0][0]) + len(found[1][0]) == 3 * toy.MICRO_BATCHES


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
        transport.send(Route(other, 0), payload)
        transport.send(Route(other, 1), payload + 1)
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


CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
needs_nccl = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="NCCL needs two CUDA devices"
)


def test_streams_wait_only_for_what_they_must(monkeypatch: pytest.MonkeyPatch):
    """What leaves waits for the computation, and what arrives for a fence; the computation waits for what arrives."""
    log, cuda = mock.MagicMock(), transport.torch.cuda
    monkeypatch.setattr(cuda, "Stream", mock.Mock(side_effect=[log.leaving, log.arriving]))
    monkeypatch.setattr(cuda, "current_stream", lambda device: log.computation)
    monkeypatch.setattr(cuda, "stream", log.on)
    monkeypatch.setattr(transport.torch, "empty_strided", lambda *args, **kwargs: log.landed)
    off, streams = call.on().__exit__(None, None, None), CudaStreams(CUDA)
    with streams.leaving(log.x):
        log.encode()
    begun = call.leaving.wait_stream(log.computation), call.x.record_stream(log.leaving)
    assert all(each in log.mock_calls[:2] for each in begun)
    assert log.mock_calls[2:] == [call.on(log.leaving), call.on().__enter__(), call.encode(), off]
    log.reset_mock()
    streams.fence()
    with streams.arriving():
        monkeypatch.setattr(cuda, "current_stream", lambda device: log.arriving)  # as it is within the block
        streams.landing(torch.empty(2, 3, device="meta"))
        log.decode()
    assert log.mock_calls == [
        *(call.arriving.wait_stream(log.computation), call.on(log.arriving), call.on().__enter__()),
        *(call.landed.record_stream(log.computation), call.decode()),
        *(off, call.computation.wait_stream(log.arriving)),
    ]


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


def on(device: str, schedule: str, forward: Any, backward: Any) -> list[Tensor]:
    """Losses on the CPU, on one GPU for all ranks, or with a GPU for each rank, in a group of its own over NCCL."""
    group, place = None, CUDA if device == "gpu" else toy.CPU
    if device == "nccl":
        place = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(place)
        group = dist.new_group(backend="nccl")
    run = toy.Run(schedule, toy.lowbit(forward=forward, backward=backward), group=group, device=place)
    for step in range(3):
        run.train(step)
        run.evaluate(step)
    for stage in run.stages:
        assert type(stage.lanes.transport) is (Transport if device == "cpu" else Staged)
    return [loss.cpu() for loss in run.losses]


@pytest.mark.parametrize(
    ("device", "schedule"),
    [
        *(pytest.param("gpu", schedule, marks=needs_gpu) for schedule in ("1f1b", "interleaved-2", "zbv")),
        pytest.param("nccl", "1f1b", marks=needs_nccl),
    ],
)
@pytest.mark.parametrize(
    ("forward", "backward", "tolerance"),
    [
        (Cast(), Cast(), 1e-5),
        # A last bit that differs may fall to the other side of a rounding.
        (TAHQuant(), INT6, 1e-2),
    ],
)
def test_devices_train_as_the_cpu_does(
    ranks: Ranks, device: str, schedule: str, forward: Any, backward: Any, tolerance: float
):
    found, expected = (ranks.run(on, each, schedule, forward, backward, timeout=120) for each in (device, "cpu"))
    torch.testing.assert_close([*chain(*found)], [*chain(*expected)], rtol=tolerance, atol=tolerance)
