"""`SubspaceQuant()`: its numbers follow from the shape, alike at both ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit import kernels
from lowbit.codecs import SubspaceQuant, backward_codec, parse
from lowbit.codecs.subspace_quant.layout import suited

WIDTHS = (1, 2, 7, 8, 31, 32, 48, 64, 130)
CODECS = [SubspaceQuant(), SubspaceQuant(bits=4), SubspaceQuant(refresh=2), SubspaceQuant(directions=1)]


@pytest.mark.parametrize(
    ("channels", "directions"),
    [(0, 1), (1, 1), (15, 1), (16, 2), (32, 4), (48, 6), (64, 8), (128, 16), (130, 16), (256, 32), (4096, 32)],
)
def test_directions_follow_from_the_width(channels: int, directions: int):
    assert {suited(rows, channels)[0] for rows in (0, 1, 8, 256, 100_000)} == {directions}


@pytest.mark.parametrize(
    ("rows", "renewed"), [(0, 1), (1, 1), (8, 1), (63, 1), (64, 2), (96, 3), (128, 4), (256, 4), (2048, 4)]
)
def test_their_renewal_follows_from_the_tokens(rows: int, renewed: int):
    assert suited(rows, 4096) == (32, -(-32 // renewed))
    assert suited(rows, 128) == (16, 16 if renewed == 1 else 8)
    assert suited(rows, 32) == (4, 4)


@pytest.mark.parametrize("channels", [*WIDTHS, 256, 4096])
def test_directions_and_their_renewal_stay_cheap(channels: int):
    for rows in (*range(1, 200), 2048):
        geo = SubspaceQuant().geometry((rows, channels))
        assert geo.directions <= channels / 8 or geo.directions == 1
        assert 8 * geo.renewed / rows <= 1 / 4 or geo.renewed == 1
        assert geo.renewed <= -(-geo.directions // 8)
        assert geo.pause == 1, "every message pays for new directions, so every message brings some"


def test_a_number_that_is_said_stays_and_the_other_follows_from_it():
    for shape in ((128, 256), (2, 256, 512), (1, 2048, 4096), (4, 128, 1024)):
        assert SubspaceQuant().geometry(shape) == SubspaceQuant(directions=32, refresh=8).geometry(shape)
    for directions in (8, 16, 32, 64):
        named = SubspaceQuant(directions=directions).geometry((512, 256))
        assert named == SubspaceQuant(directions=directions, refresh=8).geometry((512, 256))
    assert SubspaceQuant(directions=256).geometry((64, 256)).renewed == 2
    assert SubspaceQuant(refresh=2).geometry((512, 128)) == SubspaceQuant(directions=16, refresh=2).geometry((512, 128))


def test_names_leave_to_the_shape_what_they_do_not_say():
    assert repr(SubspaceQuant()) == "SubspaceQuant(bits=3, group=64)"
    for codec in (*CODECS, SubspaceQuant(directions="auto"), SubspaceQuant(directions=5, refresh=9)):
        assert parse(repr(codec)) == codec
    assert parse("SubspaceQuant(directions=None)") == parse("subspace")
    assert backward_codec(SubspaceQuant()) == parse("subspace-backward")
    assert len({codec.fingerprint() for codec in (SubspaceQuant(), SubspaceQuant(directions=32, refresh=8))}) == 2
    assert not any(SubspaceQuant().advice((rows, width)) for rows in (1, 64, 4096) for width in (*WIDTHS, 4096))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CODECS),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=4),
    st.sampled_from(WIDTHS),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_both_ends_agree_on_every_shape(
    codec: SubspaceQuant, leading: list[tuple[int, int]], width: int, dtype: torch.dtype
):
    """Messages of several shapes and one width, which share their directions."""
    shapes = [(*each, width) for each in leading]
    with kernels.backend("reference"):
        first, second = (codec.open(shape=shapes[0], dtype=dtype) for _ in range(2))
        ends = [(first.sharing_state(shape=s, dtype=dtype), second.sharing_state(shape=s, dtype=dtype)) for s in shapes]
        for seed, (shape, (sender, receiver)) in enumerate([*zip(shapes, ends, strict=True)] * 3):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            payload = sender.encode(x)
            assert payload.numel() == codec.nbytes(shape, dtype) == receiver.nbytes() == receiver.max_nbytes()
            y = receiver.decode(payload)
            assert not x.numel() or (y.float() - x.float()).norm() < 0.3 * x.float().norm()
        here, there = first.state_dict(), second.state_dict()
    assert here.keys() == there.keys()
    assert all(torch.equal(torch.as_tensor(here[k]), torch.as_tensor(there[k])) for k in here)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_single_token_at_a_time(width: int):
    """As a plain tensor where that is shorter; what is coded stays as near as its bits allow."""
    shape = (1, 1, width)
    sender, receiver = (SubspaceQuant().open(shape=shape, dtype=torch.float32) for _ in range(2))
    for seed in range(5):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        payload = sender.encode(x)
        assert payload.numel() <= 4 * math.prod(shape)
        assert (receiver.decode(payload) - x).norm() <= 0.2 * x.norm()


def test_the_state_of_another_rule_is_refused():
    narrow = SubspaceQuant().open(shape=(4, 64), dtype=torch.float32)
    fixed = SubspaceQuant(directions=32).open(shape=(4, 64), dtype=torch.float32)
    assert narrow.state_bytes() == 4 * 64 * 8 + 16
    with pytest.raises(ValueError, match=r"directions of shape \(32, 64\); expected .* = \(8, 64\)"):
        narrow.load_state_dict(fixed.state_dict())
