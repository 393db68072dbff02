"""How payloads travel between two ranks: over Gloo, with tags, and receives that are posted early.

On a GPU, payloads are coded and copied to and from the host on side streams while it computes. The host waits for none
of them, except in the thread that sends: bytes cannot leave before they are on the host. `Staged` has the rules without
CUDA; `CudaStreams` only the CUDA part, so that tests can replace it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire.checksum import Checksums
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Expected, Mailbox, Route, Sent, outbox_of, sever
from lowbit.wire.traffic import Traffic

_PRIORITY = -1  # first: these kernels are short, and a peer or the next computation waits for them


class CudaStreams:
    """The two side streams of a CUDA device, with an index or the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device, priority=_PRIORITY)
        self._in = torch.cuda.Stream(device, priority=_PRIORITY)
        self._computation: torch.cuda.Stream | None = None  # within `arriving`

    @contextlib.contextmanager
    def leaving(self, source: Tensor) -> Iterator[None]:
        """Run a block that reads `source` after the computation launched so far, and does not delay what follows."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        # The computation may release the tensor while this stream still reads it.
        source.record_stream(self._out)
        with torch.cuda.stream(self._out):
            yield

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Run a block in parallel with the computation launched so far; computation launched later waits for it."""
        computation = self._computation = torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.stream(self._in):
                yield
        finally:  # what was launched before an error may still write to the computation's memory
            self._computation = None
            computation.wait_stream(self._in)

    def fence(self) -> None:
        """Make arriving work wait, from now on, for the computation launched so far."""
        self._in.wait_stream(torch.cuda.current_stream(self._device))

    def landing(self, layout: Tensor) -> Tensor:
        """Within `arriving`: allocate device memory to decode to; the computation uses it after the block."""
        assert self._computation is not None
        # The memory belongs to the arriving stream, which is current. Without the record, PyTorch would reuse it there
        # as soon as the tensor is gone, and the next arrival would overwrite it while the computation, which runs
        # behind the host, still reads it. With it, PyTorch waits for the computation launched by then.
        tensor = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=self._device)
        tensor.record_stream(self._computation)
        return tensor

    def host_buffer(self, nbytes: int) -> Tensor:
        """Allocate pinned host memory, which the device copies from and to by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def to_host(self, payload: Tensor, room: int) -> tuple[Tensor, torch.cuda.Event]:
        """Within `leaving`: start copying to a host buffer with `room` free bytes at its end; done at the event."""
        host = self.host_buffer(payload.numel() + room)
        host[: payload.numel()].copy_(payload, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # the sending thread sleeps instead of spinning
        event.record(self._out)
        return host, event

    def to_device(self, host: Tensor) -> Tensor:
        """Within `arriving`: start copying; the host buffer may be released at once."""
        # PyTorch reuses pinned memory only after the copies from it.
        return host.to(self._device, non_blocking=True)


WINDOW_BYTES = 16 << 20
WINDOW_MESSAGES = 4  # fewest messages in a window, whatever their size
_SENDER = ThreadPoolExecutor(1, thread_name_prefix="lowbit-sender")  # sends messages that have been copied to the host


@dataclass
class _Window:
    """Messages expected together: payload bytes of those whose receives are not posted yet, in order.

    `messages`, `nbytes`: of those whose receives are posted, as they travel.
    """

    later: dict[Route, int]
    messages: int = 0
    nbytes: int = 0


class Inbox:
    """Messages that a stage will take in a step; their receives are posted as far ahead as a window allows.

    Gloo asks the peer before it sends a message without a posted receive, which takes a round trip. A window is
    at least a bandwidth-delay product: 12.5 MB at 1 Gbit/s and 100 ms. `buffer`: as for `Mailbox.expect`.
    """

    def __init__(self, mailbox: Mailbox, buffer: Callable[[int], Tensor] | None = None) -> None:
        self._mailbox, self._traffic, self._buffer = mailbox, mailbox.traffic, buffer
        self._windows: dict[Route, _Window] = {}
        self._posted: dict[Route, Expected] = {}

    def expect(self, messages: Iterable[tuple[Route, int]]) -> None:
        """Post as many receives as fit into a new window, and the others as these messages are taken."""
        window = _Window(dict(messages))
        self._windows |= dict.fromkeys(window.later, window)
        self._fill(window)

    @contextlib.contextmanager
    def taking(self, route: Route, size: int) -> Iterator[Expected]:
        """Yield a message for the block to wait for; its receive is posted first if it is not yet."""
        window = self._windows.pop(route, None) or _Window({route: size})
        if route in window.later:
            self._start(route, window)
        message = self._posted.pop(route)
        try:
            yield message
        finally:
            window.messages -= 1
            window.nbytes -= message.nbytes
            self._traffic.hold(-message.nbytes)
        self._fill(window)

    def _fill(self, window: _Window) -> None:
        while window.later:
            route, size = next(iter(window.later.items()))
            whole = size + self._mailbox.checksums.room
            if window.messages >= WINDOW_MESSAGES and window.nbytes + whole > WINDOW_BYTES:
                return
            self._start(route, window)

    def _start(self, route: Route, window: _Window) -> None:
        message = self._posted[route] = self._mailbox.expect(route, window.later.pop(route), buffer=self._buffer)
        window.messages += 1
        window.nbytes += message.nbytes
        self._traffic.hold(message.nbytes)


class Transport:
    """Moves a stage's payloads between ranks of a Gloo group. A step calls `begin`, any of the others, then `drain`.

    It posts receives ahead of the schedule, and leaves waiting for sends to another thread. PyTorch's schedules hardly
    overlap, and Gloo turns half-duplex when a rank posts a send before a receive. Here both directions of the link are
    busy at once. No order of sends can deadlock: none waits before the step ends, and a message that is taken out of
    order is posted at once. Memory is bounded by the windows of the inbox, and by what peers have not yet taken.

    Attributes:
        room: free bytes that `send` needs behind a payload. overhead: bytes that travel behind a payload.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        traffic: Traffic,
        checksums: Checksums,
        buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.group, self.rank, self.traffic = group, group.rank(), traffic
        self.room = self.overhead = checksums.room
        self._pass = 0
        self._mailbox = Mailbox(group, checksums, traffic=traffic)
        self._inbox = Inbox(self._mailbox, buffer)
        self._outbox = outbox_of(group)

    def begin(self, board: FailureBoard, number: int) -> None:
        """Start a step; `number` counts passes, training or not, and is the same at both ends."""
        self._mailbox.board, self._pass = board, number
        self.drain()

    def expect(self, messages: Iterable[tuple[Route, int]]) -> None:
        """Post receives for all messages, with their sizes, that will be taken on one lane, in about this order.

        If a peer has ended, taking its message raises the error.
        """
        self._inbox.expect(messages)

    def send(self, route: Route, message: Tensor) -> None:
        """Send a payload with `room` behind it."""
        (sent,) = self._mailbox.send(message, (self._pass, self.rank, route.channel), route)
        self._outbox.put(self.group, lambda: sent, route.peer, sent.nbytes, self.traffic)

    def take(self, route: Route, nbytes: int) -> Tensor:
        """Wait for a message and return its payload, uint8 (nbytes,); DamagedError: it is not what was sent."""
        with self._inbox.taking(route, nbytes) as message:
            message.route, message.place = route, (self._pass, route.peer, route.channel)
            return message.wait()

    def leaving(self, source: Tensor) -> AbstractContextManager[None]:
        """Return a context in which to encode a tensor and send its payload."""
        return contextlib.nullcontext()

    def arriving(self) -> AbstractContextManager[None]:
        """Return a context in which to take and decode a payload."""
        return contextlib.nullcontext()

    def landing(self, layout: Tensor) -> Tensor:
        """Within `arriving`: return a new tensor to decode to, for the computation to use afterwards."""
        return torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="cpu")

    def drain(self) -> None:
        """Wait until everything that this rank sent has left, and release it."""
        with self.traffic.timing("wait_seconds", message="all that was sent"):
            board = self._mailbox.board
            self._outbox.drain(board.patience, board.blaming)

    def sever(self) -> None:
        """Close the connections for good: peers that wait for this rank fail at once."""
        sever(self.group)


