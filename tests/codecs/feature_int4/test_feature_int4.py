from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import FeatureInt4, GroupInt

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(
    ranks: int, size: int, outliers: tuple[int, ...], rows: int, dtype: torch.dtype = torch.float32
) -> tuple[FeatureInt4, list[Tensor]]:
    """Ranges, and partial sums of which some exceed them; every rank's are other ones."""
    g = torch.Generator().manual_seed(ranks + size + rows)
    ranges = torch.exp(2 * torch.randn(ranks, size, generator=g))
    total = ranges.sum(0) * 0.7
    codec = FeatureInt4(ranges=ranges, total=total, features=outliers)
    parts = [torch.randn(rows, size, generator=g) * ranges[r] * 0.7 for r in range(ranks)]
    for part in parts:
        part[:, list(outliers)] *= 50
    return codec, [part.to(dtype) for part in parts]


def slowly(codec: FeatureInt4, x: Tensor, rank: int) -> Tensor:
    """What element after element becomes, in Python; float32, any shape of whole rows."""
    y = x.float().reshape(-1, codec.grain).clone()
    for n in range(y.shape[0]):
        for e in range(y.shape[1]):
            value = y[n, e]
            if e in codec.features:
                largest = torch.finfo(torch.bfloat16).max
                kept = value.clamp(-largest, largest) if value.isfinite() else value
                y[n, e] = kept.bfloat16().float()
            elif value.isfinite():
                scale = (codec.ranges[rank, e] / 7).clamp(2.0**-126, 2.0**125)
                y[n, e] = (value * (1 / scale)).round().clamp(-7, 7) * scale
            else:
                y[n, e] = math.nan
    return y.view(x.shape)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


