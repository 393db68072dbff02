import dataclasses

import pytest
import torch

from lowbit import kernels
from lowbit.codecs import GroupInt, TAHQuant, parse
from lowbit.kernels.exact import entropy


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Student-t with 3 degrees of freedom, tokens of unequal size, and a few outlier channels: like activations."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, *shape, generator=g)
    x = normal[0] / (normal[1:].square().mean(0)).sqrt()
    x *= torch.rand(*shape[:-1], 1, generator=g) + 0.5
    x[..., :: shape[-1] // 4] *= 8
    return x


def squared_error(codec: TAHQuant | GroupInt, x: torch.Tensor) -> float:
    return float((codec.round_trip(x) - x).square().sum() / x.square().sum())


def test_effective_bits() -> None:
    for codec, bits in ((TAHQuant.published(), 4.43), (TAHQuant(), 4.32)):
        for channels in (512, 1024, 4096):
            assert bits - 0.02 <= codec.bits_per_element((1, 1024, channels)) <= bits + 0.03 + 64 / channels / 2
    assert TAHQuant().bits_per_element((2, 256, 256)) <= 4.35


def test_counts_are_floored_once() -> None:
    """0.2 * 10 is 2 candidates and not 1; 1024 tokens lose none."""
    assert TAHQuant().geometry((1, 1, 640)).low == 2
    assert TAHQuant(allocation="token").geometry((1, 1024, 64)).low == 204


def test_published_versions_and_their_parts_have_spellings() -> None:
    """Bits by tile or by token; equal bits alone, then bits by entropy, then pivots and the Hadamard transform."""
    assert TAHQuant.published() == TAHQuant.published(allocation="tile") == parse("tah-quant-published")
    for version in ("tile", "token"):
        parts = [
            "TAHQuant(high_bits=4, low_bits=4, pivot_ratio=None, metadata='float16')",
            f"TAHQuant(pivot_ratio=None, allocation='{version}', metadata='float16')",
            f"TAHQuant(pivot_ratio=2.0, allocation='{version}', metadata='float16')",
        ]
        codecs = [parse(part) for part in parts]
        assert codecs[-1] == TAHQuant.published(allocation=version)
        sizes = [codec.geometry((2, 10, 640)) for codec in codecs if isinstance(codec, TAHQuant)]
        assert [size.low > 0 for size in sizes] == [False, True, True]
        assert [size.layout.sizes["pivots"] > 0 for size in sizes] == [False, False, True]
        assert [size.per_scope for size in sizes[1:]] == [10, 10]  # a token's tiles; a sequence's tokens
    x = heavy_tailed(2, 128, 1024)
    x[..., 32::64] = 100.0  # in each tile one outlier
    alone, entropy, published = (squared_error(c, x) for c in codecs if isinstance(c, TAHQuant))
    assert published < 0.1 * alone < 0.1 * entropy


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_every_element_within_half_a_cell(bits: int) -> None:
    codec = TAHQuant(high_bits=bits, low_bits=bits, pivot_ratio=None)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(bits))
    tiles = x.view(32, 4, 64)
    cell = (tiles.amax(-1) - tiles.amin(-1)) / 2**bits
    error = (codec.round_trip(x) - x).abs().view(32, 4, 64).amax(-1)
    # The middle is rounded to 1/128 of a range; the step by 1/32 of itself, to nearest (a range cut short by as much)
    # below 6 bits and up from there.
    short = 2**bits / 2 / 32 if bits < 6 else 0
    assert (error <= cell * (0.5 * 17 / 16 + 2**bits / 128 + short)).all()


def test_tiles_of_small_range_get_the_low_bits() -> None:
    x = torch.randn(1, 4, 320, generator=torch.Generator().manual_seed(0))
    x[0, 2, 64:128] *= 0.1
    x[0, 3, 256:320] *= 0.2
    codec = TAHQuant(high_bits=8, low_bits=2, high_fraction=0.9, pivot_ratio=None)
    error = (codec.round_trip(x) - x).view(4, 5, 64).abs().amax(-1) / x.view(4, 5, 64).abs().amax(-1)
    coarse = {(int(i), int(j)) for i, j in (error > 0.05).nonzero()}
    assert coarse == {(2, 1), (3, 4)}


def test_range_shares_the_low_bits_out_among_256_tiles_at_a_time() -> None:
    """600 tokens of one tile: scopes of 256, 256 and 88, each with its own share."""
    codec = TAHQuant(high_bits=8, low_bits=2, high_fraction=0.75, pivot_ratio=None)
    x = torch.randn(3, 200, 64, generator=torch.Generator().manual_seed(2))
    x[0] *= 1e-3  # low everywhere if the choice were made among all
    error = (codec.round_trip(x) - x).abs().amax(-1) / x.abs().amax(-1)
    coarse = (error > 0.05).view(-1).split(256)
    assert [int(part.sum()) for part in coarse] == [64, 64, 22]


@pytest.mark.parametrize(
    ("allocation", "outliers", "low"),
    [("token", [(4, slice(j, j + 8)) for j in range(0, 640, 64)], [(4, j) for j in range(10)]),
     ("tile", [(i, slice(64 * i, 64 * i + 8)) for i in range(10)], [(i, i) for i in range(10)])],
)  # fmt: skip
def test_tokens_and_tiles_of_low_entropy_get_the_low_bits(
    allocation: str, outliers: list[tuple[int, slice]], low: list[tuple[int, int]]
) -> None:
    x = torch.ones(1, 10, 640) + 0.3 * torch.randn(1, 10, 640, generator=torch.Generator().manual_seed(0))
    for token, channels in outliers:
        x[0, token, channels] *= 20
    y = TAHQuant(high_bits=8, low_bits=2, high_fraction=0.9, pivot_ratio=None, allocation=allocation).round_trip(x)
    error = (y - x).view(10, 10, 64).abs().amax(-1) / x.view(10, 10, 64).abs().amax(-1)
    assert [tuple(p) for p in (error > 0.05).nonzero().tolist()] == low


