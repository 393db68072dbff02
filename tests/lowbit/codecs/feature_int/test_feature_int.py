import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import FeatureInt, GroupInt
from tests.refused import refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(
    ranks: int, size: int, outliers: tuple[int, ...], rows: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[FeatureInt, list[Tensor]]:
    """Ranges and means, and partial sums of tokens that differ, of which some exceed them; every rank's others."""
    g = torch.Generator().manual_seed(ranks + size + rows)
    ranges = torch.exp(2 * torch.randn(ranks, size, generator=g))
    offsets = torch.randn(ranks, size, generator=g) * ranges
    tables = {"ranges": ranges, "total": ranges.sum(0) * 0.7, "offsets": offsets, "total_offset": offsets.sum(0)}
    codec = FeatureInt(**tables, features=outliers, **settings)
    tokens = torch.exp(torch.randn(rows, 1, generator=g))
    parts = [torch.randn(rows, size, generator=g) * ranges[r] * tokens * 0.7 + offsets[r] for r in range(ranks)]
    for part in parts:
        part[:, list(outliers)] *= 50
    return codec, [part.to(dtype) for part in parts]


def slowly(codec: FeatureInt, x: Tensor, rank: int) -> Tensor:
    """What element after element becomes, in Python, without offsets; float32, any shape of whole rows."""
    y = x.float().reshape(-1, codec.grain).clone()
    center = torch.tensor(2.0 ** (codec.bits - 1) - (0.5 if codec.gain == "token" else 1.0))
    assert codec.clip is not None
    share = torch.tensor(codec.clip / float(center))
    for row in y:
        v = {e: (row[e] - offsets_of(codec)[rank, e]) * (1 / codec.ranges[rank, e])
             for e in range(codec.grain) if e not in codec.features}  # fmt: skip
        finite = all(value.isfinite() for value in v.values())
        most = max(value.abs() for value in v.values()) if finite else torch.tensor(1.0)
        gain = (most * share).clamp(min=2.0**-126).bfloat16().float() if most > 0 else torch.tensor(0.0)
        gain = gain if codec.gain == "token" else share
        for e in range(codec.grain):
            if e in codec.features:
                largest = torch.finfo(torch.bfloat16).max
                kept = row[e].clamp(-largest, largest) if row[e].isfinite() else row[e]
                row[e] = kept.bfloat16().float()
            elif finite:
                code = (v[e] * (1 / gain if gain > 0 else 1) + center).clamp(0, float(2 * center)).round()
                row[e] = (code - center) * gain * codec.ranges[rank, e]
            else:
                row[e] = math.nan
    return y.view(x.shape)


def offsets_of(codec: FeatureInt) -> Tensor:
    """Of each rank, (R, E), 0 at the outliers."""
    offsets = torch.zeros_like(codec.ranges) if codec.offsets is None else codec.offsets.clone()
    offsets[:, list(codec.features)] = 0
    return offsets


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


SHAPES = [(3, 64, (7,)), (3, 71, (0, 1, 70)), (2, 7, (2, 4)), (12, 3, ()), (4, 33, tuple(range(1, 33))), (3, 300, ())]


@pytest.mark.parametrize(("bits", "gain"), [*((bits, "token") for bits in range(3, 9)), (4, "static"), (7, "static")])
def test_every_element_is_what_the_formulas_say(bits: int, gain: str):
    for i, (rows, size, outliers) in enumerate(SHAPES):
        dtype = DTYPES[(i + bits) % 3]
        codec, parts = made(3, size, outliers, rows, dtype, bits=bits, gain=gain)
        parts[0].view(-1)[:1] = math.nan
        parts[1].view(-1)[[0, -1]] = torch.tensor([-math.inf, math.inf], dtype=dtype)
        parts[2].view(-1)[: size // 2] = torch.finfo(dtype).max
        parts[2][-1] = codec.offsets[2].to(dtype)  # pyright: ignore[reportOptionalSubscript]
        values, offsets = [slowly(codec, x, r) for r, x in enumerate(parts)], offsets_of(codec)
        limit = torch.finfo(torch.float16).max if dtype == torch.float16 else math.inf
        for name in ("reference", "cpu"):
            with kernels.backend(name):
                payloads = [codec.part(r).encode(x) for r, x in enumerate(parts)]
                total, added = values[0], offsets[0]
                for r, x in enumerate(parts):
                    assert payloads[r].numel() == codec.nbytes(x.shape)
                    y = codec.part(r).decode(payloads[r], shape=x.shape)
                    assert same(y, values[r] + offsets[r]), (rows, size, outliers, name)
                    twice = codec.part(r).decode(payloads[r], shape=x.shape, out=y.clone(), accumulate=True)
                    assert same(twice, y + y)
                    total, added = (total, added) if r == 0 else (total + values[r], added + offsets[r])
                total = total + added
                assert same(codec.sum(payloads, out=torch.empty(rows, size)), total)
                thirds = codec.sum(payloads, out=torch.empty(rows, size, dtype=dtype), divisor=3)
                third = total / 3
                cut = torch.where(third.isfinite(), third.clamp(-limit, limit), third)
                assert same(thirds, cut.to(dtype))


@pytest.mark.parametrize("bits", [4, 7, 8])
def test_backends_give_the_same_bytes_on_any_number_of_threads(bits: int):
    """Enough rows for several threads, and features that do not fill vectors."""
    codec, (x, _) = made(2, 200, (3, 64, 199), 401, torch.bfloat16, bits=bits)
    found = []
    for name in ("reference", "cpu"):
        with kernels.backend(name):
            room = torch.full((codec.nbytes(x.shape) + 128,), 77, dtype=torch.uint8)
            inside = room[64 : 64 + codec.nbytes(x.shape)]
            codec.encode(x, out=inside)
            assert room[:64].eq(77).all()
            assert room[-64:].eq(77).all()
            found.append(inside.clone())
    assert torch.equal(*found)
    # The fused sum of a flat piece of whole rows is that of the rows.
    payload = codec.encode(x)
    flat = codec.sum([payload, codec.part(1).encode(x)], out=torch.empty(x.numel()))
    halves = [codec.sum([codec.part(r).encode(h) for r in (0, 1)], out=torch.empty(h.shape)) for h in x.split(200)]
    assert torch.equal(flat.view(x.shape), torch.cat(halves))


def test_layout_is_the_documented_one():
    ones = {"ranges": torch.ones(1, 6), "total": torch.ones(6), "features": (1,)}
    x = torch.tensor([[7.5, 3.0, -7.5, 0.9, 0.0, -0.1], [0.0] * 6, [-1.0, math.nan, 15.0, 1.0, 2.1, 3.0]])
    codec = FeatureInt(**ones, clip=1.0)
    payload = codec.encode(x)
    assert payload[:6].view(torch.bfloat16).tolist() == [1.0, 0.0, 2.0]
    assert payload[6:16].eq(0).all()
    assert payload[16:22].view(torch.bfloat16)[:2].tolist() == [3.0, 0.0]
    assert payload[22:32].eq(0).all()
    # Codes 15 0 8 8 7; 8 8 8 8 8, as ties go to even; 7 15 8 9 9: bytes (15, 8) (0, 7) (8, 0), ...
    assert payload[32:].tolist() == [0x8F, 0x70, 0x08, 0x88, 0x88, 0x08, 0x97, 0x9F, 0x08]
    assert codec.nbytes(x.shape) == 41
    assert codec.round_trip(x)[0].tolist() == [7.5, 3.0, -7.5, 0.5, 0.5, -0.5]
    assert not codec.decode(torch.zeros_like(payload), shape=x.shape).any()
    five = FeatureInt(**ones, clip=1.0, bits=5).encode(torch.tensor([[15.5, 3.0, -15.5, 0.9, 0.0, -0.1]] * 3))
    # Codes 31 0 16 16 15: 15 0 0 0 15 below, 1 0 1 1 0 above.
    assert five[32:36].tolist() == [0x0F, 0xF0, 0x00, 0b01101]
    zeros = FeatureInt(**ones, offsets=torch.full((1, 6), 3.0), total_offset=torch.full((6,), 3.0))
    assert zeros.decode(torch.zeros_like(payload), shape=x.shape)[0].tolist() == [3.0, 0.0, 3.0, 3.0, 3.0, 3.0]


def test_bits_count_gains_and_planes():
    ones = {"ranges": torch.ones(2, 4096), "total": torch.ones(4096), "features": tuple(range(0, 4096, 64))}
    for bits in range(3, 9):
        codec = FeatureInt(**ones, bits=bits)
        assert codec.bits_per_element((128, 4096)) == (16 + 16 * 64 + bits * 4032) / 4096
    small = FeatureInt(ranges=torch.ones(2, 384), total=torch.ones(384), features=tuple(range(6)))
    assert small.bits_per_element((128, 384)) == (16 + 16 * 6 + 4 * 378) / 384 < 4.25


def test_static_ranges_are_the_published_format():
    """A symmetric INT4 of each feature by its range alone; no gain travels."""
    g = torch.Generator().manual_seed(0)
    codec = FeatureInt(ranges=torch.rand(2, 4096, generator=g) + 0.5, total=torch.ones(4096),
                       features=tuple(range(0, 4096, 64)), gain="static")  # fmt: skip
    x, step = torch.randn(24, 4096, generator=g) * torch.arange(24)[:, None] / 12, codec.ranges[0] / 7
    expected = (x / step).round().clamp(-7, 7) * step
    expected[:, ::64] = x[:, ::64].bfloat16().float()
    torch.testing.assert_close(codec.round_trip(x), expected)
    assert codec.bits_per_element(x.shape) == (16 * 64 + 4 * 4032) / 4096


def test_extreme_ranges_stay_finite():
    ranges = torch.tensor([[1e-45, 1e-38, 3.4e38, 1.0]])
    codec = FeatureInt(ranges=ranges, total=ranges[0], features=())
    for x in (ranges, -ranges, torch.zeros(1, 4), torch.full((1, 4), 1e-44)):
        for name in ("reference", "cpu"):
            with kernels.backend(name):
                assert codec.round_trip(x).isfinite().all()
    assert codec.round_trip(ranges.clamp(max=2e38))[0, 2] == pytest.approx(2e38, rel=0.3)


def test_parts_whole_identity_and_equality():
    codec, _ = made(3, 8, (1,), 1)
    again, _ = made(3, 8, (1,), 1)
    assert codec == again
    assert hash(codec) == hash(again)
    assert codec.part(2) != codec
    assert codec.part(2).part(0) == codec
    assert codec.part(2).identity() == codec.identity() == again.identity()
    prints = {c.fingerprint() for c in (codec, codec.part(1), codec.whole(), codec.part(1).whole())}
    assert len(prints) == 3
    ranges = codec.ranges.clone()
    ranges[2, 7] *= 2
    other = FeatureInt(ranges=ranges, total=codec.total, features=(1,))
    assert other != codec
    assert other.identity() != codec.identity()
    ranges.zero_()
    assert other.ranges.all(), "what it was made of may change"
    named = [FeatureInt(ranges=c.ranges, total=c.total, features=(1,), artifact="one") for c in (codec, other)]
    assert named[0] != named[1]
    assert named[0].layer() == named[0].part(1).layer() != named[1].layer()
    assert codec.layer() == ""
    assert named[0].identity() == named[1].part(1).identity() == "FeatureInt of artifact one"
    assert (codec.grain, codec.ranks, codec.whole().ranks, GroupInt().grain) == (8, 3, 1, 1)
    assert repr(codec).startswith("FeatureInt(4 bits, token gain, clip 0.8, 8 features, 1 outliers, rank 0 of 3, ")


def test_shapes_and_payloads_that_do_not_fit_are_refused():
    ones, zero = torch.ones(4), torch.tensor([[1.0, 0, 1]])
    codec, fit = FeatureInt(ranges=torch.ones(2, 4), total=ones, features=()), FeatureInt.fit
    assert codec.encode(torch.empty(0, 4)).numel() == 0
    assert codec.sum([], out=torch.empty(0, 4)).shape == (0, 4)
    one, two = codec.encode(torch.ones(2, 4)), torch.empty(2, 4)
    shape = r"shape is \(.*\); allowed: \(..., 4\), or one dimension of a multiple of 4"
    refused(
        *((partial(codec.encode, torch.ones(size)), ValueError, shape) for size in ((2, 3), (4, 2), (7,), ())),
        *((partial(codec.sum, [one, one], out=torch.empty(size)), ValueError, shape) for size in ((4, 2), (7,))),
        (lambda: codec.sum([one], out=two), ValueError, "payloads are 1; allowed: 2, one for each rank"),
        (lambda: codec.sum([one, one[:-1]], out=two), ValueError, "expected 20 contiguous uint8"),
        (lambda: codec.part(2), ValueError, "rank is 2; allowed: 0 to 1"),
        (lambda: fit([torch.ones(2), torch.ones(3)]), ValueError, r"parts have shapes \[\(2,\), \(3,\)\]"),
        (lambda: fit([torch.ones(0, 8)]), ValueError, r"parts have shapes \[\(0, 8\)\]; .* not empty"),
        (lambda: fit([zero + 1, zero]), ValueError, r"ranges\[1, 1\], the range of feature 1, is 0"),
        (
            lambda: fit([zero + 1, torch.tensor([[3.0, -1, 3]])]),
            ValueError,
            r"total\[1\], the range of feature 1, is 0",
        ),
        (lambda: fit([ones], outliers=4), ValueError, "outliers is 4; allowed: 0 to 3"),
    )


def test_a_feature_that_was_constant_does_not_set_the_gain_of_the_others() -> None:
    """The mean of equal numbers is rounded, so that their distance from it is not zero."""
    part = torch.randn(1000, 64)
    part[:, 5] = 0.1
    for means in (True, False):
        codec = FeatureInt.fit([part, part], means=means)
        assert float(codec.ranges[0, 5]) == pytest.approx(0.1)
        later = torch.randn(64, 64)
        later[:, 5] = 0.11
        others = [i for i in range(64) if i != 5]
        error = (codec.part(0).round_trip(later) - later)[:, others].square().mean() / later[:, others].square().mean()
        assert error < 0.03
    part[:, 5] += 1e-6 * torch.randn(1000)  # hardly varies
    assert float(FeatureInt.fit([part, part]).ranges[0, 5]) > 0.03
    assert float(FeatureInt.fit([part, part], gain="static").ranges[0, 5]) < 1e-5


def test_sums_take_a_payload_of_each_rank() -> None:
    codec, parts = made(2, 64, (3,), 1)
    payloads = [codec.part(rank).encode(part) for rank, part in enumerate(parts)]
    for wrong in (payloads[:1], payloads * 2, []):
        with pytest.raises(ValueError, match="allowed: 2, one for each rank"):
            codec.sum(wrong, out=torch.empty(1, 64))
    for divisor, error in ((0, ValueError), (-2, ValueError), (0.5, TypeError)):
        with pytest.raises(error, match="divisor is"):
            GroupInt().sum([GroupInt().encode(parts[0])], out=torch.empty(1, 64), divisor=divisor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="payloads are 0"):
        GroupInt().sum([], out=torch.empty(1, 64))
    with pytest.raises(ValueError, match="clip is None"):
        codec.like(bits=4, clip=None)  # type: ignore[arg-type]
