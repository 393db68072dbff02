"""Payloads frozen as files: those of yesterday's peers.

`python -m tests.lowbit.codecs.golden` writes those that are missing. A payload that changes on purpose needs a new
`payload_version` of its codec, and its old file removed.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from lowbit.codecs import Codec

FOLDER = Path(__file__).parent


def sample() -> torch.Tensor:
    """A (2, 5, 200) tensor from integers alone, the same on every machine: outliers, zeros, tiny values."""
    n = torch.arange(2000, dtype=torch.int64)
    h = (n * 2654435761) % 4294967296
    x = (h.double() / 2**31 - 1).float() * torch.exp2((h >> 7) % 5 - 2.0)
    x[333] = 97.0
    x[1000:1064] = 0
    x[1400:1600] *= 2.0**-60
    return x.view(2, 5, 200)


def frozen(*codecs: Codec) -> list[tuple[str, Callable[[], bytes]]]:
    """For each codec, the file's name and what makes its content: the payload of the sample."""
    return [
        (f"{type(each).__name__}-{each.fingerprint()}.bin", lambda each=each: each.encode(sample()).numpy().tobytes())
        for each in codecs
    ]
