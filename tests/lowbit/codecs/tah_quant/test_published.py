"""`TAHQuant.published()` is the paper's format, to the byte."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import TAHQuant

from . import paper

SEQUENCES, LENGTH, TILES = 2, 500, 10
VERSIONS = pytest.mark.parametrize("allocation", ["tile", "token"])
# Entropy comes from 15-bit magnitudes (see `test_entropy_is_the_entropy`).
TOLERANCE = {"tile": 2 * 64 * 2.0**-16 * 8, "token": 2 * 640 * 2.0**-16 * 11}


def tiles() -> Tensor:
    """10,000 tiles, half of them with a pivot of 2 to 10^6 times the others' deviation; tokens of unequal size."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(SEQUENCES * LENGTH * TILES, 64, generator=g)
    pivots = torch.randint(0, 64, (len(x), 1), generator=g)
    ratios = torch.exp2(1 + 18.94 * torch.rand(len(x), 1, generator=g)) * torch.randn(len(x), 1, generator=g).sign()
    x[::2] = x[::2].scatter(1, pivots[::2], ratios[::2])
    return x.view(SEQUENCES, LENGTH, TILES * 64) * torch.exp2(4 * torch.randn(SEQUENCES, LENGTH, 1, generator=g))


def lowest(values: np.ndarray) -> np.ndarray:
    """Flags of the fifth of each row's values that are lowest; of equal ones, the first."""
    order = values.argsort(-1, kind="stable")
    flags = np.zeros(values.shape, bool)
    np.put_along_axis(flags, order[:, : values.shape[1] // 5], True, -1)
    return flags


@VERSIONS
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bytes_and_numbers_are_the_papers(allocation: str, backend: str) -> None:
    codec, x = TAHQuant.published(allocation=allocation), tiles()
    with kernels.backend(backend):
        payload = codec.encode(x)
        y = codec.decode(payload, shape=x.shape)
    layout = codec.geometry(x.shape).layout
    found = {name: layout.section(payload, name).numpy().tobytes() for name in layout.sizes}
    x_RTE = x.view(-1, TILES, 64).numpy()

    if allocation == "tile":
        entropies = paper.entropies(x_RTE)
    else:
        entropies = paper.entropies(x.numpy())
    bitmaps = np.frombuffer(found["widths"], np.uint8).reshape(len(entropies), -1)
    low = np.unpackbits(bitmaps, axis=1, bitorder="little")[:, : entropies.shape[1]].astype(bool)
    assert (low.sum(1) == entropies.shape[1] // 5).all()
    highest = np.where(low, entropies, -np.inf).max(1)
    assert (highest <= np.where(low, np.inf, entropies).min(1) + TOLERANCE[allocation]).all()
    assert (low == lowest(entropies)).mean() > 0.9  # pivots that dwarf all others leave entropies that are nearly 0

    coded = paper.encode(
        x_RTE, low if allocation == "tile" else np.broadcast_to(low.reshape(-1, 1), (len(x_RTE), TILES))
    )
    assert found["scales"] == coded.scales.tobytes()
    assert found["mids"] == coded.zeros.tobytes()
    assert found["pivots"] == coded.pivots.tobytes()
    assert found["codes"] == paper.packed(coded)
    assert np.array_equal(y.view(-1, TILES, 64).numpy(), paper.decode(coded))
    assert (coded.pivots > 0).mean() > 0.4


@VERSIONS
def test_every_byte_of_the_papers_metadata_is_counted(allocation: str) -> None:
    """FP16 scale and zero and a byte of pivot for each tile, a bit of width for each candidate."""
    sizes = TAHQuant.published(allocation=allocation).geometry((2, 10, 640)).layout.sizes
    tiles, low = 200, 40
    assert sizes == {
        "exponents": 0, "scales": 2 * tiles, "mids": 2 * tiles, "pivots": tiles,
        "widths": 20 * 2 if allocation == "tile" else 2 * 2, "codes": tiles * 32 - low * 8,
    }  # fmt: skip
    bits = TAHQuant.published(allocation=allocation).bits_per_element((1, 1024, 4096))
    assert bits == pytest.approx(3.8 + 0.5 + 1 / 8 + (1 / 64 if allocation == "tile" else 1 / 4096), abs=0.02)


@pytest.mark.parametrize("ratio", [10, 1e4, 1e5, 1e6])
def test_a_pivot_costs_the_others_nothing(ratio: float) -> None:
    """A zero that is rounded moves the whole tile, which the rotation turns into an error of the pivot alone."""
    x = torch.randn(200, 320, generator=torch.Generator().manual_seed(0))
    x[:, 7] = ratio
    error = (TAHQuant.published().round_trip(x) - x)[:, :64]
    assert error[:, torch.arange(64) != 7].square().mean().sqrt() < 0.2  # in 3 bits: a pivot's entropy is low


def test_metadata_saturates_instead_of_overflowing() -> None:
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    y = TAHQuant.published().round_trip(torch.cat([x * 1e30, x * 1e-30]))
    assert y.isfinite().all()
    assert y[0].abs().max() <= 65504 * 16
    assert not y[1].any(), "below FP16's smallest number"


@VERSIONS
def test_a_smallest_element_of_zero_has_the_same_bytes_on_all_backends(allocation: str) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 3, (40, 640), generator=g).float() * torch.rand(40, 640, generator=g)
    x[(x == 0) & (torch.rand(40, 640, generator=g) < 0.5)] = -0.0
    codec, payloads = TAHQuant.published(allocation=allocation), []
    for backend in ("reference", "cpu"):
        with kernels.backend(backend):
            payloads.append(codec.encode(x))
    assert torch.equal(*payloads)
