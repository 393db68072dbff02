"""A basis that is renewed and followed: kernels do what the reference does, and both ends' part to the last bit."""

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs.transform_quant.basis import Basis, Transform, follow, gram_inverse, renew
from lowbit.codecs.transform_quant.reference import TransformGeometry
from lowbit.kernels.layout import Layout, ceil_div
from tests.lowbit.codecs.transform_quant.messages import same

CPU, BACKENDS = torch.device("cpu"), ("reference", "cpu")


def geometry(rows: int, channels: int, directions: int, refresh: int) -> TransformGeometry:
    renewed = min(rows, ceil_div(directions, refresh))
    layout = Layout.of(header=16, slots=2 * renewed, lengths=4 * renewed, directions=renewed * channels)
    return TransformGeometry(rows, channels, directions, renewed, True, 1, rows, layout)


class Found(NamedTuple):
    layout: Layout
    payload: Tensor
    c: Tensor
    directions: Tensor
    inverse: Tensor
    digest: Tensor

    def section(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.layout.section(self.payload, name, dtype)


def renewed(backend: str, x: Tensor, basis: Tensor, refresh: int, *, number: int = 5) -> Found:
    geo = geometry(*x.shape, len(basis), refresh)
    payload = torch.zeros(geo.layout.nbytes, dtype=torch.uint8)
    before = Basis(basis, gram_inverse(basis), torch.tensor(123456789))
    after = Basis(*map(torch.empty_like, before))
    with kernels.backend(backend):
        products = kernels.implementation(renew, CPU)(x, before, payload, after, number, True, geo)
    inverse = gram_inverse(after.directions_KC)
    return Found(geo.layout, payload, products @ inverse, after.directions_KC, inverse, after.digest)


def followed(backend: str, payload: Tensor, basis: Tensor, rows: int, refresh: int, number: int = 5) -> list[Tensor]:
    """The header that is expected, and the next directions and digest."""
    found = [torch.empty(4, dtype=torch.int32), torch.empty_like(basis), torch.empty((), dtype=torch.int64)]
    geo = geometry(rows, basis.shape[1], len(basis), refresh)
    with kernels.backend(backend):
        kernels.implementation(follow, CPU)(payload, basis, torch.tensor(123456789), *found, number, True, geo)
    return found


def tokens(rows: int, channels: int, size: float = 1.0) -> Tensor:
    """Energies along their principal directions that are far apart."""
    g = torch.Generator().manual_seed(channels)
    axes = torch.linalg.qr(torch.randn(channels, channels, generator=g))[0]
    energy = 0.5 ** torch.arange(channels).clamp(max=18).float()
    return torch.randn(rows, channels, generator=g) * energy @ axes.t() * size


def basis_of(x: Tensor, rank: int, filled: int) -> Tensor:
    """The rank's last directions are absent; the others mix some of the tokens', and are not orthogonal."""
    basis = torch.zeros(rank, x.shape[1])
    g = torch.Generator().manual_seed(1)
    near = torch.linalg.svd(x.double(), full_matrices=False).Vh[:filled].float()
    near += 0.05 * torch.randn(near.shape, generator=g) / math.sqrt(x.shape[1])
    basis[:filled] = torch.nn.functional.normalize(near + 0.7 * near.roll(1, 0))
    return basis


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "channels", "rank", "filled", "refresh"),
    [(80, 70, 6, 6, 3), (300, 128, 8, 8, 8), (64, 30, 5, 2, 1), (7, 16, 12, 0, 4), (1, 8, 1, 0, 1)],
)
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e20])
def test_kernels_find_the_references_directions_and_followers_have_them_to_the_last_bit(
    rows: int, channels: int, rank: int, filled: int, refresh: int, dtype: torch.dtype, size: float
) -> None:
    x = tokens(rows, channels, size).to(dtype)
    basis = basis_of(x.float(), rank, filled)
    a, b = (renewed(name, x, basis, refresh) for name in BACKENDS)
    assert torch.equal(a.section("slots", torch.int16), b.section("slots", torch.int16))
    assert torch.equal(a.payload[:12], b.payload[:12]), "the header, but for what is new"
    new = a.section("slots", torch.int16).long()
    kept = [k for k in range(rank) if k not in new.tolist()]
    assert torch.equal(b.directions[kept], basis[kept])
    # Beyond what the tokens have, directions are any.
    told = min(len(new), rows - min(filled, len(kept)))
    for one, other in zip(a.directions[new][:told], b.directions[new][:told], strict=True):
        sign = torch.sign(one @ other)
        assert (one - sign * other).abs().max() <= 2.5 * one.abs().max() / 127
    fits = [f.c @ f.directions for f in (a, b)]
    full = x.float()
    assert (fits[0] - fits[1]).norm() <= 0.02 * (full - fits[0]).norm() + 1e-3 * full.norm()
    for f in (a, b):
        expected = full @ f.directions.t() @ gram_inverse(f.directions)
        assert (f.c - expected).norm() <= 1e-4 * expected.norm()
    for f, follower in product((a, b), BACKENDS):
        there = followed(follower, f.payload, basis, rows, refresh)
        same(there, [f.section("header", torch.int32), f.directions, f.digest])
        assert int(f.digest) == (123456789 * 31 + int(there[0][3])) & 0x7FFFFFFF


