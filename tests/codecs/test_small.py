"""No payload takes more than the plain tensor: small ones go as they are, and both ends know that from the shape."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import AQSGD, BlockFloat8, Cast, Codec, FeatureInt, GroupInt, TAHQuant, TransformQuant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    (), (1,), (2,), (3,), (0,), (1, 1), (2, 3, 0), (0, 5, 64), (1, 1, 8), (1, 1, 64), (2, 5, 7), (1, 1, 1000),
    (1, 2, 1024), (1, 8, 256), (3, 33, 65), (64, 2), (300, 1), (2, 70, 8),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _slow_but_nothing_to_compile() -> Iterator[None]:
    with kernels.backend("reference"):
        yield


def stateless(shape: tuple[int, ...]) -> st.SearchStrategy[Codec]:
    group = st.sampled_from([8, 32, 64, 1024])
    size = shape[-1] if shape and shape[-1] else 1
    found = [
        st.builds(GroupInt, bits=st.integers(2, 8), group=group, symmetric=st.booleans()),
        st.builds(BlockFloat8, block=st.sampled_from([32, 128, 4096])),
        st.builds(
            TAHQuant,
            tile=st.sampled_from([8, 64]),
            pivot_ratio=st.sampled_from([None, 2.0]),
            allocation=st.sampled_from(["range", "tile", "token"]),
        ),
    ]
    if not shape or shape[-1]:

        def of_outliers(k: int) -> Codec:
            ones = torch.ones(2, size)
            return FeatureInt(ranges=ones, total=ones[0], features=tuple(range(k)))

        found.append(st.integers(0, size - 1).map(of_outliers))
    return st.one_of(found)


def stateful(shape: tuple[int, ...]) -> st.SearchStrategy[Codec]:
    size = shape[-1] if shape else 1
    codecs = st.builds(TransformQuant, step=st.sampled_from(["token", "message"]))
    known = st.builds(AQSGD, inner=stateless(shape).filter(lambda c: c.grain == 1))
    return (st.one_of(codecs, known) if size else known) if shape else codecs


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if x.numel() > 2:
        x.view(-1)[seed % x.numel()] = (math.nan, math.inf, -0.0, 1e-45)[seed % 4]
    return x.to(dtype)


def same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(SHAPES), st.sampled_from(DTYPES))
def test_payloads_of_codecs(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec, x = data.draw(stateless(shape)), numbers(shape, dtype, 1)
    payload = codec.encode(x)
    assert payload.numel() == codec.nbytes(shape) <= 4 * x.numel()
    plain = codec.format_nbytes(shape) > 4 * x.numel()
    assert codec.sized(shape) == (payload.numel(), plain)
    assert plain or payload.numel() == codec.format_nbytes(shape)
    room = torch.zeros(payload.numel() + 3, dtype=torch.uint8)
    codec.encode(x, out=room[3:])
    y = codec.decode(room[3:], shape=shape, dtype=dtype)
    assert y.shape == x.shape
    if plain:
        assert same(x, y)
        assert same(codec.decode(payload, shape=shape), x.float())
        codec.add(payload, x)
        assert torch.equal(codec.decode(payload, shape=shape).nan_to_num(), (x.float() + x.float()).nan_to_num())
        parts = [codec.part(r).encode(x) for r in range(2)]
        total = codec.sum(parts, out=torch.empty(shape), divisor=2)
        assert torch.equal(total.nan_to_num(), x.float().nan_to_num())


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(SHAPES), st.sampled_from(DTYPES))
def test_messages_of_sessions(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec = data.draw(st.one_of(stateless(shape), stateful(shape)))
    sender, receiver = (codec.open(shape=shape, dtype=dtype) for _ in range(2))
    numel = math.prod(shape)
    most = numel * dtype.itemsize
    assert codec.nbytes(shape, dtype) <= most
    assert sender.max_nbytes() <= most
    plain = codec.format_nbytes(shape) > most
    for i, training in enumerate((True, True, False, True)):
        x = numbers(shape, dtype, i)
        sender.samples = receiver.samples = range(shape[0]) if codec.needs_key else None
        payload = sender.encode(x, training=training)
        assert payload.numel() <= sender.max_nbytes()
        y = receiver.decode(payload, training=training)
        assert payload.numel() == (codec.nbytes(shape, dtype) if i or not codec.needs_key else sender.max_nbytes())
        assert not plain or same(x, y)
        ends = sender.state_dict(), receiver.state_dict()
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(torch.as_tensor(a).nan_to_num(), torch.as_tensor(b).nan_to_num())
                   for a, b in zip(*(end.values() for end in ends), strict=True))  # fmt: skip
    if plain and isinstance(codec, AQSGD):
        assert sender.state_bytes() == 0, "what goes as it is need not be remembered"
    if plain and isinstance(codec, TransformQuant):
        assert sender.state_dict()["messages"] == 0


def test_a_cast_is_what_was_asked_for() -> None:
    codec = Cast(dtype=torch.float32)
    assert codec.open(shape=(3,), dtype=torch.bfloat16).nbytes() == codec.nbytes((3,), torch.bfloat16) == 12


def test_small_messages_between_large_ones_leave_the_directions_alone() -> None:
    """A plain message among those that build on each other: it may even be lost."""
    codec, g = TransformQuant(), torch.Generator().manual_seed(0)
    large, small = (2, 64, 64), (1, 1, 64)
    assert codec.sized(small, torch.bfloat16)[1]
    ends = [codec.open(shape=small, dtype=torch.bfloat16) for _ in range(2)]
    wide = [end.sharing_state(shape=large, dtype=torch.bfloat16) for end in ends]
    alone = [codec.open(shape=large, dtype=torch.bfloat16) for _ in range(2)]
    for i in range(6):
        x = torch.randn(large, generator=g).bfloat16()
        y = wide[1].decode(wide[0].encode(x))
        assert torch.equal(y, alone[1].decode(alone[0].encode(x)))
        little = torch.randn(small, generator=g).bfloat16()
        payload = ends[0].encode(little)
        assert payload.numel() == 128
        if i % 2:
            assert same(ends[1].decode(payload), little)


def test_kernels_that_read_payloads_never_get_plain_numbers() -> None:
    from lowbit.activations.recipes import FEWEST

    every = [
        GroupInt(bits=b, group=g, symmetric=s)
        for b in range(2, 9) for g in (8, 16, 24, 64, 65536) for s in (False, True)
    ]  # fmt: skip
    plain = {n for codec in every for n in range(1, 200) if codec.sized((n,))[1]}
    assert max(plain) == FEWEST - 1
