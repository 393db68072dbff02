"""Formats of partial sums, as plain PyTorch, that `python -m benchmarks sums` compares on the same captures.

Each rounds the partial sums of one boundary: calibrated from captures of other text, with the same outlier features in
bfloat16 (the E/64 with the largest range aggregated over the ranks), except where it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.codecs import FeatureInt
from lowbit.tensor_parallel.calibration import SHARE

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of a token's largest magnitude among which the gain is searched."""
LEVELS = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326])
"""The 16 levels with the least squared error for a Gaussian of variance 1 (Lloyd, Max), positive half."""
_TINY = 1e-30


def to_bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.bfloat16().float()


def to_grid(x: Tensor, step: Tensor, limit: int) -> Tensor:
    """Round to multiples of `step` from -limit to limit."""
    step = step.clamp(min=_TINY)
    return (x / step).round().clamp(-limit, limit) * step


class Format:
    """The paper's: INT4 with a static scale for each feature and rank.

    Args:
        captures: of each rank, and of their sum last, float32 (sequences, tokens, E).
    """

    bits, widening = 4, 1.0
    per_token = 0  # bits sent with each token

    def __init__(self, captures: Sequence[Tensor]) -> None:
        self.width = captures[0].shape[-1]
        lows, highs = ([getattr(c, side)(1).mean(0) for c in captures] for side in ("amin", "amax"))
        self.lows, self.highs = lows, highs
        self.ranges = [torch.maximum(low.abs(), high.abs()) for low, high in zip(lows, highs, strict=True)]
        aggregated = sum((r.square() for r in self.ranges[:-1]), torch.zeros(self.width))
        self.rest = torch.ones(self.width, dtype=torch.bool)
        self.rest[aggregated.topk(self.width // SHARE).indices] = False
        self.fit(captures)

    def fit(self, captures: Sequence[Tensor]) -> None:
        """Calibrate further."""

    @property
    def bits_per_value(self) -> float:
        """Bits per value, with outliers and whatever is sent with each token."""
        rest = int(self.rest.sum())
        return (self.bits * rest + 16 * (self.width - rest) + self.per_token) / self.width

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        """Return what a receiver decodes of a rank's partial sums (tokens, E); rank -1: of the sum."""
        y = to_bfloat16(x)
        y[..., self.rest] = self.code(x[..., self.rest], rank)
        return y

    def code(self, x: Tensor, rank: int) -> Tensor:
        """Round the features that are not outliers."""
        return to_grid(x, self.ranges[rank][self.rest] / 7 * self.widening, 7)


class Widened(Format):
    """Ranges times 1.2."""

    widening = 1.2


class ZeroPoint(Format):
    """A static zero point."""

    def code(self, x: Tensor, rank: int) -> Tensor:
        low, high = self.lows[rank][self.rest], self.highs[rank][self.rest]
        step = ((high - low) / 15).clamp(min=_TINY)
        return ((x - low) / step).round().clamp(0, 15) * step + low


class Gain(Format):
    """A gain for each token in bfloat16 times a static scale for each feature: the gain of the least squared error."""

    per_token, centred = 16, False

    def fit(self, captures: Sequence[Tensor]) -> None:
        """Measure means and scales: root mean squares, with each token as large as any other."""
        self.means, self.scales = [], []
        for capture in captures:
            tokens = capture.flatten(0, 1)
            mean = tokens.mean(0) if self.centred else torch.zeros(self.width)
            tokens = tokens - mean
            scale = tokens.square().mean(0).sqrt().clamp(min=_TINY)
            for _ in range(2):
                gains = (tokens / scale)[:, self.rest].square().mean(1, keepdim=True).sqrt().clamp(min=_TINY)
                scale = (tokens / gains).square().mean(0).sqrt().clamp(min=_TINY)
            self.means.append(mean)
            self.scales.append(scale)

    def code(self, x: Tensor, rank: int) -> Tensor:
        mean, scale = self.means[rank][self.rest], self.scales[rank][self.rest]
        return self.normal((x - mean) / scale, scale) * scale + mean

    def normal(self, x: Tensor, weight: Tensor) -> Tensor:
        """Round values that the static scale has made alike; `weight`: what their errors are multiplied by."""
        limit, largest = 2 ** (self.bits - 1) - 1, x.abs().amax(-1, keepdim=True)
        best, least = torch.zeros_like(x), torch.full_like(largest, math.inf)
        for clip in CLIPS if self.bits == 4 else CLIPS[:1]:
            y = to_grid(x, to_bfloat16(largest * (clip / limit)), limit)
            error = ((y - x) * weight).square().sum(-1, keepdim=True)
            best, least = torch.where(error < least, y, best), torch.minimum(error, least)
        return best


class CentredGain(Gain):
    """The same, after the static mean of each feature is subtracted."""

    centred = True


class Gaussian(CentredGain):
    """The same with the 16 best levels for a Gaussian, and the root mean square of the token as its gain."""

    def normal(self, x: Tensor, weight: Tensor) -> Tensor:
        gain = to_bfloat16(x.square().mean(-1, keepdim=True).sqrt()).clamp(min=_TINY)
        levels = torch.cat([-LEVELS.flip(0), LEVELS])
        return levels[torch.bucketize(x / gain, (levels[1:] + levels[:-1]) / 2)] * gain


class Gain8(Gain):
    """Codes of 8 bits."""

    bits = 8


class Groups(Format):
    """A bfloat16 scale for each token and 64 features."""

    def __init__(self, captures: Sequence[Tensor]) -> None:
        super().__init__(captures)
        self.per_token = 16 * math.ceil(int(self.rest.sum()) / 64)

    def code(self, x: Tensor, rank: int) -> Tensor:
        padded = F.pad(x, (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
        step = to_bfloat16(padded.abs().amax(-1, keepdim=True) / 7)
        return to_grid(padded, step, 7).flatten(-2)[..., : x.shape[-1]]


class Int8(Format):
    """INT8 with a bfloat16 scale for each token and 64 features, without outliers."""

    bits = 8

    def __init__(self, captures: Sequence[Tensor]) -> None:
        super().__init__(captures)
        self.rest[:] = True
        self.per_token = 16 * math.ceil(self.width / 64)

    def code(self, x: Tensor, rank: int) -> Tensor:
        padded = F.pad(x, (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
        return to_grid(padded, to_bfloat16(padded.abs().amax(-1, keepdim=True) / 127), 127).flatten(-2)[
            ..., : x.shape[-1]
        ]


class Ours4(Format):
    """`FeatureInt`: a gain from the largest magnitude of the token, static ranges around the mean."""

    per_token, clips = 16, (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)

    def fit(self, captures: Sequence[Tensor]) -> None:
        """Choose where codes end by the least squared error, as `lowbit.tensor_parallel.calibrate` does."""
        parts = [capture.flatten(0, 1) for capture in captures[:-1]]
        candidates = [FeatureInt.fit(parts, bits=self.bits, clip=clip) for clip in self.clips]

        def error(codec: FeatureInt) -> float:
            return sum(float((codec.part(r).round_trip(x) - x).square().sum()) for r, x in enumerate(parts))

        self.codec = min(candidates, key=error)

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return (self.codec.whole() if rank < 0 else self.codec.part(rank)).round_trip(x)


class Ours5(Ours4):
    """In 5 bits."""

    bits = 5


class Ours8(Ours4):
    """In 8 bits."""

    bits = 8


def inputs_in_8_bits(x: Tensor) -> Tensor:
    """Round a layer's inputs (tokens, features of a rank) to INT8 with a bfloat16 scale for each token."""
    return to_grid(x, to_bfloat16(x.abs().amax(-1, keepdim=True) / 127), 127)


FORMATS: dict[str, type[Format]] = {
    "static": Format,
    "static-1.2": Widened,
    "zero-point": ZeroPoint,
    "gain": Gain,
    "gain-mean": CentredGain,
    "gaussian": Gaussian,
    "groups-64": Groups,
    "int8": Int8,
    "gain-8": Gain8,
    "feature-int4": Ours4,
    "feature-int5": Ours5,
    "feature-int8": Ours8,
}
MIXED = "mixed"
INPUTS = "inputs"
CANDIDATES = (*FORMATS, MIXED, INPUTS)


def summed(form: Format, partials: Sequence[Tensor], algorithm: str) -> Tensor:
    """Return the sum that the ranks get: of coded partial sums, and with two_shot coded once more."""
    total = sum((form(x, rank) for rank, x in enumerate(partials)), torch.zeros_like(partials[0]))
    return form(total, -1) if algorithm == "two_shot" else total


def distortion(variances: Tensor, bits: float) -> float:
    """Return the least mean squared error of Gaussian components at so many bits each (reverse water-filling)."""
    low, high = 0.0, float(variances.max())
    for _ in range(100):
        level = (low + high) / 2
        rate = float((variances / level).clamp(min=1).log2().mean()) / 2 if level else math.inf
        low, high = (level, high) if rate > bits else (low, level)
    return float(variances.clamp(max=high).mean())
