"""`Cast`: plain floating-point numbers in 32 or 16 bits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.codecs.base import Summable, read_plain, write_plain
from lowbit.codecs.checks import FLOATS
from lowbit.escape import shown


@dataclass(frozen=True, kw_only=True)
class Cast(Summable):
    """Send each element as float32, bfloat16 or float16: the baselines.

    Bytes of a payload: 4 or 2 per element, as requested: float32 doubles a bfloat16 tensor. Rounds to nearest, ties to
    even. Finite values saturate at float16's largest (65504), so that finite input gives finite output; bfloat16
    likewise. Inf and NaN are sent unchanged.

    Args:
        dtype: dtype of the numbers in a payload.
    """

    is_plain: ClassVar[bool] = True

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise ValueError(f"dtype is {shown(self.dtype)}; allowed: {', '.join(map(str, FLOATS))}")

    def for_gradients(self) -> "Cast":
        return self

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def sized(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[int, bool]:
        return self.format_nbytes(shape), False  # larger than a 16-bit tensor for float32, as requested

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        write_plain(x, self.dtype, payload)

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        read_plain(payload, self.dtype, out, accumulate)


SHORT_NAMES = {
    "fp32": partial(Cast, dtype=torch.float32),
    "bf16": partial(Cast, dtype=torch.bfloat16),
    "fp16": partial(Cast, dtype=torch.float16),
}
