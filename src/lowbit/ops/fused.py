"""The definition of norms and gated activations whose backward starts from quantized inputs, in plain PyTorch.

Forward computes from what it is given and keeps `GroupInt` payloads (asymmetric) of it; backward decodes them and
computes everything else anew, in float32 (AGoQ, arXiv 2605.00539). Payloads are the same bytes on every backend. Sums
and functions of real numbers are not: backends round and order them differently, within a few float32 steps. Unlike
the decoders of messages, results beyond float16 become Inf: scalers of losses look for it. Shape suffixes: N rows, C
channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.ops.group_int import group_int_decode, group_int_encode

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ERFC = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""For kernels: erfc(z) = t ((((c0 t + c1) t + ...) t + c4) e^(-z^2) within 1.5e-7, where t = 1 / (1 + p z), z >= 0
(Abramowitz and Stegun, 7.1.26)."""
GELU_TANH = math.sqrt(2 / math.pi), 0.044715  # act(g) = g (1 + tanh(a (g + b g^3))) / 2


def norm_encode(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, payload: Tensor, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """out = norm(x), from x as it is; payload: x."""
    group_int_encode(x.view(-1), payload, bits, group, False, seed)
    normal_NC, _ = _normalized(x.float(), eps, centred)
    out.copy_(_affine(normal_NC, weight, bias, offset))


def norm_recompute(
    payload: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """out = norm(x'), where x' is what the payload decodes to."""
    normal_NC, _ = _normalized(_decoded(payload, out, bits, group), eps, centred)
    out.copy_(_affine(normal_NC, weight, bias, offset))


def norm_backward(
    payload: Tensor, weight: Tensor | None, bias: Tensor | None, grad_out: Tensor,
    grad_x: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None, out: Tensor | None,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of norm at x'; `out`, if it is wanted, norm(x') itself, which reads `bias`."""
    normal_NC, inverse_N1 = _normalized(_decoded(payload, grad_x, bits, group), eps, centred)
    g_NC = grad_out.float()
    if out is not None:
        out.copy_(_affine(normal_NC, weight, bias, offset))
    if grad_weight is not None:
        grad_weight.copy_((g_NC * normal_NC).sum(0))
    if grad_bias is not None:
        grad_bias.copy_(g_NC.sum(0))
    if weight is not None:
        g_NC = g_NC * (weight.float() + offset)
    along_N1 = (g_NC * normal_NC).mean(-1, keepdim=True)
    mean_N1 = g_NC.mean(-1, keepdim=True) if centred else 0.0
    grad_x.copy_((g_NC - mean_N1 - normal_NC * along_N1) * inverse_N1)


def gated_encode(
    gate: Tensor, up: Tensor | None, payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """out = act(gate) * up, or act(gate); payloads: both. `up` takes the seed's successor."""
    group_int_encode(gate.view(-1), payload_gate, bits, group, False, seed)
    if up is not None and payload_up is not None:
        following = None if seed is None else (seed + 1) % 2**32
        group_int_encode(up.view(-1), payload_up, bits, group, False, following)
    value, _ = activate(gate.float(), activation)
    out.copy_(value if up is None else value * up.float())


def gated_recompute(
    payload_gate: Tensor, payload_up: Tensor | None, out: Tensor,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """out = act(gate') * up', where gate' and up' are what the payloads decode to."""
    value, _ = activate(_decoded(payload_gate, out, bits, group), activation)
    out.copy_(value if payload_up is None else value * _decoded(payload_up, out, bits, group))


def gated_backward(
    payload_gate: Tensor, payload_up: Tensor | None, grad_out: Tensor,
    grad_gate: Tensor, grad_up: Tensor | None, out: Tensor | None,
    activation: str, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of act(gate) * up at gate' and up'; `out`, if it is wanted, act(gate') * up' itself."""
    value, slope = activate(_decoded(payload_gate, grad_gate, bits, group), activation)
    g = grad_out.float()
    if payload_up is not None and grad_up is not None:
        up = _decoded(payload_up, grad_up, bits, group)
        if out is not None:
            out.copy_(value * up)
        grad_up.copy_(g * value)
        g = g * up
    elif out is not None:
        out.copy_(value)
    grad_gate.copy_(g * slope)


def activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Values and derivatives of an activation in float32; NaN for NaN."""
    if activation == "silu":
        share = x.sigmoid()
        return functional.silu(x), share * (1 + x * (1 - share))
    if activation == "relu":
        return x.relu(), torch.where(x.isnan(), x, (x > 0).float())
    if activation == "gelu":
        below = (1 + torch.erf(x * math.sqrt(0.5))) / 2
        density = torch.exp(-x * x / 2) * (2 * math.pi) ** -0.5
        return functional.gelu(x), below + x * density
    a, b = GELU_TANH
    inner = torch.tanh(a * (x + b * x**3))
    slope = (1 + inner) / 2 + x * (1 - inner * inner) * (a / 2) * (1 + 3 * b * x * x)
    return functional.gelu(x, approximate="tanh"), slope


def _decoded(payload: Tensor, like: Tensor, bits: int, group: int) -> Tensor:
    """What a payload decodes to, in float32 and the shape of `like`."""
    x = torch.empty(like.shape, device=like.device)
    group_int_decode(payload, x.view(-1), bits, group, False, False)
    return x


def _normalized(x_NC: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Rows divided by their root mean square (of what is left after their mean, if centred), and its reciprocals."""
    if centred:
        x_NC = x_NC - x_NC.mean(-1, keepdim=True)
    inverse_N1 = torch.rsqrt(x_NC.square().mean(-1, keepdim=True) + eps)
    return x_NC * inverse_N1, inverse_N1


def _affine(normal_NC: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    if weight is not None:
        normal_NC = normal_NC * (weight.float() + offset)
    return normal_NC if bias is None else normal_NC + bias.float()
