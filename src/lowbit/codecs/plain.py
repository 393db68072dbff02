"""Plain numbers as bytes: tensors that no format makes smaller, and those of `Cast`."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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


def check_float(name: str, x: Tensor) -> None:
    """Raise unless `x` is a tensor of a dtype that codecs take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; allowed: a tensor")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: {', '.join(map(str, FLOATS))}")


def check_payload(name: str, payload: Tensor, size: int, device: torch.device) -> None:
    """Raise unless `payload` is so many bytes there."""
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8:
        found = payload.dtype if isinstance(payload, Tensor) else type(payload).__name__
        raise ValueError(f"{name} is {found}; allowed: a uint8 tensor")
    if payload.dim() != 1 or payload.numel() != size:
        raise ValueError(f"{name} has shape {tuple(payload.shape)}; expected one dimension of {size} bytes")
    if payload.device != device:
        raise ValueError(f"{name} is on {payload.device}; expected {device}")


def check_out(out: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raise unless a tensor of this shape can be decoded to `out`."""
    check_float("out", out)
    if out.shape != shape or out.device != device:
        raise ValueError(f"out has shape {tuple(out.shape)} on {out.device}; expected {tuple(shape)} on {device}")
