"""Norms whose backward starts from quantized inputs: the definition, in plain PyTorch.

`centred`: LayerNorm, else RMSNorm; `offset` is added to weights. `weight`, `bias` (C,) and their gradients may be None.

Forward computes from its inputs and keeps `GroupInt` payloads (asymmetric) of them; backward decodes these and
recomputes everything else in float32 (AGoQ, arXiv 2605.00539). x' is the decoded payload of x.
Payloads are the same bytes on every backend. Sums and functions of real numbers are not: backends round and order them
differently, within a few float32 steps. Unlike in decoders of messages, results beyond float16 become Inf, which loss
scalers look for. Tensors of one call may differ in dtype, not in shape. Shape suffixes: N rows, C channels.
"""

import math

import torch
from torch import Tensor

from lowbit.codecs.group_int import reference as group_int
from lowbit.codecs.group_int.reference import check_asymmetric, check_settings, decoded
from lowbit.kernels import implementation, operator
from lowbit.kernels.operators import check_shapes


def _check(
    x: Tensor, payload: Tensor, eps: float, bits: int, group: int, *,
    rows: dict[str, Tensor | None], channels: dict[str, Tensor | None],
) -> None:  # fmt: skip
    check_settings(bits, group)
    if x.dim() != 2:
        raise ValueError(f"tensor has shape {tuple(x.shape)}; allowed: (rows, channels)")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps}; allowed: finite, at least 0")
    check_shapes(x.shape, x.device, **rows)
    check_shapes(x.shape[1:], x.device, **channels)
    check_asymmetric("payload", payload, x, bits, group)


def _check_encode(x, weight, bias, payload, out, eps, centred, offset, bits, group, seed) -> None:
    _check(x, payload, eps, bits, group, rows={"x": x, "out": out}, channels={"weight": weight, "bias": bias})


def _check_recompute(payload, weight, bias, out, eps, centred, offset, bits, group) -> None:
    _check(out, payload, eps, bits, group, rows={"out": out}, channels={"weight": weight, "bias": bias})


def _check_backward(
    payload, weight, grad_out, grad_x, grad_weight, grad_bias, eps, centred, offset, bits, group
) -> None:
    _check(
        grad_x, payload, eps, bits, group,
        rows={"grad_x": grad_x, "grad_out": grad_out},
        channels={"weight": weight, "grad_weight": grad_weight, "grad_bias": grad_bias},
    )  # fmt: skip


@operator(writes=("payload", "out"), check=_check_encode)
def encode(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, payload: Tensor, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    """out = norm(x), computed from the unrounded x; payload: x."""
    implementation(group_int.encode, x.device)(x.view(-1), payload, bits, group, False, seed)
    normal_NC, _ = _normalized(x.float(), eps, centred)
    out.copy_(_affine(normal_NC, weight, bias, offset))


@operator(writes="out", check=_check_recompute)
def recompute(
    payload: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """out = norm(x'), where x' is the decoded payload."""
    normal_NC, _ = _normalized(decoded(payload, out.shape, bits, group), eps, centred)
    out.copy_(_affine(normal_NC, weight, bias, offset))


@operator(writes=("grad_x", "grad_weight", "grad_bias"), check=_check_backward)
def backward(
    payload: Tensor, weight: Tensor | None, grad_out: Tensor,
    grad_x: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None,
    eps: float, centred: bool, offset: float, bits: int, group: int,
) -> None:  # fmt: skip
    """Gradients of norm at x'."""
    normal_NC, inverse_N1 = _normalized(decoded(payload, grad_x.shape, bits, group), eps, centred)
    g_NC = grad_out.float()
    if grad_weight is not None:
        grad_weight.copy_((g_NC * normal_NC).sum(0))
    if grad_bias is not None:
        grad_bias.copy_(g_NC.sum(0))
    if weight is not None:
        g_NC = g_NC * (weight.float() + offset)
    along_N1 = (g_NC * normal_NC).mean(-1, keepdim=True)
    mean_N1 = g_NC.mean(-1, keepdim=True) if centred else 0.0
    grad_x.copy_((g_NC - mean_N1 - normal_NC * along_N1) * inverse_N1)


def _normalized(x_NC: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Rows, minus their mean if `centred`, divided by their root mean square, and its reciprocals."""
    if centred:
        x_NC = x_NC - x_NC.mean(-1, keepdim=True)
    inverse_N1 = torch.rsqrt(x_NC.square().mean(-1, keepdim=True) + eps)
    return x_NC * inverse_N1, inverse_N1


def _affine(normal_NC: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    if weight is not None:
        normal_NC = normal_NC * (weight.float() + offset)
    return normal_NC if bias is None else normal_NC + bias.float()
