"""`GroupInt`: uniform integers with one scale for each group of consecutive elements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from lowbit.codecs.base import Summable
from lowbit.codecs.checks import check_choice, check_int, draw_seed
from lowbit.codecs.group_int.reference import decode, encode, group_int_layout


@dataclass(frozen=True, kw_only=True)
class GroupInt(Summable):
    """Integers of 2 to 8 bits, with one scale for each group of consecutive elements.

    It is the naive baseline forward (4 bits, groups of 64), the pipeline's backward format (6 bits, groups of 32,
    symmetric: gradients centre on zero, so a second parameter gains nothing) and the format of saved activations.

    Bytes of a payload, for n elements in g = ceil(n / group) groups: 2 g (scales, bfloat16) + 2 g unless symmetric
    (mids, int16) + ceil(n / 8) * bits (codes). Sections start at multiples of 16 bytes.

    Asymmetric, with N = 2^bits - 1:  scale = bf16((max - min) / N), mid = round((max + min) / 2 / scale / u) in units
    of u = 2^bits / 256 steps, code = round(x (1 / scale) + (N/2 - mid u)), y = ((code - N/2) + mid u) scale.
    Symmetric, with N = 2^(bits-1) - 1: scale = bf16(max|x| / N), code = round(x (1 / scale) + N), y = (code - N) scale.
    Codes are computed from the parameters as they are sent. Scales are bfloat16 because gradients are tiny: float16
    scales underflow below 6e-8. Magnitudes beyond 2^126 saturate. A group that is all zero decodes to exact
    zeros; one that holds NaN or Inf decodes to NaN.

    Codes are packed in bit planes of 4, 2 and 1 bits (3 bits: a plane of 2 and one of 1), for each group separately:
    byte j of a plane of p bits and w bytes holds elements j, j + w, j + 2 w, ... from its low bits up.

    Args:
        bits: 2 to 8.
        group: elements for each scale, a multiple of 8 from 8 to 65536.
        symmetric: zero is in the middle of the range and exact; otherwise the range is [min, max].
        rounding: "nearest" (ties to even), or "stochastic", whose error is zero on average (its random numbers
            follow PyTorch's default generator, so `torch.manual_seed` repeats them, unless others draw from it while an
            asynchronous collective runs).
    """

    payload_version: ClassVar[int] = 3

    bits: int = 4
    group: int = 64
    symmetric: bool = False
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 2, 8)
        check_int("group", self.group, 8, 65536, multiple=8)
        check_choice("symmetric", self.symmetric, (False, True))
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))

    def nearest(self) -> "GroupInt":
        return replace(self, rounding="nearest")

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return group_int_layout(math.prod(shape), self.bits, self.group, self.symmetric).nbytes

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        seed = draw_seed(self.rounding, x.device)
        encode(x.view(-1), payload, self.bits, self.group, self.symmetric, seed)

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        decode(payload, out.view(-1), self.bits, self.group, self.symmetric, accumulate)


SHORT_NAMES = {f"int{bits}": partial(GroupInt, bits=bits, group=64) for bits in range(2, 9)}
