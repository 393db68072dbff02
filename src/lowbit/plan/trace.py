"""Traces every allocation of a step: the peak of activations and temporaries, and in which part it occurs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "lowbit.mark "


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a step: bytes at its start, the most within it, and at its end, relative to those before the step."""

    start: int
    peak: int
    end: int


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Bytes that a step allocates, relative to those before it; `forward` and `backward` of each layer, in order.

    `before`: from the start to the first layer. `between`: from the last layer's forward to its backward, with the
    loss. `after`: from the first layer's backward to the end.
    """

    peak: int
    before: Segment
    forward: tuple[Segment, ...]
    between: Segment
    backward: tuple[Segment, ...]
    after: Segment


def traced_peak(step: Callable[[], Any], device: torch.device | None = None) -> int:
    """The most bytes that a step allocates at a time, relative to those before it, on a device (default: the CPU)."""
    with _profiled() as profiler:
        step()
    return max((size for _, size in _curve(profiler, device or torch.device("cpu"))), default=0)


def trace_step(layers: list[nn.Module], step: Callable[[], Any], device: torch.device | None = None) -> StepTrace:
    """Trace a forward and a backward pass of one micro-batch, layer by layer.

    PyTorch's profiler reports each of PyTorch's allocations, so the figures are exact; memory of other libraries and of
    kernels compiled by numba is not seen. Gradients that exist already are not counted. Each layer runs once, in order.
    """
    with _profiled() as profiler, _marking(layers):
        step()
    curve = _curve(profiler, device or torch.device("cpu"))
    marks = {e.name()[len(_MARK) :]: e.start_ns() for e in _events(profiler) if e.name().startswith(_MARK)}
    count = len(layers)
    begin = curve[0][0] if curve else 0
    last = max([time for time, _ in curve] + [*marks.values()]) + 1
    # If the first layer's input has no gradient, its backward is not marked.
    back = [marks.get(f"backward {i}", last) for i in range(count + 1)]
    forth = [marks[f"forward {i}"] for i in range(count + 1)]

    def between(first: int, end: int) -> Segment:
        held = [size for time, size in curve if time < first][-1:]
        inside = [size for time, size in curve if first <= time < end]
        start = held[0] if held else 0
        return Segment(start=start, peak=max([start, *inside]), end=inside[-1] if inside else start)

    return StepTrace(
        peak=max((size for _, size in curve), default=0),
        before=between(begin, forth[0]),
        forward=tuple(between(forth[i], forth[i + 1]) for i in range(count)),
        between=between(forth[count], back[count]),
        backward=tuple(between(back[i + 1], back[i]) for i in range(count)),
        after=between(back[0], last),
    )


@contextlib.contextmanager
def _marking(layers: list[nn.Module]) -> Iterator[None]:
    """Mark forward i when layer i begins, and backward i when the gradient of its input is ready."""
    handles: list[Any] = []

    def mark(text: str) -> None:
        with record_function(f"{_MARK}{text}"):
            pass

    def watch(x: Any, number: int) -> None:
        x = x[0] if isinstance(x, tuple) and x else x
        if isinstance(x, Tensor) and x.requires_grad:
            handles.append(x.register_hook(lambda _: mark(f"backward {number}")))

    def before(number: int) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            mark(f"forward {number}")
            watch(args or tuple(v for v in kwargs.values() if isinstance(v, Tensor)), number)

        return enter

    def end(module: nn.Module, args: Any, output: Any) -> None:
        mark(f"forward {len(layers)}")
        watch(output, len(layers))

    handles += [layer.register_forward_pre_hook(before(i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles.append(layers[-1].register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _profiled() -> Iterator[Any]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        yield profiler


def _events(profiler: Any) -> Any:
    return profiler.profiler.kineto_results.events()


def _curve(profiler: Any, device: torch.device) -> list[tuple[int, int]]:
    kind = torch.profiler.DeviceType.CUDA if device.type == "cuda" else torch.profiler.DeviceType.CPU
    changes = [
        (e.start_ns(), e.nbytes()) for e in _events(profiler) if e.name() == "[memory]" and e.device_type() == kind
    ]
    total, curve = 0, []
    for time, change in sorted(changes, key=lambda change: change[0]):
        total += change
        curve.append((time, total))
    return curve
