"""Examples of `FeatureInt` for the tests of all formats."""

import torch

from lowbit.codecs import FeatureInt
from lowbit.codecs.feature_int.reference import feature_int_layout
from lowbit.kernels.layout import Layout
from tests.fuzz.targets import Decoding, Encoding, Summing, Target
from tests.lowbit.codecs.examples import bytes_of, encoded
from tests.lowbit.codecs.golden import frozen


def for_the_sample(bits: int, gain: str) -> FeatureInt:
    """A codec for the golden sample, from integers alone: ranges that some values exceed, five outliers, means."""
    n = torch.arange(400, dtype=torch.int64)
    ranges = (0.5 + (n * 2654435761 % 97) / 32).view(2, 200)
    offsets = ((n * 2654435761 % 31 - 15) / 64).view(2, 200)
    return FeatureInt(
        bits=bits, gain=gain, ranges=ranges, total=ranges.sum(0), offsets=offsets, total_offset=offsets.sum(0),
        features=(0, 1, 64, 133, 199),
    )  # fmt: skip


def for_three_ranks(size: int, outliers: tuple[int, ...], bits: int = 4, gain: str = "token") -> FeatureInt:
    """With ranges and means that differ."""
    g = torch.Generator().manual_seed(size)
    ranges, offsets = torch.rand(3, size, generator=g) + 0.5, torch.randn(3, size, generator=g)
    return FeatureInt(
        bits=bits, gain=gain, ranges=ranges, total=ranges.sum(0), offsets=offsets, total_offset=offsets.sum(0),
        features=outliers,
    )  # fmt: skip


GOLDEN = frozen(
    *(for_the_sample(bits, gain) for bits, gain in ((4, "token"), (4, "static"), (5, "token"), (8, "token")))
)
FEATURES = FeatureInt(bits=5, ranges=torch.ones(3, 70), total=torch.ones(70), features=(5, 69))
ORDER = torch.tensor([*(f for f in range(70) if f not in (5, 69)), 5, 69], dtype=torch.int32)
OPERATORS = {
    "feature_int_encode": lambda: (
        *(torch.randn(3, 70), bytes_of(FEATURES, 3, 70), torch.rand(70), torch.randn(70), ORDER, 2),
        *(5, 0.1, True),
    ),
    "feature_int_decode": lambda: (
        *([encoded(FEATURES, 3, 70) for _ in range(3)], torch.empty(3, 70), torch.rand(3, 70), torch.randn(70)),
        *(ORDER, 2, 5, 0.0, 3, True),
    ),
}  # fmt: skip


def layout(codec: FeatureInt, shape: tuple[int, ...]) -> Layout:
    rows = torch.Size(shape).numel() // codec.grain
    return feature_int_layout(rows, codec.grain, len(codec.features), codec.bits, codec.gain == "token")


def hostile() -> list[Target]:
    found: list[Target] = []
    for size, outliers, bits, gain in (
        (571, (0, 7, 570), 4, "token"), (571, (0, 7, 570), 7, "token"), (33, (), 8, "token"), (1, (), 4, "token"),
        (70, tuple(range(1, 70)), 5, "token"), (64, (63,), 3, "static"), (300, (2,), 6, "token"),
    ):  # fmt: skip
        codec, shapes = for_three_ranks(size, outliers, bits, gain), [(1, size), (3, size), (2, 3, size), (5 * size,)]
        name = f"FeatureInt({bits} bits, {gain} gain, {size} features, {len(outliers)} outliers)"
        found += [kind(codec, [*shapes, (0, size)], name) for kind in (Decoding, Summing, Encoding)]
    return found
