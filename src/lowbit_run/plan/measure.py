"""Measures a model for a plan: bytes and gradient errors by layer type and bits, and every allocation of a step."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lowbit.activations import follow
from lowbit.activations.counting import SavedBytes, counted
from lowbit.activations.layer_plan import PLANNED, LayerPlan
from lowbit.activations.policy import KINDS, WHOLE, LayerAware
from lowbit.activations.saved import compress_saved_
from lowbit_run.plan.budget import WIDTHS

ORDER_OF_SUMS = 1e-6
"""Smaller relative errors of float32 gradients come from the order of summation, not from few bits."""


@contextlib.contextmanager
def compressed(model: nn.Module, policy: LayerAware | LayerPlan) -> Iterator[None]:
    """Compress what a model saves in a `with` block, without warnings of bits that spoil it: they are only tried."""
    log = logging.getLogger(follow.__name__)
    level = log.level
    changes = compress_saved_(model, policy)  # pyright: ignore[reportCallIssue, reportArgumentType]
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        changes.remove()
        log.setLevel(level)


def bytes_by_width(
    model: nn.Module, forward: Callable[[], Any], *, widths: Sequence[int] = WIDTHS, group: int = 64
) -> dict[int, SavedBytes]:
    """Bytes that autograd saves of one micro-batch with the same bits for every layer type, by width (2 to 8, 16).

    A layer type's bytes do not depend on the bits of others, so these runs give those of every combination.

    Args:
        model: not compressed, in training mode; unchanged afterwards.
        forward: runs the model on one micro-batch and returns the loss or a stage's output, which holds the graph.
    """
    by_width: dict[int, SavedBytes] = {}
    for bits in widths:
        policy = LayerAware(bits=bits, norm=bits, attention=WHOLE, group=group)
        with compressed(model, policy), counted(model) as by_width[bits]:
            graph = forward()
            del graph
    return by_width


def sensitivities(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    kinds: Sequence[str] = PLANNED,
    widths: Sequence[int] = WIDTHS,
    group: int = 64,
) -> dict[str, dict[int, float]]:
    """Relative error of the gradient, |g' - g| / |g| over all parameters, if only one layer type has few bits.

    Runs a forward and backward pass for every type and width below 16 bits, and needs memory for two more gradients. A
    type whose bits change nothing (such as linear layers whose inputs are all recomputed from norms) has errors of 0.

    Args:
        model: not compressed, in training mode; unchanged afterwards, and without gradients.
        loss: computes the same loss at every call: no dropout, the same tokens.
        kinds: layer types to try, "attention" too. widths: bits to try.

    Raises:
        ValueError: gradients that are zero or not finite, or that differ between two calls of `loss`.
    """
    exact = gradients(model, loss)
    noise = relative_error(gradients(model, loss), exact)
    if not noise < 1e-3:
        raise ValueError(
            f"loss gives gradients that differ by {noise:.1e} between two calls; allowed: the same, without dropout"
        )
    errors: dict[str, dict[int, float]] = {}
    for kind in kinds:
        errors[kind] = {}
        for bits in widths:
            only: dict[str, Any] = dict.fromkeys(KINDS, WHOLE) | {kind: bits}
            with compressed(model, LayerAware(group=group, **only)):
                error = relative_error(gradients(model, loss), exact)
            errors[kind][bits] = error if error > max(2 * noise, ORDER_OF_SUMS) else 0.0
    return errors


def bytes_between_passes(
    output: Tensor, grad_output: Tensor | None, input: Tensor, parameters: Iterable[nn.Parameter]
) -> int:
    """Bytes that PyTorch holds of a micro-batch between backward's pass for the inputs and the one for the weights.

    These are the gradients of the outputs of layers with weights, each storage once. Zero-bubble schedules hold them in
    addition to the saved activations; they do not depend on the bits. Gradients of `output` (None: it is a loss) and
    `input` are not counted. The graph of `output` cannot be used again.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    grad_outputs = None if grad_output is None else [grad_output]
    grads, groups = stage_backward_input([output], grad_outputs, [input], iter(parameters))
    sizes = {
        gradient.untyped_storage()._cdata: gradient.untyped_storage().nbytes()
        for group in groups
        for at_node in group.get("grads") or ()
        for gradient in at_node or ()
        if gradient is not None
    }
    for other in (grad_output, input.grad, *grads):
        if other is not None:
            sizes.pop(other.untyped_storage()._cdata, None)
    input.grad = None
    return sum(sizes.values())


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss by parameter name, in float32; the parameters' own `grad` is cleared."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    by_name = {n: p.grad.detach().float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return by_name


def relative_error(rounded: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """|rounded - exact| / |exact| over all tensors together; ValueError if `exact` is zero or not finite."""
    norms = [torch.stack([torch.linalg.vector_norm(t) for t in exact.values()])]
    norms.append(torch.stack([torch.linalg.vector_norm(rounded[n] - t) for n, t in exact.items()]))
    size, error = (float(torch.linalg.vector_norm(norm.double())) for norm in norms)
    if not 0 < size < float("inf"):
        raise ValueError(f"loss gives gradients of norm {size}; allowed: finite, above 0")
    return error / size


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


def _profiled() -> Any:
    devices = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=devices, profile_memory=True)


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