def test_entropy_is_the_entropy() -> None:
    x = heavy_tailed(50, 64)
    p = x.abs().double() / x.abs().double().sum(-1, keepdim=True)
    exact = -(p * p.log2()).sum(-1)
    # 15-bit magnitudes: each of 64 terms is off by at most half a unit of 2^-15 of the largest, times log2(64) + 1.5.
    assert (entropy(x) - exact).abs().max() < 64 * 2.0**-16 * 8
    assert entropy(torch.zeros(1, 64)) == 0
    assert torch.equal(entropy(x * 2.0**40), entropy(x))


@pytest.mark.parametrize("position", [0, 1, 63])
def test_a_pivot_no_longer_ruins_its_tile(position: int) -> None:
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    x[:, position] = 50.0
    plain = TAHQuant(high_bits=4, low_bits=4, pivot_ratio=None)
    rotated = TAHQuant(high_bits=4, low_bits=4, pivot_ratio=2.0)
    rest = torch.arange(64) != position
    before = (plain.round_trip(x) - x)[:, rest].norm()
    after = (rotated.round_trip(x) - x)[:, rest].norm()
    assert after < 0.25 * before


FOUR_BITS = TAHQuant(high_bits=4, low_bits=4)


def with_pivot(ratio: float, tile: int, position: int) -> torch.Tensor:
    """128 tiles of Gaussian numbers, each with a pivot of this many deviations."""
    x = torch.randn(128, tile, generator=torch.Generator().manual_seed(3))
    x[::2, position], x[1::2, position] = ratio, -ratio
    return x


@pytest.mark.parametrize("tile", [8, 16, 64, 128])
@pytest.mark.parametrize("ratio", [10.0, 2360.0, 1e4, 1e5, 1e6, 1e9, 1e12])
def test_a_pivot_of_any_size_costs_the_others_nothing(ratio: float, tile: int) -> None:
    """In 4 bits they err by a tenth of their deviation, and the pivot by 2^-10 of itself or as much as they."""
    for position in (0, tile // 2, tile - 1):
        x = with_pivot(ratio, tile, position)
        error = dataclasses.replace(FOUR_BITS, tile=tile).round_trip(x) - x
        assert error[:, torch.arange(tile) != position].square().mean().sqrt() < 0.1
        assert error[:, position].abs().max() < max(0.5, ratio * 2.0**-10)


def test_next_to_a_pivot_the_low_bits_are_worth_a_fifth() -> None:
    """Of `TAHQuant()`: every tile has a pivot of 10^6, and a fifth of them 3 bits."""
    x = with_pivot(1e6, 64, 5).view(16, 512)
    error = (TAHQuant().round_trip(x) - x).view(-1, 64)
    assert error[:, torch.arange(64) != 5].square().mean().sqrt() < 0.12


@pytest.mark.parametrize(
    "kind", ["gaussian", "offset", "wide offset", "pivot and offset", "two pivots", "signs", "one", "tiny", "huge"]
)
def test_rotating_never_costs_more_than_twice_the_cells_of_a_plain_tile(kind: str) -> None:
    """Rotations keep the norm of errors, and an element errs by at most three quarters of a cell in 4 bits."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    pivot, pair = torch.tensor([3]), torch.tensor([3, 4])
    x = {
        "gaussian": x, "offset": x + 10, "wide offset": x + 1e3, "two pivots": x.index_fill(1, pair, 1e6),
        "pivot and offset": (x + 50).index_fill(1, pivot, 1e6), "signs": x.sign() + x * 1e-3,
        "one": torch.eye(64) * x, "tiny": x * 1e-38, "huge": x * 1e37,
    }[kind]  # fmt: skip
    error = (FOUR_BITS.round_trip(x) - x).double().square().mean(-1).sqrt()
    cell = (x.amax(-1) - x.amin(-1)) / 16 + 2.0**-126
    far = x.abs().amax(-1) * 0.0042 / 8  # from zero: a middle that is too large for its integer widens the cells
    assert (error <= 2 * 0.75 * torch.maximum(cell, far)).all()


@pytest.mark.parametrize("tile", [8, 64, 128])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_backends_agree_on_pivots_of_any_size(backend: str, tile: int) -> None:
    if backend == "gpu":
        pytest.importorskip("triton", reason="no Triton; make test-cpus installs it")
    codec, device = dataclasses.replace(TAHQuant(), tile=tile), "cuda" if torch.cuda.is_available() else "cpu"
    device, found = device if backend == "gpu" else "cpu", []
    positions = [5, 0, tile - 1, 3] * 3
    x = [with_pivot(10.0**n, tile, position)[:3] for n, position in zip(range(1, 37, 3), positions, strict=True)]
    x = torch.cat(x).view(6, -1).to(device)
    for name in ("reference", backend):
        with kernels.backend(name):
            payload = codec.encode(x)
            found.append((payload, codec.decode(payload, shape=x.shape)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    pivots = codec.geometry(x.shape).layout.section(found[0][0], "pivots")
    assert (pivots > 128).any(), "with a middle"
    assert ((pivots > 0) & (pivots <= 128)).any(), "apart"
