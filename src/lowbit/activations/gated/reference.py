"""Gated activations whose backward starts from quantized inputs: the definition, in plain PyTorch.

act(gate) * up; `up` may be None, with its payload and gradient: act(gate).

Payloads, precision and dtypes: as in `lowbit.activations.norm.reference`.
"""

import math
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
from lowbit.kernels import operator
from lowbit.kernels.operators import check_pair, check_shapes

ERFC = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""For kernels: erfc(z) = t ((((c0 t + c1) t + ...) t + c4) e^(-z^2) within 1.5e-7, where t = 1 / (1 + p z), z >= 0
(Abramowitz and Stegun, 7.1.26)."""
GELU_TANH = math.sqrt(2 / math.pi), 0.044715  # act(g) = g (1 + tanh(a (g + b g^3))) / 2


@dataclass(frozen=True)
class Activation:
    """An activation function that has kernels: `name` and `name_slope` in `cpu.py`, a branch of `activate` in `gpu.py`.

    Attributes:
        value: PyTorch's own function, in the input's dtype. slope: the derivative; NaN for NaN.
        spellings: the torch functions that compute it, by default.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    spellings: tuple[Any, ...] = ()


def _silu_slope(x: Tensor) -> Tensor:
    share = x.sigmoid()
    return share * (1 + x * (1 - share))


def _gelu_slope(x: Tensor) -> Tensor:
    below = (1 + torch.erf(x * math.sqrt(0.5))) / 2
    density = torch.exp(-x * x / 2) * (2 * math.pi) ** -0.5
    return below + x * density


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    a, b = GELU_TANH
    inner = torch.tanh(a * (x + b * x**3))
    return (1 + inner) / 2 + x * (1 - inner * inner) * (a / 2) * (1 + 3 * b * x * x)


def _relu_slope(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x, (x > 0).float())


TABLE = {
    "silu": Activation(functional.silu, _silu_slope, (functional.silu,)),
    "gelu": Activation(functional.gelu, _gelu_slope, (functional.gelu,)),
    "gelu_tanh": Activation(partial(functional.gelu, approximate="tanh"), _gelu_tanh_slope),
    "relu": Activation(torch.relu, _relu_slope, (functional.relu, torch.relu, Tensor.relu)),
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
    group_int.encode.definition(gate.view(-1), payload_gate, bits, group, False, seed)
    if up is not None and payload_up is not None:
        following = None if seed is None else (seed + 1) % 2**32
        group_int.encode.definition(up.view(-1), payload_up, bits, group, False, following)
    value, _ = activate(gate.float(), activation)
    out.copy_(value if up is None else value * up.float())


@operator(writes="out", check=_check_recompute)
def recompute(
    payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """out = act(gate') * up', where gate' and up' are the decoded payloads."""
    value, _ = activate(decoded(payload_gate, out.shape, bits, group), activation)
    out.copy_(value if payload_up is None else value * decoded(payload_up, out.shape, bits, group))


@operator(writes=("grad_gate", "grad_up", "out"), check=_check_backward)
def backward(
    payload_gate: Tensor, payload_up: Tensor | None, grad_out: Tensor,
    grad_gate: Tensor, grad_up: Tensor | None, out: Tensor | None,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of act(gate) * up at gate' and up'; `out`, if given, gets act(gate') * up' itself."""
    value, slope = activate(decoded(payload_gate, grad_gate.shape, bits, group), activation)
    g = grad_out.float()
    if payload_up is not None and grad_up is not None:
        up = decoded(payload_up, grad_up.shape, bits, group)
        if out is not None:
            out.copy_(value * up)
        grad_up.copy_(g * value)
        g = g * up
    elif out is not None:
        out.copy_(value)
    grad_gate.copy_(g * slope)


def activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Values and derivatives of an activation in float32; NaN for NaN."""
    return TABLE[activation].value(x), TABLE[activation].slope(x)