def test_one_massive_token_hides_no_direction() -> None:
    x = 0.8 ** torch.arange(64) * torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    x[3] *= 3e5
    a, b = (renewed(name, x, torch.zeros(16, 64), 1) for name in BACKENDS)
    left = [float((x - f.c @ f.directions)[4:].norm()) for f in (a, b)]
    assert left[1] < 1.1 * left[0]


@pytest.mark.parametrize(
    ("slots", "length"),
    [((3, 1), 0.25), ((-1, -1), 0.25), ((-1, 4), 0.25), ((6, 0), 0.25), ((2, -2), 0.25), ((32767, 1), 0.25),
     ((0, -1), 0.25), ((2, 2), 0.25), ((3, 1), 1.5), ((3, 1), -0.5), ((3, 1), math.nan)],
)  # fmt: skip
@pytest.mark.parametrize(("channels", "number"), [(70, 3), (9, 2**31 + 4), (40000, 0)])
def test_kernels_follow_as_the_reference_does(slots: tuple[int, int], length: float, channels: int, number: int):
    g = torch.Generator().manual_seed(0)
    basis, layout = torch.randn(6, channels, generator=g), geometry(4, channels, 6, 3).layout
    payload = torch.randint(0, 256, (layout.nbytes,), generator=g, dtype=torch.uint8)
    layout.section(payload, "slots", torch.int16).copy_(torch.tensor(slots))
    layout.section(payload, "lengths", torch.float32).copy_(torch.tensor([length, 1e-3]))
    expected, found = (followed(name, payload, basis, 4, 3, number) for name in BACKENDS)
    same(expected, found)
    header = found[0].tolist()
    assert header[:3] == [number % 2**31, 123456789, 1]
    valid = all(-1 <= slot < 6 for slot in slots) and slots != (2, 2) and length == 0.25
    assert (header[3] >= 0) == valid
    assert torch.equal(found[1], basis) == (not valid or slots == (-1, -1))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bad", [0.0, 1e-44, math.nan, -math.inf, 3e38])
def test_tokens_of_no_use_leave_the_basis_alone(name: str, bad: float) -> None:
    x = tokens(80, 70) if bad else torch.zeros(80, 70)
    basis = basis_of(tokens(80, 70), 6, 4)
    x[-1, -1] = bad
    x = x * 1e-38 * 1e-3 if abs(bad) < 1 else x
    found = renewed(name, x, basis, 3)
    assert found.section("slots", torch.int16).tolist() == [-1, -1]
    assert torch.equal(found.directions, basis)


@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_of_fewer_dimensions_than_directions(name: str) -> None:
    """What the power method leaves undefined is finite, and directions beside each other all the same."""
    x = torch.zeros(40, 30)
    x[:, 3], x[:, 4] = 2.0, torch.arange(40)
    found = renewed(name, x, torch.zeros(8, 30), 1)
    assert found.inverse.isfinite().all()
    assert (found.directions @ found.directions.t() - torch.eye(8)).abs().max() < 0.05
    assert (found.c @ found.directions - x).norm() < 1e-2 * x.norm()


@pytest.mark.parametrize(("rank", "channels"), [(1, 1), (8, 128), (40, 40), (130, 200)])
def test_inverses(rank: int, channels: int) -> None:
    g = torch.Generator().manual_seed(rank)
    basis = torch.nn.functional.normalize(torch.randn(rank, channels, generator=g))
    basis[rank // 2 :: 5] = 0  # absent
    basis[0] = basis[-1]  # twice the same
    expected = torch.linalg.inv(basis.double() @ basis.double().t() + 1e-4 * torch.eye(rank)).float()
    for name in BACKENDS:
        with kernels.backend(name):
            found = kernels.implementation(Transform, CPU)(basis).inverse()
        assert (found - expected).norm() < 2e-2 * expected.norm(), name
