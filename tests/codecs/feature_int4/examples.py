"""Examples of `FeatureInt4` for the tests of all formats."""

from __future__ import annotations

import torch

from lowbit.codecs import FeatureInt4
from lowbit.codecs.feature_int4.reference import feature_int4_layout
from lowbit.kernels.layout import Layout
from tests.codecs.examples import bytes_of, encoded
from tests.codecs.golden import frozen
from tests.fuzz.targets import Decoding, Encoding, Summing, Target


def for_the_sample() -> FeatureInt4:
    """A codec for the golden sample, from integers alone: ranges that some values exceed, five outliers."""
    n = torch.arange(400, dtype=torch.int64)
    ranges = (0.5 + (n * 2654435761 % 97) / 32).view(2, 200)
    return FeatureInt4(ranges=ranges, total=ranges.sum(0), features=(0, 1, 64, 133, 199))


def for_three_ranks(size: int, outliers: tuple[int, ...]) -> FeatureInt4:
    """With ranges that differ."""
    ranges = torch.rand(3, size, generator=torch.Generator().manual_seed(size)) + 0.5
    return FeatureInt4(ranges=ranges, total=ranges.sum(0), features=outliers)


GOLDEN = frozen(for_the_sample())
FEATURES = FeatureInt4(ranges=torch.ones(3, 70), total=torch.ones(70), features=(5, 69))
ORDER = torch.tensor([*(f for f in range(70) if f not in (5, 69)), 5, 69], dtype=torch.int32)
OPERATORS = {
    "feature_int4_encode": lambda: (
        *(torch.randn(3, 70), bytes_of(FEATURES, 3, 70), torch.rand(70), ORDER, 2),
        torch.zeros(1, dtype=torch.int64),
    ),
    "feature_int4_decode": lambda: (
        *(encoded(FEATURES, 3, 70), torch.empty(3, 70), torch.rand(70), ORDER, 2), True,
    ),
    "feature_int4_sum": lambda: (
        [encoded(FEATURES, 3, 70) for _ in range(3)], torch.empty(3, 70), torch.rand(3, 70), ORDER, 2, 3,
    ),
}  # fmt: skip


def layout(codec: FeatureInt4, shape: tuple[int, ...]) -> Layout:
    return feature_int4_layout(torch.Size(shape).numel() // codec.grain, codec.grain, len(codec.features))


def hostile() -> list[Target]:
    found: list[Target] = []
    for size, outliers in ((571, (0, 7, 570)), (33, ()), (1, ()), (70, tuple(range(1, 70))), (64, (63,))):
        codec, shapes = for_three_ranks(size, outliers), [(1, size), (3, size), (2, 3, size), (5 * size,), (0, size)]
        name = f"FeatureInt4({size} features, {len(outliers)} outliers)"
        found += [kind(codec, shapes, name) for kind in (Decoding, Summing, Encoding)]
    return found
