import math

import pytest
import torch

from lowbit.codecs import BlockFloat8

MANTISSA = {"e4m3": 3, "e5m2": 2}
NATIVE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
RANGE = {"e4m3": 448 / 2**-6, "e5m2": 57344 / 2**-14}
FORMATS = list(MANTISSA)


def spread(*shape: int, seed: int = 0, octaves: float = 3) -> torch.Tensor:
    """Numbers of both signs over many binades."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp2(octaves * torch.randn(shape, generator=g))


@pytest.mark.parametrize("format", FORMATS)
def test_every_element_within_half_a_unit_and_what_was_decoded_is_coded_exactly(format: str) -> None:
    codec, x = BlockFloat8(format=format, block=96), spread(64, 96) * torch.logspace(-30, 30, 64)[:, None]
    y = codec.round_trip(x)
    # The largest is scaled to between half the largest number and that: what is smaller by the range is subnormal.
    unit = torch.maximum(x.abs(), 2 * x.abs().amax(1, keepdim=True) / RANGE[format])
    assert ((y - x).abs() <= unit * 2.0 ** -(MANTISSA[format] + 1)).all()
    assert torch.equal(codec.round_trip(y), y)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_the_engines_own(format: str) -> None:
    """Of all bfloat16 numbers in range, beside a largest that makes the scale 1."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    top = torch.finfo(NATIVE[format]).max
    x = x[x.isfinite() & (x.abs() <= top)]
    x = x[: len(x) // 31 * 31].view(-1, 31)
    x = torch.cat([torch.full((len(x), 1), top), x], 1)
    codec = BlockFloat8(format=format, block=32)
    codes = codec.encode(x)[: x.numel()]
    assert torch.equal(codes, x.to(NATIVE[format]).view(torch.uint8).view(-1))
    assert torch.equal(codec.round_trip(x), x.to(NATIVE[format]).float())


def test_bytes_are_counted() -> None:
    assert BlockFloat8().bits_per_element((4096, 4096)) == 8.0625
    assert BlockFloat8(block=32).bits_per_element((128,)) == 8.25
    assert BlockFloat8().nbytes((130,)) == 130 + 14 + 2
    assert BlockFloat8().nbytes((6,)) == 6 + 10 + 1
    assert BlockFloat8().nbytes(()) == 4, "plain"
    assert BlockFloat8().nbytes((0, 3)) == 0


def test_zeros_keep_their_sign_and_a_payload_of_zeros_is_zeros() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -0.0])
    y = BlockFloat8().round_trip(x)
    assert torch.equal(torch.signbit(y), torch.signbit(x))
    payload = torch.zeros(BlockFloat8().nbytes((200,)), dtype=torch.uint8)
    assert torch.equal(BlockFloat8().decode(payload, shape=(200,)), torch.zeros(200))


@pytest.mark.parametrize("format", FORMATS)
def test_the_ends_of_float32(format: str) -> None:
    codec = BlockFloat8(format=format, block=32)
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, 1.0, 0.0] * 2)
    assert codec.round_trip(x).tolist() == [1.75 * 2.0**127, -1.75 * 2.0**127, 0.0, 0.0] * 2
    # Scales end at 2^-126, whose smallest numbers are 2^-9 or 2^-16 of that: denormals down to there are exact.
    smallest = {"e4m3": 2.0**-135, "e5m2": 2.0**-142}[format]
    x = torch.tensor([1.0, 3.0, -7.0, 0.0] * 2) * smallest
    assert torch.equal(codec.round_trip(x), x)
    assert torch.equal(codec.round_trip(x[:1].repeat(8) * 0.5), torch.zeros(8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_block_does_not_touch_its_neighbours(bad: float) -> None:
    x = spread(300)
    x[130] = bad
    codec = BlockFloat8()
    y = codec.round_trip(x)
    assert y[128:256].isnan().all()
    assert torch.equal(y[:128], codec.round_trip(x[:128]))
    assert torch.equal(y[256:], codec.round_trip(x[256:]))
    payload = codec.encode(x)
    assert not payload[128:256].any()
    codec.add(payload, torch.ones(300))
    assert codec.decode(payload, shape=(300,))[128:256].isnan().all(), "and stays bad"


def test_adding_is_decoding_adding_and_coding() -> None:
    for codec in (BlockFloat8(), BlockFloat8(format="e5m2", block=32)):
        for dtype in (torch.float32, torch.bfloat16):
            x, more = spread(7, 77), spread(7, 77, seed=1).to(dtype)
            payload = codec.encode(x)
            total = codec.decode(payload, shape=x.shape) + more.float()
            assert codec.add(payload, more) is payload
            assert torch.equal(payload, codec.encode(total))


def test_stochastic_rounding_is_unbiased_and_repeatable() -> None:
    codec = BlockFloat8(block=32, rounding="stochastic")
    x = spread(64, octaves=5)
    torch.manual_seed(0)
    once = codec.round_trip(x)
    trips = torch.stack([codec.round_trip(x) for _ in range(2000)])
    block = x.view(2, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(-1)
    unit = torch.maximum(x.abs(), 2 * block / RANGE["e4m3"]) / 8
    # A rounding deviates by half a unit at most; six deviations of a mean of 2000.
    assert ((trips.mean(0) - x).abs() <= 6 * unit / 2 / 2000**0.5).all()
    assert ((trips - x).abs() <= unit).all()
    assert not torch.equal(trips[0], trips[1])
    torch.manual_seed(0)
    assert torch.equal(codec.round_trip(x), once)


def test_long_sums_survive_stochastic_rounding_only() -> None:
    """200 equal parts: nearest stops growing where a part is below half a unit of the sum."""
    torch.manual_seed(0)
    part = torch.full((1280,), 0.01)
    found = {}
    for rounding in ("nearest", "stochastic"):
        codec = BlockFloat8(rounding=rounding)
        payload = codec.encode(part)
        for _ in range(199):
            codec.add(payload, part)
        found[rounding] = codec.decode(payload, shape=part.shape).mean().item() / 2
    assert found["nearest"] < 0.25
    assert found["stochastic"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("codec", [BlockFloat8(), BlockFloat8(format="e5m2", block=32)], ids=repr)
@pytest.mark.parametrize("numel", [1, 200, 256, 1025])
def test_a_payload_is_cut_as_if_the_parts_had_been_coded(codec: BlockFloat8, numel: int) -> None:
    x = spread(numel)
    x[numel // 2 :] *= math.inf
    payload = torch.zeros(codec.format_nbytes((numel,)), dtype=torch.uint8)
    codec._encode(x, payload)
    for start in range(0, numel, codec.unit):
        for stop in {min(start + codec.unit, numel), numel}:
            part, expected = (torch.zeros(codec.format_nbytes((stop - start,)), dtype=torch.uint8) for _ in range(2))
            codec.copy_units(payload, start, part, 0, stop - start, numel=(numel, stop - start))
            codec._encode(x[start:stop].clone(), expected)
            assert torch.equal(part, expected)
            back = payload.clone()
            codec.copy_units(part, 0, back, start, stop - start, numel=(stop - start, numel))
            assert torch.equal(back, payload)
