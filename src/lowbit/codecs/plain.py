"""Plain numbers as bytes, for tensors that a format would not make smaller, and for `Cast`."""

from __future__ import annotations

import torch
from torch import Tensor


def write(x: Tensor, dtype: torch.dtype, payload: Tensor) -> None:
    """Fill `payload` (uint8) with the numbers of `x` (contiguous), rounded to `dtype`."""
    y = saturating_cast(x, dtype)
    # Not a view: a single element counts as contiguous with any stride, but cannot then be viewed as bytes.
    payload.copy_(y.as_strided((y.numel(),), (1,)).view(torch.uint8))


def read(payload: Tensor, dtype: torch.dtype, out: Tensor, accumulate: bool) -> None:
    """Write the numbers in `payload` (contiguous) to `out`, or add them to it."""
    if not torch.compiler.is_compiling() and payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()  # a slice of a larger buffer may be unaligned
    y = payload.view(dtype).view(out.shape)
    if accumulate:
        y = out.float() + y.float()
    out.copy_(saturating_cast(y, out.dtype))


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, except that finite values stay finite: they saturate at the largest number of `dtype`."""
    y = x.to(dtype)
    if x.dtype == dtype or dtype == torch.float32 or _fits(x, dtype):
        return y
    return torch.where(y.isinf() & x.isfinite(), y.sign() * torch.finfo(dtype).max, y)


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether no value overflows, by one cheap pass on a CPU; False on a GPU, to avoid synchronization."""
    if x.device.type != "cpu" or not x.numel():
        return False
    low, high = x.aminmax()
    limit = torch.finfo(dtype).max
    return -limit <= float(low) and float(high) <= limit
