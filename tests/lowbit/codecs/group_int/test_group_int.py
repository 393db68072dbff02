import pytest
import torch

from lowbit.codecs import GroupInt


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_element_within_half_a_step(bits: int, symmetric: bool) -> None:
    codec = GroupInt(bits=bits, group=32, symmetric=symmetric)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(bits)) * torch.logspace(-9, 9, 64)[:, None]
    reach = 2 * x.abs().amax(1) if symmetric else x.amax(1) - x.amin(1)
    step = reach / (2**bits - 2 if symmetric else 2**bits - 1)
    # Parameters are rounded too: the scale by 2^-9 of itself (times half the levels), the middle by 2^-9 of a range.
    slack = 2.0**-9 * (2**bits / 2 + 2**bits)
    error = (codec.round_trip(x) - x).abs().amax(1)
    assert (error <= step * (0.5 + slack)).all()


def test_bits_are_really_packed() -> None:
    for (bits, group, symmetric), expected in {
        (4, 64, False): 4.5, (6, 32, True): 6.5, (3, 64, True): 3.25, (5, 128, False): 5.25, (7, 32, False): 8.0,
    }.items():  # fmt: skip
        assert GroupInt(bits=bits, group=group, symmetric=symmetric).bits_per_element((128, 256)) == expected


def test_symmetric_zero_is_exact_and_signs_mirror() -> None:
    codec = GroupInt(bits=5, group=64, symmetric=True)
    x = torch.randn(10, 64)
    x[:, 7] = 0
    assert (codec.round_trip(x)[:, 7] == 0).all()
    assert torch.equal(codec.round_trip(-x), -codec.round_trip(x))


def test_far_offsets_keep_their_relative_precision() -> None:
    x = 1000 + torch.rand(4, 64)
    # The middle may be 127 ranges away; further out the step grows with it, here to 1000 / (127 * 16).
    assert ((GroupInt(bits=4).round_trip(x) - x).abs() <= 0.51 * 1000.5 / (127 * 16)).all()
    constant = torch.full((64,), 3.25)
    assert torch.allclose(GroupInt(bits=4).round_trip(constant), constant, rtol=2e-3)


def test_stochastic_rounding_is_unbiased_and_repeatable() -> None:
    codec = GroupInt(bits=3, group=64, symmetric=True, rounding="stochastic")
    x = torch.rand(64)
    torch.manual_seed(0)
    once = codec.round_trip(x)
    trips = torch.stack([codec.round_trip(x) for _ in range(2000)])
    step = float(x.abs().max()) / 3
    # The mean of 2000 roundings has a deviation of at most step / 2 / sqrt(2000); the scale is off by 2^-9.
    assert ((trips.mean(0) - x).abs() < 6 * step / 2 / 2000**0.5 + 2.0**-8 * x).all()
    assert not torch.equal(trips[0], trips[1])
    torch.manual_seed(0)
    assert torch.equal(codec.round_trip(x), once)


def test_a_bad_group_does_not_touch_its_neighbours() -> None:
    x = torch.randn(256)
    x[70] = float("inf")
    y = GroupInt().round_trip(x)
    assert y[64:128].isnan().all()
    assert torch.equal(y[:64], GroupInt().round_trip(x[:64]))
    assert y[128:].isfinite().all()