SHAPES = [(3, 64, (7,)), (3, 71, (0, 1, 70)), (1, 7, (2, 4)), (2, 1, ()), (4, 33, tuple(range(1, 33))), (3, 96, ())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_what_the_formulas_say(dtype: torch.dtype):
    for rows, size, outliers in SHAPES if dtype == torch.bfloat16 else SHAPES[1:4]:
        codec, parts = made(3, size, outliers, rows, dtype)
        parts[0].view(-1)[:1] = math.nan
        parts[1].view(-1)[-1:] = math.inf
        parts[2].view(-1)[: size // 2] = torch.finfo(dtype).max
        expected = [slowly(codec, x, r) for r, x in enumerate(parts)]
        for name in ("reference", "cpu"):
            with kernels.backend(name):
                payloads = [codec.part(r).encode(x) for r, x in enumerate(parts)]
                total = torch.zeros(rows, size)
                for r, x in enumerate(parts):
                    assert payloads[r].numel() == codec.nbytes(x.shape)
                    y = codec.part(r).decode(payloads[r], shape=x.shape)
                    assert same(y, expected[r]), (rows, size, outliers, name)
                    total = y if r == 0 else total + y
                    added = codec.part(r).decode(payloads[r], shape=x.shape, out=y.clone(), accumulate=True)
                    assert same(added, y + y)
                assert same(codec.sum(payloads, out=torch.empty(rows, size)), total)
                halves = codec.sum(payloads, out=torch.empty(rows, size, dtype=dtype), divisor=3)
                limit = torch.finfo(torch.float16).max if dtype == torch.float16 else math.inf
                third = total / 3
                cut = torch.where(third.isfinite(), third.clamp(-limit, limit), third)
                assert same(halves, cut.to(dtype))


def test_backends_give_the_same_bytes_on_any_number_of_threads():
    """Enough rows for several threads, and features that do not fill vectors."""
    codec, (x, _) = made(2, 200, (3, 64, 199), 401, torch.bfloat16)
    clipped = torch.zeros(2, dtype=torch.int64)
    found = []
    for name in ("reference", "cpu"):
        with kernels.backend(name):
            room = torch.full((codec.nbytes(x.shape) + 128,), 77, dtype=torch.uint8)
            inside = room[64 : 64 + codec.nbytes(x.shape)]
            codec.counting(clipped).encode(x, out=inside)
            assert room[:64].eq(77).all()
            assert room[-64:].eq(77).all()
            found.append((inside.clone(), clipped.tolist()))
            clipped.zero_()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    outside = (x.float() * (7 / codec.ranges[0])).abs()
    outside[:, list(codec.features)] = 0
    assert 0 < found[0][1][0] == int((outside >= 7.5).sum())
    # The fused sum of a flat piece of whole rows is that of the rows.
    payload = codec.encode(x)
    flat = codec.sum([payload, codec.part(1).encode(x)], out=torch.empty(x.numel()))
    halves = [codec.sum([codec.part(r).encode(h) for r in (0, 1)], out=torch.empty(h.shape)) for h in x.split(200)]
    assert torch.equal(flat.view(x.shape), torch.cat(halves))


def test_what_is_cut_is_counted_for_parts_and_sums_apart():
    codec, (x, _) = made(2, 64, (5,), 8)
    clipped = torch.zeros(2, dtype=torch.int64)
    counting = codec.counting(clipped)
    assert counting == codec
    assert counting.fingerprint() == codec.fingerprint()
    bad = torch.zeros_like(x)
    bad[0, 5], bad[1, 6], bad[2, 7], bad[3, 8] = math.nan, math.inf, 1e9, float(codec.ranges[0, 8])
    counting.part(0).encode(bad)
    assert clipped.tolist() == [3, 0]
    counting.whole().encode(bad)
    assert clipped.tolist() == [3, 3]
    with pytest.raises(ValueError, match=r"clipped is torch\.float32 \(2,\); allowed: contiguous int64"):
        codec.counting(torch.zeros(2))


def test_layout_is_the_documented_one():
    codec = FeatureInt4(ranges=torch.full((1, 6), 7.0), total=torch.ones(6), features=(1,))
    x = torch.tensor([[1.0, 3.0, -2.0, 7.0, -7.0, 0.4], [0.5, -3.0, 1.5, 100.0, math.nan, -0.6]])
    payload = codec.encode(x)
    assert payload[:4].view(torch.bfloat16).tolist() == [3.0, -3.0]
    assert payload[4:16].eq(0).all()
    # Rows 1 -2 7 -7 0 and 0 2 7 NaN -1: bytes (1, -7) (-2, 0) (7, 0), (0, NaN) (2, -1) (7, 0).
    assert payload[16:].tolist() == [0x91, 0x0E, 0x07, 0x80, 0xF2, 0x07]
    assert codec.nbytes(x.shape) == 22
    assert not codec.decode(torch.zeros_like(payload), shape=x.shape).any()


def test_bits_are_those_of_the_paper():
    codec = FeatureInt4(ranges=torch.ones(2, 4096), total=torch.ones(4096), features=tuple(range(0, 4096, 64)))
    assert codec.bits_per_element((128, 4096)) == (16 * 64 + 4 * 4032) / 4096 == 4.1875


def test_outliers_are_why_it_beats_plain_int4():
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(256, 128, generator=g) for _ in range(2)]
    for part in parts:
        part[:, 77] *= 100 * torch.randn(256, generator=g) ** 3
    exact = (parts[0] + parts[1]).double()

    def error(codec: FeatureInt4 | GroupInt) -> float:
        y = codec.sum([codec.part(r).encode(p) for r, p in enumerate(parts)], out=torch.empty(256, 128))
        return float((y - exact).norm() / exact.norm())

    fitted, plain = FeatureInt4.fit(parts, outliers=2), FeatureInt4.fit(parts, outliers=0)
    assert 77 in fitted.features
    assert error(fitted) < 0.2 * min(error(plain), error(GroupInt(bits=4, group=64)))


def test_extreme_ranges_stay_finite():
    ranges = torch.tensor([[1e-45, 1e-38, 3.4e38, 1.0]])
    codec = FeatureInt4(ranges=ranges, total=ranges[0], features=())
    for x in (ranges, -ranges, torch.full((1, 4), 3.4e38), torch.zeros(1, 4)):
        for name in ("reference", "cpu"):
            with kernels.backend(name):
                assert codec.round_trip(x).isfinite().all()
    assert codec.round_trip(ranges.clamp(max=2e38))[0, 2] == pytest.approx(2e38, rel=0.1)


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
    other = FeatureInt4(ranges=ranges, total=codec.total, features=(1,))
    assert other != codec
    assert other.identity() != codec.identity()
    ranges.zero_()
    assert other.ranges.all(), "what it was made of may change"
    named = [FeatureInt4(ranges=c.ranges, total=c.total, features=(1,), artifact="one") for c in (codec, other)]
    assert named[0] != named[1]
    assert named[0].layer() == named[0].part(1).layer() != named[1].layer()
    assert codec.layer() == ""
    assert named[0].identity() == named[1].part(1).identity() == "FeatureInt4 of artifact one"
    assert (codec.grain, codec.ranks, codec.whole().ranks, GroupInt().grain) == (8, 3, 1, 1)
    assert repr(codec).startswith("FeatureInt4(8 features, 1 outliers, rank 0 of 3, ")


ONES = {"ranges": torch.ones(2, 4), "total": torch.ones(4), "features": ()}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ranges": torch.ones(4)}, ValueError, r"ranges is \(4,\); allowed: a tensor of \(ranks, features\)"),
        ({"ranges": torch.ones(2, 4).double()}, TypeError, r"ranges is torch\.float64; allowed: a float32 tensor"),
        ({"ranges": torch.tensor([[1.0, 1], [1, 0]]), "total": torch.ones(2)}, ValueError,
         r"ranges\[1, 1\], the range of feature 1, is 0; allowed: finite and above 0"),
        ({"ranges": torch.tensor([[1, torch.nan, 1, 1]])}, ValueError, r"feature 1, is nan; allowed: finite"),
        ({"total": torch.ones(3)}, ValueError, r"total has shape \(3,\); allowed: \(4,\)"),
        ({"total": torch.tensor([1, 1, 1, torch.inf])}, ValueError, r"total\[3\], the range of feature 3, is inf"),
        ({"features": [1]}, TypeError, r"features is \[1\]; allowed: a tuple of integers"),
        ({"features": (2, 1)}, ValueError, r"features is \(2, 1\); allowed: ascending, from 0 to 3"),
        ({"features": (1, 4)}, ValueError, r"features is \(1, 4\); allowed: ascending"),
        ({"features": (0, 1, 2, 3)}, ValueError, "features are 4; allowed: fewer than the 4 there are"),
        ({"rank": 2}, ValueError, "rank is 2; allowed: 0 to 1"),
        ({"artifact": 3}, TypeError, "artifact is 3"),
    ],
)  # fmt: skip
def test_bad_settings(change: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        FeatureInt4(**(ONES | change))


def test_shapes_and_payloads_that_do_not_fit_are_refused():
    codec = FeatureInt4(**ONES)
    assert codec.encode(torch.empty(0, 4)).numel() == 0
    assert codec.sum([], out=torch.empty(0, 4)).shape == (0, 4)
    for shape in ((2, 3), (4, 2), (7,), ()):
        with pytest.raises(ValueError, match=r"allowed: \(..., 4\), or one dimension of a multiple of 4"):
            codec.encode(torch.ones(shape))
    payload = codec.encode(torch.ones(2, 4))
    with pytest.raises(ValueError, match="payloads are 1; allowed: 2, one for each rank"):
        codec.sum([payload], out=torch.empty(2, 4))
    with pytest.raises(ValueError, match="expected 4 contiguous uint8"):
        codec.sum([payload, payload[:-1]], out=torch.empty(2, 4))
    for out in (torch.empty(4, 2), torch.empty(7)):
        with pytest.raises(ValueError, match="shape is"):
            codec.sum([payload, payload], out=out)
    with pytest.raises(ValueError, match="rank is 2; allowed: 0 to 1"):
        codec.part(2)
    with pytest.raises(ValueError, match=r"parts have shapes \[\(2,\), \(3,\)\]"):
        FeatureInt4.fit([torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match=r"parts have shapes \[\(0, 8\)\]; .* not empty"):
        FeatureInt4.fit([torch.ones(0, 8)])
    zero = torch.tensor([[1.0, 0, 1]])
    with pytest.raises(ValueError, match=r"ranges\[1, 1\], the range of feature 1, is 0"):
        FeatureInt4.fit([zero + 1, zero])
    with pytest.raises(ValueError, match=r"total\[1\], the range of feature 1, is 0"):
        FeatureInt4.fit([zero + 1, torch.tensor([[3.0, -1, 3]])])
    with pytest.raises(ValueError, match="outliers is 4; allowed: 0 to 3"):
        FeatureInt4.fit([torch.ones(4)], outliers=4)
