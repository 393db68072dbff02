"""Gated activations whose backward starts from quantized inputs: the definition, in plain PyTorch.

act(gate) * up; `up` may be None, with its payload and gradient: act(gate).

Payloads, precision and dtypes: as in `lowbit.activations.norm.reference`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.codecs.group_int import reference as group_int
from lowbit.codecs.group_int.reference import check_asymmetric, check_settings, decoded
from lowbit.escape import shown
from lowbit.kernels import implementation, operator
from lowbit.kernels.operators import check_pair, check_shapes

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation function that has a kernel: a branch of `activate` in `gpu.py`.

    Attributes:
        value: PyTorch's own function, in the input's dtype.
        gradient: of a gradient and the input: the gradient times the derivative; NaN for NaN.
        spellings: the torch functions that compute it, by default.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    spellings: tuple[Any, ...] = ()


def _gelu_tanh_gradient(grad: Tensor, x: Tensor) -> Tensor:
    # Beyond 16 the slope is constant, and x^3 would overflow.
    return _aten.gelu_backward(grad, x.clamp(-16, 16), approximate="tanh")


def _relu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad * torch.where(x.isnan(), x, (x > 0).to(x.dtype))


TABLE = {
    "silu": Activation(functional.silu, _aten.silu_backward, (functional.silu,)),
    "gelu": Activation(functional.gelu, _aten.gelu_backward, (functional.gelu,)),
    "gelu_tanh": Activation(partial(functional.gelu, approximate="tanh"), _gelu_tanh_gradient),
    "relu": Activation(torch.relu, _relu_gradient, (functional.relu, torch.relu, Tensor.relu)),
}
"""The activation functions that have kernels, by name. Any other elementwise function is computed by itself."""
ACTIVATIONS = [*TABLE]
"""Their names; kernels number them in this order."""


def _check(
    x: Tensor, payload_gate: Tensor, payload_up: Tensor | None, activation: str, bits: int, group: int,
    **tensors: Tensor | None,
) -> None:  # fmt: skip
    check_settings(bits, group)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {shown(activation)}; allowed: {', '.join(map(repr, ACTIVATIONS))}")
    check_shapes(x.shape, x.device, **tensors)
    check_asymmetric("payload_gate", payload_gate, x, bits, group)
    if payload_up is not None:
        check_asymmetric("payload_up", payload_up, x, bits, group)


def _check_encode(gate, up, payload_gate, payload_up, out, activation, bits, group, seed) -> None:
    check_pair(up=up, payload_up=payload_up)
    _check(gate, payload_gate, payload_up, activation, bits, group, gate=gate, up=up, out=out)


def _check_recompute(payload_gate, payload_up, out, activation, bits, group) -> None:
    _check(out, payload_gate, payload_up, activation, bits, group, out=out)


def _check_backward(payload_gate, payload_up, grad_out, grad_gate, grad_up, out, activation, bits, group) -> None:
    check_pair(payload_up=payload_up, grad_up=grad_up)
    _check(
        grad_gate, payload_gate, payload_up, activation, bits, group,
        grad_gate=grad_gate, grad_up=grad_up, grad_out=grad_out, out=out,
    )  # fmt: skip


@operator(writes=("payload_gate", "payload_up", "out"), check=_check_encode)
def encode(
    gate: Tensor, up: Tensor | None, payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """out = act(gate) * up, or act(gate); payloads: both. `up` takes the seed's successor."""
    encode_groups = implementation(group_int.encode, gate.device)
    encode_groups(gate.view(-1), payload_gate, bits, group, False, seed)
    if up is not None and payload_up is not None:
        following = None if seed is None else (seed + 1) % 2**32
        encode_groups(up.view(-1), payload_up, bits, group, False, following)
    torch.mul(TABLE[activation].value(gate.float()), 1.0 if up is None else up.float(), out=out)


@operator(writes="out", check=_check_recompute)
def recompute(
    payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """out = act(gate') * up', where gate' and up' are the decoded payloads."""
    value = TABLE[activation].value(decoded(payload_gate, out.shape, bits, group))
    torch.mul(value, 1.0 if payload_up is None else decoded(payload_up, out.shape, bits, group), out=out)


@operator(writes=("grad_gate", "grad_up", "out"), check=_check_backward)
def backward(
    payload_gate: Tensor, payload_up: Tensor | None, grad_out: Tensor,
    grad_gate: Tensor, grad_up: Tensor | None, out: Tensor | None,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of act(gate) * up at gate' and up'; `out`, if given, gets act(gate') * up' itself."""
    x, g, function = decoded(payload_gate, grad_gate.shape, bits, group), grad_out.float(), TABLE[activation]
    value = function.value(x)
    if payload_up is not None and grad_up is not None:
        torch.mul(g, value, out=grad_up)
        up = decoded(payload_up, grad_up.shape, bits, group)
        if out is not None:
            value.mul_(up)
        g = up.mul_(g)  # in place, as above: this is the moment at which a training step takes most memory
    if out is not None:
        out.copy_(value)
    del value
    grad_gate.copy_(function.gradient(g, x))
