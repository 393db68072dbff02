"""Side streams of a GPU, on which payloads are coded and copied to and from the host while it computes.

The host waits for none of them, except in the thread that sends: bytes cannot leave before they are on the host.
`Staged` (in `transport`) has the rules without CUDA; `CudaStreams` only the CUDA part, so that tests can replace it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

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
        """Allocate pinned host memory, which the device copies from and to by itself: uint8 (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

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
