"""Examples of `TAHQuant` for the tests of all formats."""

import dataclasses

import torch

from lowbit.codecs import TAHQuant
from lowbit.kernels.layout import Layout
from tests.fuzz.targets import EMPTY, SHAPES, SMALL, AddingTo, Decoding, Encoding, Summing, Target
from tests.lowbit.codecs.examples import bytes_of, encoded, of_steps
from tests.lowbit.codecs.golden import frozen

PLAIN = TAHQuant(high_bits=5, low_bits=4, high_fraction=0.12, pivot_ratio=None)  # by range without rotation
CODECS = [TAHQuant(), TAHQuant.published(), TAHQuant(allocation="token", high_fraction=0.5, low_bits=2, tile=32)]
GOLDEN = frozen(TAHQuant(), TAHQuant.published(), PLAIN, dataclasses.replace(PLAIN, allocation="token", tile=32))
BY_TOKEN = TAHQuant(pivot_ratio=None, allocation="token")
KERNELS = [
    TAHQuant(),
    TAHQuant.published(),
    PLAIN,
    dataclasses.replace(PLAIN, pivot_ratio=2.0),
    TAHQuant(high_fraction=0.0, tile=16, pivot_ratio=None),
    BY_TOKEN,
    TAHQuant(allocation="token", tile=32, pivot_ratio=1.5, high_fraction=0.4),
    TAHQuant(allocation="token", tile=8, high_fraction=0.0, pivot_ratio=None),
    TAHQuant(allocation="tile", tile=16, high_bits=7, low_bits=6, high_fraction=0.5, pivot_ratio=None),
    TAHQuant(allocation="tile", tile=8, high_bits=3, low_bits=2, pivot_ratio=1.5, high_fraction=0.5),
    TAHQuant(tile=128, high_bits=8, low_bits=2, pivot_ratio=2.0, high_fraction=0.5),
    TAHQuant(high_bits=4, low_bits=4, pivot_ratio=2.0),
    TAHQuant.published(allocation="token"),
    TAHQuant(tile=16, pivot_ratio=None, metadata="float16"),
]
GPU = [
    *KERNELS[:2],
    *KERNELS[5:7],
    *KERNELS[-2:],
    TAHQuant(tile=8, high_bits=3, low_bits=2, pivot_ratio=1.5, high_fraction=0.5),
]
"""For Triton's interpreter, which is slow."""

SETTINGS = (64, 4, 3, 1 - 0.8, "range", False)  # of TAHQuant() for operators
OPERATORS = {
    "tah_quant_encode": lambda: (torch.randn(2, 3, 70), bytes_of(TAHQuant(), 2, 3, 70), *SETTINGS, 1.001),
    "tah_quant_decode": lambda: (encoded(TAHQuant(), 2, 3, 70), torch.empty(2, 3, 70), *SETTINGS, True, False),
}


def expected_error(codec: TAHQuant) -> float:
    return of_steps(codec.low_bits)


def layout(codec: TAHQuant, shape: tuple[int, ...]) -> Layout:
    return codec.geometry(shape).layout


def hostile() -> list[Target]:
    found: list[Target] = [Decoding(codec, SHAPES) for codec in KERNELS] * 3  # it has more ways to go wrong
    found += [Encoding(codec, SMALL + EMPTY) for codec in KERNELS]
    return [*found, Summing(TAHQuant.published(), SMALL), AddingTo(TAHQuant.published(), SMALL)]
