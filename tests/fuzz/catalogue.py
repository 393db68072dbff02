"""Everything that is attacked, with shapes of every kind; a case is made of a seed and a number alone."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Protocol

import torch

from lowbit.codecs import AQSGD, BlockFloat8, Cast, Codec, FeatureInt4, GroupInt, SubspaceQuant, TAHQuant

from .sessions import Differences, Subspace, SubspaceDecoding
from .targets import AddingTo, Case, Decoding, Encoding, Fused, Shape, Summing

SMALL: list[Shape] = [
    (7,), (64,), (1,), (1, 1), (5, 1), (1, 64), (4, 40), (3, 100), (2, 3, 200), (2, 8, 256), (1, 3, 130),
    (40, 10, 16), (300, 8), (2, 2, 2, 72), (33,), (65,),
]  # fmt: skip
"""One dimension, C = 1, ragged last tiles, one token, many."""
EMPTY: list[Shape] = [(0,), (0, 64), (3, 0)]
LARGE: list[Shape] = [(2, 64, 520), (40, 1000)]
"""More than a thread takes alone."""
SHAPES = SMALL * 24 + EMPTY * 4 + LARGE
PUBLISHED = {"high_bits": 4, "low_bits": 3, "high_fraction": 0.8}
TAH = [
    TAHQuant(),
    TAHQuant.published(),
    TAHQuant(pivot_ratio=2.0),
    TAHQuant(high_fraction=0.0, tile=16),
    TAHQuant(allocation="token", **PUBLISHED),
    TAHQuant(allocation="token", tile=32, pivot_ratio=1.5, high_fraction=0.4),
    TAHQuant(allocation="token", tile=8, high_fraction=0.0),
    TAHQuant(allocation="tile", tile=16, high_bits=7, low_bits=6, high_fraction=0.5),
    TAHQuant(allocation="tile", tile=8, high_bits=3, low_bits=2, pivot_ratio=1.5, high_fraction=0.5),
    TAHQuant(tile=128, high_bits=8, low_bits=2, pivot_ratio=2.0, high_fraction=0.5),
    TAHQuant(high_bits=4, low_bits=4, pivot_ratio=2.0),
]
GROUP = [
    *(GroupInt(bits=bits, group=64) for bits in range(2, 9)),
    GroupInt(bits=6, group=32, symmetric=True),
    GroupInt(bits=2, group=8, symmetric=True),
    GroupInt(bits=4, group=24),
    GroupInt(bits=5, group=1000),
]
FLOAT8 = [BlockFloat8(), BlockFloat8(format="e5m2", block=96), BlockFloat8(block=32)]
CASTS = [Cast(dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
STOCHASTIC = [GroupInt(bits=4, group=32, rounding="stochastic"), BlockFloat8(rounding="stochastic")]
SUBSPACE: list[tuple[SubspaceQuant, Shape]] = [
    (SubspaceQuant(directions=4, bits=3, group=16, refresh=2), (6, 40)),
    (SubspaceQuant(directions=8, bits=2, group=8, refresh=1), (100, 8)),
    (SubspaceQuant(directions=1, bits=8, group=64), (2, 2, 100)),
    (SubspaceQuant(directions=32, bits=5, group=24), (9, 96)),
    (SubspaceQuant(directions=1, bits=4, group=8), (400,)),
    (SubspaceQuant(directions=7, bits=6, group=64, refresh=4), (70, 64)),
]


class Target(Protocol):
    """What cases are made for."""

    @property
    def name(self) -> str:
        """A row of the table."""
        ...

    def case(self, rng: random.Random) -> Case:
        """One attack."""
        ...


@functools.cache
def targets(only: str = "") -> list[Target]:
    """Those whose name contains `only`; such as have more ways to go wrong several times."""
    return [target for target in _targets() if only in target.name]


def _targets() -> list[Target]:
    plain: list[Codec] = [*GROUP, *FLOAT8, *CASTS]
    features = [
        (feature_codec(571, (0, 7, 570)), 571), (feature_codec(33, ()), 33), (feature_codec(1, ()), 1),
        (feature_codec(70, tuple(range(1, 70))), 70), (feature_codec(64, (63,)), 64),
    ]  # fmt: skip
    found: list[Target] = [Decoding(codec, SHAPES) for codec in plain]
    found += [Decoding(codec, SHAPES) for codec in TAH] * 3
    for codec, size in features:
        shapes = [(1, size), (3, size), (2, 3, size), (5 * size,), (0, size)]
        name = f"FeatureInt4({size} features, {len(codec.features)} outliers)"
        found += [Decoding(codec, shapes, name), Summing(codec, shapes, f"sum of {name}")]
        found.append(Encoding(codec, shapes, f"encode {name}"))
    for codec in (TAHQuant.published(), GroupInt(), BlockFloat8(), Cast(dtype=torch.bfloat16)):
        found.append(Summing(codec, SMALL, f"sum of {codec!r}"))
    found += [AddingTo(codec, SMALL, f"add to {codec!r}") for codec in (*FLOAT8, STOCHASTIC[1], TAHQuant.published())]
    found += [Subspace(*pair) for pair in SUBSPACE] + [SubspaceDecoding(c, s) for c, s in SUBSPACE if len(s) == 2]
    for inner in (GroupInt(), TAHQuant.published(), BlockFloat8()):
        found.append(Differences(AQSGD(inner=inner), (3, 5, 24)))
    operators = ("norm_recompute", "norm_backward", "gated_recompute", "gated_backward")
    found += [Fused(name, *s) for name, s in itertools.product(operators, ((4, 64), (3, 8), (8, 1000)))]
    encoded = [*TAH, *GROUP[::3], *FLOAT8, *CASTS, *STOCHASTIC]
    return found + [Encoding(codec, SMALL + EMPTY) for codec in encoded]


def feature_codec(size: int, outliers: tuple[int, ...]) -> FeatureInt4:
    """For three ranks, with ranges that differ."""
    ranges = torch.rand(3, size, generator=torch.Generator().manual_seed(size)) + 0.5
    return FeatureInt4(ranges=ranges, total=ranges.sum(0), features=outliers)


def case_of(seed: int, number: int, only: str = "") -> tuple[str, Case, random.Random]:
    """Case `number` of a seed: the target's name, the attack, and the numbers at random that are left.

    Args:
        seed: of all cases. number: which one.
        only: of targets whose name contains this.

    Raises:
        ValueError: there is no such target.
    """
    rng = random.Random((seed << 40) | number)
    chosen = targets(only)
    if not chosen:
        raise ValueError(f"only is {only!r}; allowed: a part of a target's name, such as 'TAHQuant'")
    target = rng.choice(chosen)
    return target.name, target.case(rng), rng
