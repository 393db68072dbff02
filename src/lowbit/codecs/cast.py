"""`Cast`: the tensor's own numbers in 32 or 16 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.codecs.base import FLOATS, Codec


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """Send each element as a float32, bfloat16 or float16: the baselines.

    Bytes on the wire: 4 or 2 an element. Rounds to nearest, ties to even. Finite values beyond float16's largest
    (65504) become that, so that finite input gives finite output; bfloat16 likewise. Inf and NaN travel as they are.

    Args:
        dtype: what travels.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise ValueError(f"dtype is {self.dtype}; allowed: {', '.join(map(str, FLOATS))}")

    def nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        y = saturating_cast(x, self.dtype)
        # Not by a view: one element counts as contiguous, whatever its stride, but its bytes cannot be looked at then.
        payload.copy_(y.as_strided((y.numel(),), (1,)).view(torch.uint8))

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        if not torch.compiler.is_compiling() and payload.storage_offset() % self.dtype.itemsize:
            payload = payload.clone()  # a part of a larger buffer may start anywhere
        y = payload.view(self.dtype).view(out.shape)
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
