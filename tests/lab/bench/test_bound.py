"""The rate-distortion bound, against sources whose rate is known."""

import math

import pytest
import torch

from lowbit_lab.bench import bound

FLAT = torch.full((8,), 3.0, dtype=torch.float64)


def tokens(count: int, variances: list[float], *, seed: int = 0) -> torch.Tensor:
    """Gaussian tokens with exactly these second moments, along random directions."""
    g = torch.Generator().manual_seed(seed)
    white = torch.linalg.qr(torch.randn(count, len(variances), generator=g, dtype=torch.float64)).Q * count**0.5
    turn = torch.linalg.qr(torch.randn(len(variances), len(variances), generator=g, dtype=torch.float64)).Q
    return white * torch.tensor(variances, dtype=torch.float64).sqrt() @ turn.t()


@pytest.mark.parametrize("error", [3e-9, 0.01, 0.5, 2.9])
def test_white_tokens(error: float):
    assert bound.rate([FLAT], error) == pytest.approx(0.5 * math.log2(3 / error))


def test_an_error_as_large_as_the_message_takes_no_bits():
    assert bound.rate([FLAT], 3.0) == bound.rate([FLAT], 4.0) == bound.rate([FLAT], 7.0) == 0
    assert bound.rate_at([FLAT], 0.0) == 0
    assert bound.rate([FLAT], 2.999999) == pytest.approx(0, abs=1e-6)


def test_one_direction():
    """All error and all bits are its own: 1/2 log2 of its variance over C times the mean error, over C elements."""
    one = torch.tensor([16.0, 0, 0, 0], dtype=torch.float64)
    assert bound.rate([one], 0.25) == pytest.approx(0.5 * math.log2(16 / (4 * 0.25)) / 4)
    assert bound.rate_at([one], 20.0) == pytest.approx(0.5 * math.log2(100) / 4)


def test_weak_components_are_left_out():
    """The level is 1: errors 1 + 1 + 0.5 + 0.1."""
    variances = torch.tensor([0.5, 16.0, 0.1, 4.0], dtype=torch.float64)
    assert bound.rate([variances], 2.6 / 4) == pytest.approx((2 + 1) / 4)


def test_messages_share_one_level():
    """As if they were components of one; spreading the error evenly takes more bits."""
    loud, quiet = 100 * FLAT, FLAT
    error = 1.0
    together = bound.rate([loud, quiet], error)
    assert together == pytest.approx((0.5 * math.log2(300) + 0.5 * math.log2(3)) / 2)
    assert bound.rate([loud, quiet], 5.0) == pytest.approx(0.5 * math.log2(300 / 7) / 2), (
        "3 of the quiet, 7 of the loud"
    )
    assert bound.rate([loud, loud], error) == pytest.approx(bound.rate([loud], error))


def test_zeros_and_what_is_no_number():
    zeros = torch.zeros(4, dtype=torch.float64)
    assert bound.rate([zeros], 0.0) == bound.rate([zeros], 1.0) == 0
    assert bound.rate([FLAT], 0.0) is None, "no number of bits is enough"
    assert bound.rate([FLAT], math.nan) is None
    x = torch.ones(3, 4)
    x[1, 2] = math.inf
    assert bound.spectrum(x).isnan().all()
    assert bound.rate([bound.spectrum(x)], 0.1) is None


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e30])
def test_a_spectrum_is_that_of_the_second_moments(scale: float):
    variances = [9.0, 4.0, 1.0, 0.25, 0.0]
    x = tokens(50, variances) * scale
    found = bound.spectrum(x.view(2, 25, 5)) / scale**2
    assert found.sort(descending=True).values.tolist() == pytest.approx(variances, abs=1e-9)
    few = bound.spectrum(x[:3])
    assert few.shape == (5,)
    assert float(few.sum()) == pytest.approx(float(x[:3].square().sum(-1).mean()))
    assert (few > 1e-9 * few.max()).sum() == 3, "three tokens span three directions"


def test_no_uniform_quantizer_with_entropy_coding_beats_the_bound():
    """At high rates it takes a quarter of a bit more: 1/2 log2(2 pi e / 12)."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = (x / 0.1).round()
    _, counts = q.unique(return_counts=True)
    shares = counts / len(x)
    entropy = -float((shares * shares.log2()).sum())
    least = bound.rate([x.square().mean()[None]], float((x - q * 0.1).square().mean()))
    assert least is not None
    assert entropy - least == pytest.approx(0.2546, abs=0.01)
