"""What holds for every codec: sizes, shapes, dtypes, strides, bad input, fingerprints, sessions."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit import kernels
from lowbit.codecs import AQSGD, Cast, Codec, GroupInt, TAHQuant, parse
from tests.codecs.examples import every, room_of

CODECS: list[Codec] = every("CODECS")
SHAPES = [(2, 8, 128), (3, 5, 70), (1, 1), (4, 1), (7,), (1000,), (), (2, 0, 64), (0,), (2, 2, 3, 63)]


def relative_error(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm()) if x.numel() else 0.0


def expected_error(codec: Codec) -> float:
    return room_of(codec).expected_error(codec)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_of_any_shape(codec: Codec, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.nbytes(shape),)
    y = codec.decode(payload, shape=shape, dtype=x.dtype)
    assert y.shape == x.shape
    assert relative_error(y, x) <= expected_error(codec)
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
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(4)) * size
    assert relative_error(codec.round_trip(x), x) <= expected_error(codec)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_give_the_references_bytes(codec: Codec, dtype: torch.dtype) -> None:
    """And its numbers, of ragged shapes, many binades, denormals, zeros and NaN. `test_gpu.py` has the GPU's."""
    for shape in ((1, 3, 100), (7,), (1000,), (2, 2, 3, 63), (5, 64)):
        g = torch.Generator().manual_seed(shape[-1])
        x = torch.randn(shape, generator=g) * torch.exp2(6 * torch.randn(shape, generator=g))
        flat = x.view(-1)
        flat[1::7], flat[0], flat[flat.numel() // 2] = 0, 1e-39, math.nan if shape[-1] % 2 else 1.0
        x, made = x.to(dtype), []
        for backend in ("reference", "cpu"):
            with kernels.backend(backend):
                torch.manual_seed(1)  # of stochastic rounding
                payload = codec.encode(x)
                y = codec.decode(payload, shape=shape, dtype=dtype)
                total = codec.decode(payload, shape=shape, out=x.clone(), accumulate=True)
            made.append((payload, y.nan_to_num(7), total.nan_to_num(7)))
        assert all(torch.equal(*pair) for pair in zip(*made, strict=True)), shape


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_zeros_are_exact(codec: Codec) -> None:
    assert torch.equal(codec.round_trip(torch.zeros(3, 200)), torch.zeros(3, 200))


def test_bad_input_is_named() -> None:
    codec = GroupInt()
    with pytest.raises(TypeError, match=r"x has dtype torch\.int64; allowed: torch\.float32"):
        codec.encode(torch.arange(4))
    with pytest.raises(TypeError, match="x is list"):
        codec.encode([1.0])  # type: ignore[arg-type]
    payload = codec.encode(torch.randn(64))
    with pytest.raises(ValueError, match="expected one dimension of 64 bytes"):
        codec.decode(payload[:-1], shape=(64,))
    with pytest.raises(ValueError, match="allowed: a uint8 tensor"):
        codec.decode(payload.view(torch.int8), shape=(64,))
    with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
        codec.decode(payload, shape=(64,), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out has shape \(63,\)"):
        codec.decode(payload, shape=(64,), out=torch.empty(63))
    with pytest.raises(ValueError, match="accumulate=True needs out"):
        codec.decode(payload, shape=(64,), accumulate=True)
    with pytest.raises(ValueError, match="out has shape"):
        codec.encode(torch.randn(64), out=torch.empty(39, dtype=torch.uint8))


def test_fingerprints_tell_configurations_apart_and_processes_agree() -> None:
    prints = {c.fingerprint() for c in CODECS}
    assert len(prints) == len(CODECS)
    assert GroupInt(bits=4).fingerprint() == GroupInt(bits=4).fingerprint()
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
    with pytest.raises(ValueError, match=r"x has shape \(3,\)"):
        session.encode(torch.randn(3))
    with pytest.raises(ValueError, match="keeps no state"):
        session.load_state_dict({"a": 1})


@pytest.mark.parametrize("codec", [*CODECS, AQSGD(inner=TAHQuant())], ids=repr)
def test_parse_reads_what_repr_prints(codec: Codec) -> None:
    assert parse(repr(codec)) == codec