class Staged(Transport):
    """`Transport` for payloads on a device, which pass through buffers on the host."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, checksums: Checksums, streams: CudaStreams) -> None:
        super().__init__(group, traffic, checksums, streams.host_buffer)
        self._streams = streams
        self.room = 0  # none on the device: the checksum is added on the host
        self.leaving, self.arriving, self.landing = streams.leaving, streams.arriving, streams.landing
        self._untimed = Mailbox(group, checksums)  # for the thread that sends

    def begin(self, board: FailureBoard, number: int) -> None:
        self._untimed.board = board
        super().begin(board, number)
        # Since the last pass, the computation's stream may have read or written codec states (a checkpoint).
        self._streams.fence()

    def expect(self, messages: Iterable[tuple[Route, int]]) -> None:
        self._streams.fence()  # for the same reason: a new shape within this pass
        super().expect(messages)

    def take(self, route: Route, nbytes: int) -> Tensor:
        return self._streams.to_device(super().take(route, nbytes))

    def send(self, route: Route, message: Tensor) -> None:
        host, copied = self._streams.to_host(message, self.overhead)
        sending = _SENDER.submit(self._send_after, copied, route, host, (self._pass, self.rank, route.channel))
        self._outbox.put(self.group, sending.result, route.peer, host.numel(), self.traffic)

    def _send_after(self, copied: torch.cuda.Event, route: Route, host: Tensor, place: tuple[int, ...]) -> Sent:
        copied.synchronize()  # apart from sending: an error of this device must not be blamed on the peer
        (sent,) = self._untimed.send(host, place, route)
        return sent


def choose(group: dist.ProcessGroup, device: torch.device, traffic: Traffic, checksums: Checksums) -> Transport:
    """Create the transport for tensors on a CPU or a CUDA device, in a group over Gloo."""
    if device.type == "cuda":
        return Staged(group, traffic, checksums, CudaStreams(device))
    return Transport(group, traffic, checksums)
