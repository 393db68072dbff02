"""Payloads frozen as files: the bytes on the wire of yesterday's peers.

`python -m tests.codecs.golden` writes those that are missing. A payload that changes on purpose needs a new
`payload_version` of its codec, and its old file removed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lowbit import kernels
from lowbit.codecs import Codec, FeatureInt4
from lowbit.codecs.subspace_quant.layout import subspace_geometry
from lowbit.codecs.subspace_quant.reference import coefficients_encode, rest_encode

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


def feature_int4() -> FeatureInt4:
    """A codec for the sample, from integers alone: ranges that some values exceed, five outliers."""
    n = torch.arange(400, dtype=torch.int64)
    ranges = (0.5 + (n * 2654435761 % 97) / 32).view(2, 200)
    return FeatureInt4(ranges=ranges, total=ranges.sum(0), features=(0, 1, 64, 133, 199))


def golden_path(codec: Codec) -> Path:
    """Where this codec's payload lies."""
    return FOLDER / f"{type(codec).__name__}-{codec.fingerprint()}.bin"


def check_golden(codec: Codec) -> None:
    """Both backends give exactly the frozen payload."""
    frozen = golden_path(codec).read_bytes()
    for name in ("reference", "cpu"):
        with kernels.backend(name):
            assert codec.encode(sample()).numpy().tobytes() == frozen, f"{name} changed the wire"


def write_golden(codec: Codec) -> None:
    """Freeze a payload that is not frozen yet."""
    if not golden_path(codec).exists():
        with kernels.backend("reference"):
            golden_path(codec).write_bytes(codec.encode(sample()).numpy().tobytes())


def subspace(bits: int) -> bytes:
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


def subspace_path(bits: int) -> Path:
    """Where that payload lies."""
    return FOLDER / f"subspace-{bits}.bin"


def check_golden_subspace(bits: int) -> None:
    """Both backends fill exactly the frozen payload."""
    frozen = subspace_path(bits).read_bytes()
    for name in ("reference", "cpu"):
        with kernels.backend(name):
            assert subspace(bits) == frozen, f"{name} changed the wire"


def write_golden_subspace(bits: int) -> None:
    """Freeze a payload that is not frozen yet."""
    if not subspace_path(bits).exists():
        with kernels.backend("reference"):
            subspace_path(bits).write_bytes(subspace(bits))
