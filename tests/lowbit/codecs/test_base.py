"""What holds for every codec: sizes, shapes, dtypes, strides, bad input, fingerprints, sessions."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import (
    AQSGD,
    BlockFloat8,
    Cast,
    Codec,
    FeatureInt,
    GroupInt,
    RateGoal,
    Summable,
    TAHQuant,
    TransformQuant,
    parse,
)
from lowbit.codecs.names import parse_goal
from tests.lowbit.codecs.examples import every, room_of
from tests.refused import refused

CODECS: list[Codec] = every("CODECS")
SHAPES = [(2, 8, 128), (3, 5, 70), (1, 1), (4, 1), (7,), (1000,), (), (2, 0, 64), (0,), (2, 2, 3, 63)]


def relative_error(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm()) if x.numel() else 0.0


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_of_any_shape(codec: Codec, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.nbytes(shape),)
    y = codec.decode(payload, shape=shape, dtype=x.dtype)
    assert y.shape == x.shape
    assert relative_error(y, x) <= room_of(codec).expected_error(codec)
    assert codec.bits_per_element(shape) == (8 * len(payload) / x.numel() if x.numel() else 0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_strides_dtypes_out_and_accumulate(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.randn(6, 130, 5, generator=torch.Generator().manual_seed(2)).to(dtype).transpose(0, 2)
    torch.manual_seed(3)
    payload = codec.encode(x)
    torch.manual_seed(3)
    assert torch.equal(payload, codec.encode(x.contiguous()))
    torch.manual_seed(3)
    buffer = torch.full((codec.nbytes(x.shape),), 255, dtype=torch.uint8)
    assert torch.equal(payload, codec.encode(x, out=buffer))
    y = codec.decode(payload, shape=x.shape, dtype=dtype)
    out = torch.full((6, 130, 5), math.nan, dtype=dtype).transpose(0, 2)
    assert codec.decode(payload, shape=x.shape, out=out) is out
    assert torch.equal(out, y)
    codec.decode(payload, shape=x.shape, out=out, accumulate=True)
    exact = codec.decode(payload, shape=x.shape, dtype=torch.float32)
    assert torch.equal(out, (y.float() + exact).to(dtype))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_finite_in_finite_out_and_nan_stays(codec: Codec) -> None:
    assert not codec.round_trip(torch.zeros(3, 200)).any(), "zeros are exact"
    extreme = torch.tensor([3.4e38, -3.4e38, 1e38, 0.0, -0.0, 1e-45, 1e-38, 65504.0] * 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(extreme.to(dtype).isfinite(), extreme.to(dtype), torch.finfo(dtype).max)
        assert codec.round_trip(x).isfinite().all()
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(2, 128)
        x[1, 70] = bad
        y = codec.round_trip(x)
        assert not y[1, 70].isfinite()
        assert y[0].isfinite().all(), "what is bad in one token stays there"


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_scale_free(codec: Codec, size: float) -> None:
    """Tiny gradients survive: nothing underflows where float32 itself does not."""
    if isinstance(codec, Cast) and codec.dtype == torch.float16:
        pytest.skip("float16 itself underflows and overflows there: that is what this codec is")
    if isinstance(codec, TAHQuant) and codec.metadata == "float16":
        pytest.skip("its scales and zeros are float16, as published")
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(4)) * size
    assert relative_error(codec.round_trip(x), x) <= room_of(codec).expected_error(codec)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_give_the_references_bytes(codec: Codec, dtype: torch.dtype) -> None:
    """And its numbers, of ragged shapes, many binades, denormals, zeros and NaN. `test_gpu.py` has the GPU's."""
    for shape, size in (((1, 3, 100), 1), ((8,), 1e-42), ((1000,), 1), ((2, 2, 3, 63), 1), ((5, 64), 1e30)):
        g = torch.Generator().manual_seed(shape[-1])
        x = torch.randn(shape, generator=g) * torch.exp2(6 * torch.randn(shape, generator=g)) * size
        flat = x.view(-1)
        flat[1::7], flat[0], flat[flat.numel() // 2] = 0, 1e-39, math.nan if shape[-1] % 2 else size
        x, made = x.to(dtype), []
        for backend in ("reference", "cpu"):
            with kernels.backend(backend):
                torch.manual_seed(1)  # of stochastic rounding
                payload = codec.encode(x)
                y = codec.decode(payload, shape=shape, dtype=dtype)
                total = codec.decode(payload, shape=shape, out=x.clone(), accumulate=True)
                more = codec.add(payload.clone(), x.flip(0)) if isinstance(codec, Summable) else payload
            made.append((payload, y.nan_to_num(7), total.nan_to_num(7), more))
        assert all(torch.equal(*pair) for pair in zip(*made, strict=True)), shape


def test_bad_input_is_named() -> None:
    codec, x = GroupInt(), torch.randn(64)
    payload = codec.encode(x)
    decode = partial(codec.decode, payload, shape=(64,))
    refused(
        (lambda: codec.encode(torch.arange(4)), TypeError, r"x has dtype torch\.int64; allowed: torch\.float32"),
        (lambda: codec.encode([1.0]), TypeError, "x is list"),  # type: ignore[arg-type]
        (lambda: codec.decode(payload[1:], shape=(64,)), ValueError, "expected one dimension of 64 bytes"),
        (lambda: codec.decode(payload.char(), shape=(64,)), ValueError, "allowed: a uint8 tensor"),
        (lambda: decode(dtype=torch.int32), TypeError, r"dtype is torch\.int32"),
        (lambda: decode(out=x[1:]), ValueError, r"out has shape \(63,\)"),
        (lambda: decode(accumulate=True), ValueError, "accumulate=True needs out"),
        (lambda: codec.encode(x, out=payload[1:]), ValueError, "out has shape"),
    )


def test_fingerprints_tell_configurations_apart_and_processes_agree() -> None:
    assert len({codec.fingerprint() for codec in CODECS}) == len(CODECS)
    # Frozen on purpose: a change means that old and new peers no longer understand each other.
    assert GroupInt().fingerprint() == "c58442cedefd92ca"


def test_stateless_sessions() -> None:
    session = TAHQuant().open(shape=(2, 4, 64), dtype=torch.bfloat16)
    x = torch.randn(2, 4, 64).bfloat16()
    assert session.nbytes() == session.max_nbytes() == TAHQuant().nbytes(x.shape)
    assert torch.equal(session.decode(session.encode(x)), TAHQuant().round_trip(x))
    assert session.state_bytes() == 0
    assert session.state_dict() == {}
    session.load_state_dict({})
    refused(
        (lambda: session.encode(torch.randn(3)), ValueError, r"x has shape \(3,\)"),
        (lambda: session.load_state_dict({"a": 1}), ValueError, "keeps no state"),
    )


def test_parse_reads_what_repr_prints() -> None:
    rates = TransformQuant(bits=2.5, step="message"), TransformQuant()
    for codec in (*CODECS, AQSGD(inner=TAHQuant()), *rates):
        assert parse(repr(codec)) == codec
        assert parse_goal(repr(codec)) is None
    goals = RateGoal(nats=0.005), RateGoal(decibels=34, step="message")
    for goal in goals:
        assert parse_goal(str(goal)) == goal
    assert str(goals[0]) == "TransformQuant(bits='auto', step='token', nats=0.005)"
    assert goals[0].for_gradients() == RateGoal(nats=0.005, step="message")
    assert TransformQuant(bits=3) == TransformQuant(bits=3.0)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = [
    (), (1,), (2,), (3,), (0,), (1, 1), (2, 3, 0), (0, 5, 64), (1, 1, 8), (1, 1, 64), (2, 5, 7), (1, 1, 1000),
    (1, 2, 1024), (1, 8, 256), (3, 33, 65), (64, 2), (300, 1), (2, 70, 8),
]  # fmt: skip


def stateless(shape: tuple[int, ...]) -> st.SearchStrategy[Codec]:
    group = st.sampled_from([8, 32, 64, 1024])
    size = shape[-1] if shape and shape[-1] else 1
    found = [
        st.builds(GroupInt, bits=st.integers(2, 8), group=group, symmetric=st.booleans()),
        st.builds(BlockFloat8, block=st.sampled_from([32, 128, 4096])),
        st.builds(TAHQuant, tile=st.sampled_from([8, 64]), pivot_ratio=st.sampled_from([None, 2.0]),
            allocation=st.sampled_from(["range", "tile", "token"]), metadata=st.sampled_from(["octaves", "float16"])),
    ]  # fmt: skip
    if not shape or shape[-1]:
        ones, outliers = torch.ones(2, size), st.integers(0, size - 1).map(lambda count: tuple(range(count)))
        found.append(st.builds(FeatureInt, ranges=st.just(ones), total=st.just(ones[0]), features=outliers))
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
@given(st.data(), st.sampled_from(SMALL), st.sampled_from(DTYPES))
def test_payloads_of_codecs(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """None takes more than the plain tensor: small ones go as they are, and both ends know that from the shape."""
    codec, x = data.draw(stateless(shape)), numbers(shape, dtype, 1)
    with kernels.backend("reference"):  # slow, but nothing to compile
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
@given(st.data(), st.sampled_from(SMALL), st.sampled_from(DTYPES))
def test_messages_of_sessions(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec = data.draw(st.one_of(stateless(shape), stateful(shape)))
    with kernels.backend("reference"):
        sender, receiver = (codec.open(shape=shape, dtype=dtype) for _ in range(2))
        numel = math.prod(shape)
        most = numel * dtype.itemsize
        assert codec.nbytes(shape, dtype) <= most
        assert sender.max_nbytes() <= most
        plain = codec.format_nbytes(shape) > most
        for i, training in enumerate((True, True, False, True)):
            x = numbers(shape, dtype, i)
            sender.samples = receiver.samples = range(shape[0]) if codec.needs_key else None
            # Of a sample that was not finite nothing is remembered, and the next visit is a first one.
            expected = sender.nbytes() if codec.needs_key else codec.nbytes(shape, dtype)
            assert receiver.nbytes() == expected
            payload = sender.encode(x, training=training)
            assert payload.numel() <= sender.max_nbytes()
            y = receiver.decode(payload, training=training)
            assert payload.numel() == expected
            assert not plain or same(x, y)
            ends = sender.state_dict(), receiver.state_dict()
            assert ends[0].keys() == ends[1].keys()
            assert all(torch.equal(torch.as_tensor(a).nan_to_num(), torch.as_tensor(b).nan_to_num())
                       for a, b in zip(*(end.values() for end in ends), strict=True))  # fmt: skip
        if plain and isinstance(codec, AQSGD):
            assert sender.state_bytes() == 0, "what goes as it is need not be remembered"
        if plain and isinstance(codec, TransformQuant):
            assert sender.state_dict()["messages"] == 0


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

    settings = itertools.product(range(2, 9), (8, 16, 24, 64, 65536), (False, True))
    every = [GroupInt(bits=bits, group=group, symmetric=symmetric) for bits, group, symmetric in settings]
    plain = {n for codec in every for n in range(1, 200) if codec.sized((n,))[1]}
    assert max(plain) == FEWEST - 1


def test_casts_are_what_was_asked_for_and_exact_or_saturate() -> None:
    codec = Cast(dtype=torch.float32)
    assert codec.open(shape=(3,), dtype=torch.bfloat16).nbytes() == codec.nbytes((3,), torch.bfloat16) == 12
    x, inf = torch.randn(3, 5), math.inf
    assert torch.equal(Cast(dtype=torch.float32).round_trip(x), x)
    assert torch.equal(Cast(dtype=torch.bfloat16).round_trip(x), x.bfloat16().float())
    assert [Cast(dtype=dtype).bits_per_element(x.shape) for dtype in (torch.float32, torch.bfloat16)] == [32, 16]
    x, expected = torch.tensor([1e6, -1e6, inf, -inf]), [65504.0, -65504.0, inf, -inf]
    assert Cast(dtype=torch.float16).round_trip(x).tolist() == expected
    assert Cast().decode(Cast().encode(x), shape=x.shape, dtype=torch.float16).tolist() == expected
    x = torch.tensor([3.4028e38, inf])
    assert Cast(dtype=torch.bfloat16).round_trip(x).tolist() == [torch.finfo(torch.bfloat16).max, inf]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "name", ["int4", "int8", "fp8", "tah-quant", "tah-quant-published", "tah-quant-published-token"]
)
def test_the_default_dtype_changes_nothing(name: str, dtype: torch.dtype):
    x = torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(0))
    codec = parse(name)
    payload = codec.encode(x)
    decoded = codec.decode(payload, shape=x.shape)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(codec.encode(x), payload)
        again = codec.decode(payload, shape=x.shape)
    finally:
        torch.set_default_dtype(torch.float32)
    assert again.dtype == torch.float32
    assert torch.equal(again, decoded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sums_are_of_float32_whatever_the_default_dtype(dtype: torch.dtype):
    codec = GroupInt(bits=4, group=64)
    payloads = [codec.encode(torch.randn(512, generator=torch.Generator().manual_seed(i))) for i in range(8)]
    expected = codec.sum(payloads, out=torch.empty(512, dtype=torch.bfloat16))
    torch.set_default_dtype(dtype)
    try:
        found = codec.sum(payloads, out=torch.empty(512, dtype=torch.bfloat16))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
