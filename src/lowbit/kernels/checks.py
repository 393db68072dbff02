"""Checks of operators' arguments, before any backend computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_numbers(x: Tensor, dims: int) -> None:
    """Raise unless this is a contiguous, non-empty floating-point tensor with `dims` dimensions."""
    if x.dtype not in FLOATS:
        raise TypeError(f"tensor has dtype {x.dtype}; allowed: float32, bfloat16, float16")
    if x.dim() != dims or not x.is_contiguous() or x.numel() == 0:
        raise ValueError(f"tensor has shape {tuple(x.shape)}; allowed: {dims}-D, contiguous, not empty")


def check_bytes(name: str, payload: Tensor, nbytes: int, device: torch.device) -> None:
    """Raise unless this is a payload of `nbytes` bytes on the device."""
    if payload.dtype != torch.uint8 or payload.shape != (nbytes,) or not payload.is_contiguous():
        raise ValueError(f"{name} is {payload.dtype} {tuple(payload.shape)}; expected {nbytes} contiguous uint8")
    if payload.device != device:
        raise ValueError(f"{name} is on {payload.device}; the tensor is on {device}")


def check_shapes(shape: Sequence[int], device: torch.device, **tensors: Tensor | None) -> None:
    """Raise unless all tensors (by name) are floating-point, contiguous, non-empty and of this shape; skip None."""
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: float32, bfloat16, float16")
        if x.shape != torch.Size(shape) or not x.is_contiguous() or x.numel() == 0:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, contiguous: {x.is_contiguous()}; "
                f"expected {tuple(shape)}, contiguous, not empty"
            )
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}; expected {device}")


def check_table(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless this is a contiguous tensor of exactly this dtype and shape on the device."""
    if x.dtype != dtype or x.shape != shape or x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, contiguous: {x.is_contiguous()}; "
            f"expected contiguous {dtype} {shape} on {device}"
        )


def check_pair(**tensors: Tensor | None) -> None:
    """Raise unless either all or none of the tensors are None."""
    missing = [name for name, x in tensors.items() if x is None]
    if 0 < len(missing) < len(tensors):
        raise ValueError(f"{missing[0]} is None; allowed: all of {', '.join(tensors)}, or none")
