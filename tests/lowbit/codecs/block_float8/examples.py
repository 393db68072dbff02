"""Examples of `BlockFloat8` for the tests of all formats."""

import math

import torch

from lowbit.codecs import BlockFloat8
from lowbit.codecs.block_float8.reference import block_float8_layout
from lowbit.kernels.layout import Layout
from tests.fuzz.targets import EMPTY, SHAPES, SMALL, AddingTo, Decoding, Encoding, Summing, Target
from tests.lowbit.codecs.examples import bytes_of, encoded
from tests.lowbit.codecs.golden import frozen

STOCHASTIC = BlockFloat8(rounding="stochastic")
CODECS = [BlockFloat8(), STOCHASTIC, BlockFloat8(format="e5m2", block=96, rounding="stochastic")]
GOLDEN = frozen(BlockFloat8(), BlockFloat8(format="e5m2", block=32))
KERNELS = [BlockFloat8(), BlockFloat8(format="e5m2", block=96), BlockFloat8(block=32)]

OPERATORS = {
    "block_float8_encode": lambda: (torch.randn(100), bytes_of(BlockFloat8(), 100), "e4m3", 128, None, True),
    "block_float8_decode": lambda: (encoded(BlockFloat8(), 100), torch.empty(100), "e4m3", 128, False),
}


def expected_error(codec: BlockFloat8) -> float:
    """At most half a unit in the last place, or a whole one."""
    return 2.0**-4 if codec.format == "e4m3" else 2.0**-2


def layout(codec: BlockFloat8, shape: tuple[int, ...]) -> Layout:
    return block_float8_layout(math.prod(shape), codec.block)


def hostile() -> list[Target]:
    found: list[Target] = [Decoding(codec, SHAPES) for codec in KERNELS]
    found += [kind(codec, SMALL) for codec in (*KERNELS, STOCHASTIC) for kind in (AddingTo, Encoding)]
    return [*found, *(Encoding(codec, EMPTY) for codec in KERNELS), Summing(BlockFloat8(), SMALL)]
