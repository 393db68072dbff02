import pytest
import torch

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
    for codec in (TAHQuant.published(), TAHQuant()):
        for channels in (512, 1024, 4096):
            assert 4.30 <= codec.bits_per_element((1, 1024, channels)) <= 4.35 + 64 / channels / 2
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
            "TAHQuant(high_bits=4, low_bits=4, pivot_ratio=None)",
            f"TAHQuant(pivot_ratio=None, allocation='{version}')",
            f"TAHQuant(pivot_ratio=2.0, allocation='{version}')",
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
