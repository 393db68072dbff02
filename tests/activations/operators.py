"""What tests of the operators for backward from quantized inputs share: tensors with guards, backends, comparisons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.activations  # noqa: F401, declares operators
from lowbit.codecs import GroupInt
from lowbit.codecs.group_int.reference import group_int_layout

GUARD = 64
BACKENDS = ["cpu", "gpu"]  # in Triton's interpreter where there is no GPU


def device_of(backend: str) -> str:
    if backend == "gpu":
        pytest.importorskip("triton")
    return "cuda" if backend == "gpu" and torch.cuda.is_available() else "cpu"


class Guarded:
    """Tensors for an operator to write, each amid a buffer that it must not touch."""

    def __init__(self, device: str) -> None:
        self.device, self.buffers = device, []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * GUARD,), 77, dtype=dtype, device=self.device)
        self.buffers.append((buffer, count))
        return buffer[GUARD : GUARD + count].view(shape)

    def payload(self, count: int, bits: int, group: int) -> Tensor:
        return self.empty((group_int_layout(count, bits, group, False).nbytes,), torch.uint8)

    def check(self) -> None:
        for buffer, count in self.buffers:
            assert (buffer[:GUARD] == 77).all()
            assert (buffer[GUARD + count :] == 77).all()


def hard(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of very different sizes, outliers, denormals, and a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape[0], 1, generator=g))
    x[0] *= 1e-38
    x[-1] = 0
    x.view(-1)[::50] *= -100
    return x.to(dtype)


def close(found: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Within a bound for float32, and a step of narrower types; finite where the other is."""
    a, b = found.double(), expected.double()
    assert torch.equal(a.isfinite(), b.isfinite())
    step = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
    least = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
    allowed = bound + b.abs() * step[found.dtype] + least[found.dtype]
    excess = torch.where(b.isfinite(), (a - b).abs() - allowed, 0)
    assert (excess <= 0).all(), f"{excess.max()} too far, of {b[b.isfinite()].abs().max()}"


def decoded_by(codec: GroupInt, payload: Tensor, shape: Any) -> Tensor:
    """What kernels have written, of any size: a codec by itself sends the smallest tensors as they are."""
    out = torch.empty(shape, device=payload.device)
    codec._decode(payload, out, False)
    return out
