"""Measure the speed of codecs on this machine."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.codecs.foreign import is_own, open_session

_LEAST, _MOST = 5, 100
_CACHE = 1 << 22  # float32 elements: more than most caches hold


def coding_speed(
    codec: Codec, shape: Sequence[int], device: torch.device | None = None, *, seconds: float = 0.3
) -> tuple[float, float]:
    """Measure how many bytes of float32 a format encodes and decodes per second on this machine, at this shape.

    Caches are cold, as in training, which computes between two messages. The result is the median of all rounds but
    the first, which may compile.

    Args:
        device: the CPU if omitted. seconds: least time of all rounds together, unless there are 100.
    """
    device = device or torch.device("cpu")
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(device)  # not training's generator
    cache = torch.zeros(_CACHE, device=device)
    operations = coding_operations(codec, [x], [torch.empty_like(x)])[:2]
    times: tuple[list[float], list[float]] = [], []
    # A small tensor takes far less than emptying the cache before it, so that its seconds would take minutes.
    while len(times[0]) <= _LEAST or (len(times[0]) <= _MOST and sum(sum(of[1:]) for of in times) < seconds):
        for operation, of in zip(operations, times, strict=True):
            cache.add_(1)
            start = _now(device)
            operation(0)
            of.append(_now(device) - start)
    encoding, decoding = (statistics.median(of[1:]) for of in times)
    return x.nbytes / encoding, x.nbytes / decoding


def coding_operations(
    codec: Codec, xs: Sequence[Tensor], outs: Sequence[Tensor]
) -> tuple[Callable[[int], object], Callable[[int], object], int]:
    """Return functions to encode one of several equal tensors and to decode a payload, and the bytes of a payload.

    A stateful codec must decode each payload once, after encoding it; others decode payloads made beforehand.
    """
    x = xs[0]
    if is_own(codec) and not codec.stateful:
        payloads = [codec.encode(x)]
        payloads += [payloads[0].clone() for _ in xs[1:]]
        return (
            lambda i: codec.encode(xs[i], out=payloads[i]),
            lambda i: codec.decode(payloads[i], shape=x.shape, out=outs[i]),
            len(payloads[0]),
        )
    sender, receiver = (open_session(codec, shape=x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    sender.samples = receiver.samples = tuple(range(len(x)))
    sent: list[Tensor] = []
    return (
        lambda i: sent.append(sender.encode(xs[i])),
        lambda i: receiver.decode(sent.pop(), out=outs[i]),
        sender.max_nbytes(),
    )


def _now(device: torch.device) -> float:
    """Wait until all work of a device is done, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
