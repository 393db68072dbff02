"""Examples of `SubspaceQuant` for the tests of all formats."""

from __future__ import annotations

from functools import partial

import torch

from lowbit import kernels
from lowbit.codecs import SubspaceQuant
from lowbit.codecs.subspace_quant.layout import subspace_geometry
from lowbit.codecs.subspace_quant.reference import coefficients_encode, rest_encode
from lowbit.kernels.layout import Layout
from tests.codecs.golden import sample
from tests.fuzz.sessions import Subspace, SubspaceDecoding
from tests.fuzz.targets import Shape, Target

MESSAGES: list[tuple[SubspaceQuant, Shape]] = [
    (SubspaceQuant(directions=4, bits=3, group=16, refresh=2), (6, 40)),
    (SubspaceQuant(directions=8, bits=2, group=8, refresh=1), (100, 8)),
    (SubspaceQuant(directions=1, bits=8, group=64), (2, 2, 100)),
    (SubspaceQuant(directions=32, bits=5, group=24), (9, 96)),
    (SubspaceQuant(directions=1, bits=4, group=8), (400,)),
    (SubspaceQuant(directions=7, bits=6, group=64, refresh=4), (70, 64)),
    (SubspaceQuant(), (40, 130)),
]


def fixed_message(bits: int) -> bytes:
    """What the operators of `SubspaceQuant` fill of the sample's payload, given directions from integers alone.

    The codec's own payloads depend on how a machine sums up products; these do not.
    """
    x = sample().view(10, 200)
    c, unit = x[:, 3:12].contiguous(), x[2, :9].abs().bfloat16().float()
    n = torch.arange(1890, dtype=torch.int64) * 2654435761 % 4294967296
    # Integers, and sixteenths: their sums of products are exact in any order.
    share, directions = ((n[:90].view(10, 9) % 5 - 2).float(), (n[90:1890].view(9, 200) % 17) / 16 - 0.5)
    geo = subspace_geometry(10, 200, 9, bits, group=48, refresh=4)  # a ragged last group of 8
    payload, coded = torch.zeros(geo.layout.nbytes, dtype=torch.uint8), torch.empty_like(c)
    kernels.implementation(coefficients_encode, x.device)(c, unit, payload, coded, geo)
    kernels.implementation(rest_encode, x.device)(x, share, directions, payload, geo)
    return payload.numpy().tobytes()


GOLDEN = [(f"subspace-{bits}.bin", partial(fixed_message, bits)) for bits in (2, 3, 4, 6)]


def layout(codec: SubspaceQuant, shape: tuple[int, ...]) -> Layout:
    return codec.geometry(shape).layout


def hostile() -> list[Target]:
    return [
        *(Subspace(*pair) for pair in MESSAGES),
        *(SubspaceDecoding(codec, shape) for codec, shape in MESSAGES if len(shape) == 2),
    ]
