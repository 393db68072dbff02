"""What a plan of bits needs to know of a model, measured on it: bytes and gradient errors by layer type and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.activations.bit_plan import PLANNED
from lowbit.activations.counting import SavedBytes, counted
from lowbit.activations.policy import KINDS, WHOLE, LayerAware
from lowbit.activations.saved import compress_saved_
from lowbit.plan.budget import WIDTHS

ORDER_OF_SUMS = 1e-6
"""Relative errors of float32 gradients below this come from adding up in another order, not from few bits."""


def bytes_by_width(
    model: nn.Module,
    forward: Callable[[], Any],
    *,
    widths: Sequence[int] = WIDTHS,
    group: int = 64,
) -> dict[int, SavedBytes]:
    """What autograd keeps of one micro-batch with so many bits in every layer type, for each width.

    A layer type's bytes do not depend on the bits of others, so these runs give those of every combination.

    Args:
        model: not compressed, in training mode; it is given back as it was.
        forward: runs it on one micro-batch and returns what holds the graph: the loss, or a stage's output.
        widths: bits, each 2 to 8 or 16; group: elements that share a scale.
    """
    found: dict[int, SavedBytes] = {}
    for bits in widths:
        compressed = compress_saved_(model, LayerAware(bits=bits, norm=bits, group=group), report=False)
        try:
            with counted(model) as found[bits]:
                graph = forward()
            del graph
        finally:
            compressed.remove()
    return found


def sensitivities(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    kinds: Sequence[str] = PLANNED,
    widths: Sequence[int] = WIDTHS,
    group: int = 64,
) -> dict[str, dict[int, float]]:
    """Relative error of the gradient with one layer type alone in so many bits: |g' - g| / |g| over all parameters.

    Takes a forward and backward pass for every type and width below 16 bits, and memory for two more gradients. A type
    whose bits change nothing (linear layers whose inputs all follow from norms, say) has errors of 0.

    Args:
        model: not compressed, in training mode; it is given back as it was, without gradients.
        loss: computes the same loss at every call: no dropout, the same tokens.
        kinds: layer types to try, "attention" too; widths: bits to try.
        group: elements that share a scale.

    Raises:
        ValueError: gradients that are zero or not finite, or that differ between two calls of `loss`.
    """
    exact = gradients(model, loss)
    noise = relative_error(gradients(model, loss), exact)
    if not noise < 1e-3:
        raise ValueError(
            f"loss gives gradients that differ by {noise:.1e} between two calls; allowed: the same, without dropout"
        )
    found: dict[str, dict[int, float]] = {}
    for kind in kinds:
        found[kind] = {}
        for bits in widths:
            only: dict[str, Any] = dict.fromkeys(KINDS, WHOLE) | {kind: bits}
            compressed = compress_saved_(model, LayerAware(group=group, **only), report=False)
            try:
                error = relative_error(gradients(model, loss), exact)
            finally:
                compressed.remove()
            found[kind][bits] = error if error > max(2 * noise, ORDER_OF_SUMS) else 0.0
    return found


def bytes_between_passes(
    output: Tensor,
    grad_output: Tensor | None,
    input: Tensor,
    parameters: Iterable[nn.Parameter],
) -> int:
    """What PyTorch holds of a micro-batch between backward's pass for the inputs and the one for the weights.

    These are the gradients of what layers with weights put out, each storage once. They are there beside what autograd
    keeps, whatever its bits, in zero-bubble schedules.

    Args:
        output: of a stage, or a loss; its graph is spent. grad_output: its gradient, not counted; None: 1, of a loss.
        input: of the stage, with `requires_grad`; its own gradient is not counted.
        parameters: of the stage.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    given = None if grad_output is None else [grad_output]
    grads, groups = stage_backward_input([output], given, [input], iter(parameters))
    found = {
        gradient.untyped_storage()._cdata: gradient.untyped_storage().nbytes()
        for group in groups
        for at_node in group.get("grads") or ()
        for gradient in at_node or ()
        if gradient is not None
    }
    for other in (grad_output, input.grad, *grads):
        if other is not None:
            found.pop(other.untyped_storage()._cdata, None)
    input.grad = None
    return sum(found.values())


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss by name of the parameter, in float32; the parameters are left without any."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    found = {n: p.grad.detach().float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """|found - exact| / |exact| over all tensors together.

    Raises:
        ValueError: `exact` is zero or not finite.
    """
    norms = [torch.stack([torch.linalg.vector_norm(t) for t in exact.values()])]
    norms.append(torch.stack([torch.linalg.vector_norm(found[n] - t) for n, t in exact.items()]))
    size, error = (float(torch.linalg.vector_norm(norm.double())) for norm in norms)
    if not 0 < size < float("inf"):
        raise ValueError(f"loss gives gradients of norm {size}; allowed: finite, above 0")
    return error / size
