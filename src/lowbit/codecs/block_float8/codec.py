"""`BlockFloat8`: 8-bit floating-point numbers with one scale for each block of consecutive elements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from lowbit.codecs.base import Summable
from lowbit.codecs.block_float8.reference import block_float8_layout, decode, encode
from lowbit.codecs.checks import check_choice, check_int, draw_seed


@dataclass(frozen=True, kw_only=True)
class BlockFloat8(Summable):
    """8-bit floats, E4M3 or E5M2, with a power-of-two scale for each block of consecutive elements.

    This is AGoQ's format (arXiv 2605.00539) for gradients in memory and in their all-reduce. The paper does not specify
    its scales; ours are powers of two that take one byte.

    Bytes of a payload, for n elements in g = ceil(n / block) blocks: n (codes), 0 to 15 (up to a multiple of 16) and
    g (scales): 8.0625 bits an element at blocks of 128.

    A scale s means 2^(s - 127), as in OCP's MX formats. It is the smallest for which the block's largest magnitude is
    at most the format's (448 for E4M3, 57344 for E5M2), 1 <= s <= 254 - top with top = 8 or 15.
    code = fp8(x 2^(127 - s)), y = fp8 number * 2^(s - 127). Both products are exact, so a number is rounded once, to 4
    significant bits (E4M3) or 3 (E5M2), and decoded numbers are encoded again without a further error. Magnitudes
    beyond 1.75 * 2^127 saturate; up to 2^-136 (E4M3) or 2^-143 (E5M2) they become 0. A block that is all zero decodes
    to exact zeros; one that holds NaN or Inf (scale 255, codes 0) decodes to NaN. Codes are those of
    torch.float8_e4m3fn and torch.float8_e5m2, so other programs can read them. A payload of zeros decodes to zeros.
    Any bytes are valid, and none is a count or an offset, so that the check of the length is all that decoding needs.

    bfloat16 scales (maximum / 448, blocks twice as long for the same bits) give about the same error on real gradients,
    0.0261 compared with 0.0265 relative (on sums of 64, 0.0263 and 0.0261), but requantizing a sum then changes its
    whole block. `GroupInt(bits=8, symmetric=True)` has a fifth of this error in the Euclidean norm, which large
    elements dominate, but loses small elements next to large ones.

    Args:
        format: "e4m3" (numbers down to 1/28672 of a block's largest with 4 significant bits) or "e5m2" (to
            1/939524096 with 3).
        block: elements for each scale, a multiple of 32 from 32 to 65536.
        rounding: "nearest" (ties to even), or "stochastic", whose error is zero on average: for sums of more than about
            30 parts, where nearest loses the later ones (random numbers follow PyTorch's default generator).
    """

    payload_version: ClassVar[int] = 2

    format: str = "e4m3"
    block: int = 128
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_choice("format", self.format, ("e4m3", "e5m2"))
        check_int("block", self.block, 32, 65536, multiple=32)
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))

    @property
    def unit(self) -> int:
        return self.block

    def sections(self, numel: int) -> list[tuple[int, int]]:
        layout = block_float8_layout(numel, self.block)
        return [(layout.offsets[name], size) for name, size in layout.sizes.items()]

    def nearest(self) -> "BlockFloat8":
        return replace(self, rounding="nearest")

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return block_float8_layout(math.prod(shape), self.block).nbytes

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        encode(x.view(-1), payload, self.format, self.block, draw_seed(self.rounding, x.device), False)

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        decode(payload, out.view(-1), self.format, self.block, accumulate)

    def _add(self, payload: Tensor, x: Tensor) -> None:
        encode(x.view(-1), payload, self.format, self.block, draw_seed(self.rounding, x.device), True)


SHORT_NAMES = {"fp8": BlockFloat8, "fp8-e5m2": partial(BlockFloat8, format="e5m2")}
