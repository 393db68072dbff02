"""Cross-entropy that saves 16-bit logits instead of their log-softmax in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.activations.follow import TorchCall, handles, large_enough
from lowbit.activations.functions import first_order

_CHUNK = 1 << 22  # elements of float32 at a time


@handles(functional.cross_entropy)
def cross_entropy(
    call: TorchCall, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """The mean, or sum, over rows of float32 logits that were cast from 16 bits."""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return NotImplemented
    if reduction not in ("mean", "sum") or input.dim() != 2 or target.dim() != 1 or input.dtype != torch.float32:
        return NotImplemented
    if not large_enough(input) or not call.saves(input):
        return NotImplemented
    with torch.no_grad():
        narrow = _narrow(input)
    if narrow is None:
        return NotImplemented
    with call.handled(input, target, ignore_index=ignore_index, reduction=reduction):
        with torch.no_grad():
            loss = functional.cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)
        return CrossEntropyFunction.apply(input, loss, narrow, target, ignore_index, reduction)


def _narrow(x_RV: Tensor) -> Tensor | None:
    """The same numbers in 16 bits, or None."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(x_RV[:1].to(dtype).float(), x_RV[:1]):
            narrow = x_RV.to(dtype)
            return narrow if all(torch.equal(narrow[r].float(), x_RV[r]) for r in _chunks(x_RV)) else None
    return None


def _chunks(x_RV: Tensor) -> list[slice]:
    rows = max(1, _CHUNK // x_RV.shape[1])
    return [slice(start, start + rows) for start in range(0, len(x_RV), rows)]


class CrossEntropyFunction(torch.autograd.Function):
    """Cross-entropy of logits (R, V) and targets (R,), whose backward computes softmax again."""

    @staticmethod
    def forward(
        ctx: Any, x_RV: Tensor, loss: Tensor, narrow_RV: Tensor, target_R: Tensor, ignored: int, reduction: str
    ) -> Tensor:
        """`loss`: the result; `narrow_RV`: the logits in 16 bits."""
        ctx.ignored, ctx.reduction = ignored, reduction
        ctx.save_for_backward(narrow_RV, target_R)
        return loss.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        narrow_RV, target_R = ctx.saved_tensors
        counts_R = target_R != ctx.ignored
        scale = grad_out.float() / counts_R.sum() if ctx.reduction == "mean" else grad_out.float()
        grad_RV = torch.empty(narrow_RV.shape, dtype=torch.float32, device=narrow_RV.device)
        for rows in _chunks(narrow_RV):
            counts = counts_R[rows].unsqueeze(1)
            grad = torch.softmax(narrow_RV[rows].float(), -1)
            grad.scatter_add_(1, target_R[rows].unsqueeze(1).where(counts, 0), counts.float().neg())
            grad_RV[rows] = grad.mul_(scale).masked_fill_(~counts, 0)
        return grad_RV, None, None, None, None, None
