"""Plain numbers as bytes: tensors that no format makes smaller, and those of `Cast`."""

from __future__ import annotations

import torch
from torch import Tensor


def write(x: Tensor, dtype: torch.dtype, payload: Tensor) -> None:
    """Fill `payload` (uint8) with the numbers of `x` (contiguous), rounded to `dtype`."""
    y = saturating_cast(x, dtype)
    # Not by a view: one element counts as contiguous, whatever its stride, but its bytes cannot be looked at then.
    payload.copy_(y.as_strided((y.numel(),), (1,)).view(torch.uint8))


def read(payload: Tensor, dtype: torch.dtype, out: Tensor, accumulate: bool) -> None:
    """Write the numbers in `payload` (contiguous) to `out`, or add them to it."""
    if not torch.compiler.is_compiling() and payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()  # a part of a larger buffer may start anywhere
    y = payload.view(dtype).view(out.shape)
    if accumulate:
        y = out.float() + y.float()
    out.copy_(saturating_cast(y, out.dtype))


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, except that finite values stay finite: they become the largest of `dtype` at most."""
    y = x.to(dtype)
    if x.dtype == dtype or dtype == torch.float32 or _fits(x, dtype):
        return y
    return torch.where(y.isinf() & x.isfinite(), y.sign() * torch.finfo(dtype).max, y)


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether nothing can overflow, by one cheap pass on a CPU; a GPU would have to be waited for, so False there."""
    if x.device.type != "cpu" or not x.numel():
        return False
    low, high = x.aminmax()
    limit = torch.finfo(dtype).max
    return -limit <= float(low) and float(high) <= limit
