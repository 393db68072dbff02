"""Examples of `GroupInt` for the tests of all formats."""

import math

import torch

from lowbit.codecs import GroupInt
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.kernels.layout import Layout
from tests.fuzz.targets import EMPTY, SHAPES, SMALL, Decoding, Encoding, Summing, Target
from tests.lowbit.codecs.examples import bytes_of, encoded, of_steps
from tests.lowbit.codecs.golden import frozen

STOCHASTIC = GroupInt(bits=3, group=64, rounding="stochastic")
CODECS = [*(GroupInt(bits=b, group=32, symmetric=b % 2 == 0) for b in range(2, 9)), STOCHASTIC]
GOLDEN = frozen(
    GroupInt(bits=4, group=64),
    GroupInt(bits=6, group=32, symmetric=True),
    GroupInt(bits=3, group=32),
    GroupInt(bits=7, group=16, symmetric=True),
)
KERNELS = [
    *(GroupInt(bits=bits, group=64) for bits in range(2, 9)),
    GroupInt(bits=6, group=32, symmetric=True),
    GroupInt(bits=2, group=8, symmetric=True),
    GroupInt(bits=4, group=24),
    GroupInt(bits=5, group=1000),
]

OPERATORS = {
    "group_int_encode": lambda: (torch.randn(100), bytes_of(GroupInt(bits=5), 100), 5, 64, False, None),
    "group_int_decode": lambda: (encoded(GroupInt(bits=5), 100), torch.empty(100), 5, 64, False, False),
}


def expected_error(codec: GroupInt) -> float:
    return of_steps(codec.bits, codec.rounding)


def layout(codec: GroupInt, shape: tuple[int, ...]) -> Layout:
    return group_int_layout(math.prod(shape), codec.bits, codec.group, codec.symmetric)


def hostile() -> list[Target]:
    found: list[Target] = [Decoding(codec, SHAPES) for codec in KERNELS]
    found += [Encoding(codec, SMALL + EMPTY) for codec in (*KERNELS[::3], STOCHASTIC)]
    return [*found, Summing(GroupInt(), SMALL)]
