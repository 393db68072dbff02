"""Examples of `Cast` for the tests of all formats."""

import torch

from lowbit.codecs import Cast
from tests.fuzz.targets import SHAPES, SMALL, Decoding, Encoding, Summing, Target

CODECS = [Cast(dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


def expected_error(codec: Cast) -> float:
    return torch.finfo(codec.dtype).eps


def hostile() -> list[Target]:
    found = [kind(codec, SHAPES) for codec in CODECS for kind in (Decoding, Encoding)]
    return [*found, Summing(CODECS[1], SMALL)]
