"""`TAHQuant`: tile-wise adaptive bits with Hadamard outlier suppression, for activations between pipeline stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from lowbit.codecs.base import Summable
from lowbit.codecs.checks import check_choice, check_int
from lowbit.codecs.tah_quant.reference import TAHGeometry, decode, encode, tah_geometry
from lowbit.escape import shown


@dataclass(frozen=True, kw_only=True)
class TAHQuant(Summable):
    """Quantize each tile of a token's channels in one of two bit widths, chosen from its values (arXiv 2506.01352).

    `TAHQuant()` is our setting: bits by range, nearly every tile rotated, metadata by octaves. `TAHQuant.published()`
    is the paper's: bits by entropy of tiles (its v2) or of tokens (v1), tiles with a pivot rotated, metadata in
    float16. All take 4 bits for 80 % and 3 for the others. Results of our setting are not results of the paper.

    The tensor is (..., S, C): S tokens of C channels in each sequence; one dimension counts as one token. Each token's
    channels are cut into tiles of `tile`. `floor((1 - high_fraction) * candidates)` of them get `low_bits`:

    - allocation "token" (the paper's v1): in each sequence, the tokens of lowest entropy of p = |x| / sum|x|;
    - "tile" (v2): in each token, the tiles of lowest entropy;
    - "range" (ours, the default): the tiles of smallest range among up to 256 tiles of consecutive tokens, so that all
      tiles come near to one step size. (Choosing among all tiles of a sequence is no better, and takes a second pass
      over the tensor.)

    With a `pivot_ratio`, a tile whose largest |x| is at least that many times its second has it swapped to the front
    and is rotated by the normalised Walsh-Hadamard transform, which turns it into a constant offset. By default (ratio
    1.001) that is every tile whose largest |x| is not tied: real weights have outlier channels in most tiles, and a
    rotation spreads the error of the others evenly, too. A ratio of 1.5 or None is faster and errs more.

    Each tile is then quantized, with min and max, at most 2^126 in magnitude, taken after its rotation:

    - metadata "float16" (the paper's): scale = (max - min) / (2^bits - 1), code = round((x - min) / scale),
      y = code float16(scale) + float16(min). Rounding min moves a rotated tile as a whole, an error of its pivot alone.
      Beyond 65504 both saturate, and numbers below 6e-8 are lost; a tile with NaN or Inf has min NaN and scale 0.
    - "octaves" (ours): half = (max - min) / 2, mid = (max + min) / 2, step = 2 half / 2^bits,
      code = round(x (1 / step) + (2^bits - 1) / 2 - mid / step), y = ((code - (2^bits - 1) / 2) + mid / step) step.
      Levels are in the middles of 2^bits equal cells of [min, max], and codes relative to parameters as they are sent.
      A pivot is left out of the rotation, and its part of mid added. Where mid is beyond 128 ranges, the pivot is sent
      *apart*: in place of mid, within 2^-10 of itself, so that tiny numbers next to it keep their precision (float32's
      digits would end at a ratio of 10^7). Without a pivot, such a mid widens the cells. A tile whose range a rotation
      would more than double is not rotated.

    Payload, sections at multiples of 16 bytes, for R tokens of T tiles:

    - exponents, R bytes: float32 exponent of the token's largest step; none with "float16";
    - scales, R T bytes: how many sixteenths of an octave each tile's step lies below its top; 255: all zero.
      With "float16": R T scales;
    - mids, R T int8 in 1/64 (with pivots: int16 in 1/256) of a range; the lowest value: tile of NaN. Of a pivot apart:
      its sign, and 15 bits: 2048 + how far float32's bits of |pivot| lie above those of the step, in 2^14.
      With "float16": R T minima;
    - pivots, R T bytes if there is a `pivot_ratio`: 0; 1 + position: apart, or with "float16"; 129 + position: with a
      middle (the last of 128 positions is always apart);
    - widths: a bitmap of each scope's candidates, 1 for `low_bits`, in whole bytes;
    - codes: tile after tile in bit planes as in `GroupInt`; a ragged last tile takes a multiple of 8 elements.

    Damaged payloads never cause accesses outside payload or tensor, and every backend decodes them alike. A scope whose
    bitmap has a wrong number of ones among its candidates decodes to NaN; so does a tile with a pivot that it cannot
    have. Other changed bytes give other numbers, possibly Inf; bits after a bitmap's last candidate are ignored.

    At C = 4096 that is 4.32 bits for `TAHQuant()`, and as published 4.45 (v2) and 4.43 (v1).

    Deviations of `published()` from the paper: (1) float16 saturates instead of becoming Inf; (2) a tile with NaN or
    Inf decodes to NaN; (3) any C, any leading dimensions, a ragged last tile; (4) entropy is computed from 15-bit
    magnitudes, so that every backend agrees on every bit; (5) flag and position take a byte for each tile, not 7 bits.
    Codes relative to a scale and a minimum that are rounded first would be worse: next to a pivot of 400,000, the
    others would err by 0.74 of their deviation and not by 0.19.

    Args:
        tile: channels of a tile: 8, 16, 32, 64 or 128.
        high_bits, low_bits: 2 to 8, `low_bits <= high_bits`.
        high_fraction: share of the candidates that get `high_bits`, 0 to 1.
        pivot_ratio: more than 1, or None for no rotation.
        allocation: "range", "tile" or "token".
        metadata: "octaves" or "float16".
    """

    payload_version: ClassVar[int] = 4
    shaped: ClassVar[bool] = True

    tile: int = 64
    high_bits: int = 4
    low_bits: int = 3
    high_fraction: float = 0.8
    pivot_ratio: float | None = 1.001
    allocation: str = "range"
    metadata: str = "octaves"

    def __post_init__(self) -> None:
        check_int("tile", self.tile, 8, 128)
        if self.tile & (self.tile - 1):
            raise ValueError(f"tile is {self.tile}; allowed: powers of two from 8 to 128")
        check_int("high_bits", self.high_bits, 2, 8)
        check_int("low_bits", self.low_bits, 2, self.high_bits)
        fraction, ratio = self.high_fraction, self.pivot_ratio
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(f"high_fraction is {shown(fraction)}; allowed: 0 to 1")
        if ratio is not None and not (isinstance(ratio, int | float) and 1 < ratio < math.inf):
            raise ValueError(f"pivot_ratio is {shown(ratio)}; allowed: more than 1, or None")
        object.__setattr__(self, "high_fraction", float(fraction))
        object.__setattr__(self, "pivot_ratio", None if ratio is None else float(ratio))
        check_choice("allocation", self.allocation, ("range", "tile", "token"))
        check_choice("metadata", self.metadata, ("octaves", "float16"))

    @classmethod
    def published(cls, *, allocation: str = "tile") -> "TAHQuant":
        """Return the paper's format: tiles of 64, 4 bits for 80 % and 3 for others, pivots from ratio 2, float16.

        Args:
            allocation: "tile" as in the paper's v2, or "token" as in its v1.

        Raises:
            ValueError: another allocation.
        """
        check_choice("allocation", allocation, ("tile", "token"))
        return cls(pivot_ratio=2.0, allocation=allocation, metadata="float16")

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self.geometry(shape).layout.nbytes if math.prod(shape) else 0

    def geometry(self, shape: Sequence[int]) -> TAHGeometry:
        """Compute the sizes of a payload."""
        return tah_geometry(_folded(shape), *self._settings, self.pivot_ratio)

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        encode(x.view(_folded(x.shape)), payload, *self._settings, self.pivot_ratio)

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        decode(payload, out.view(_folded(out.shape)), *self._settings, self.pivot_ratio is not None, accumulate)

    @property
    def _settings(self) -> tuple[int, int, int, float, str, bool]:
        float16 = self.metadata == "float16"
        return self.tile, self.high_bits, self.low_bits, 1 - self.high_fraction, self.allocation, float16


def _folded(shape: Sequence[int]) -> tuple[int, int, int]:
    """Fold any shape to (sequences, length, channels)."""
    padded = (1, 1, 1, *shape)
    return math.prod(padded[:-2]), padded[-2], padded[-1]


SHORT_NAMES = {
    "tah-quant": TAHQuant,
    "tah-quant-published": TAHQuant.published,
    "tah-quant-published-token": partial(TAHQuant.published, allocation="token"),
}
