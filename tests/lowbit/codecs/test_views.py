"""Views of any strides in codecs and sessions: what is read is right; what is written is right, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from lowbit import kernels
from lowbit.codecs import BlockFloat8, Cast, Codec, GroupInt, Session, Summable, TAHQuant, TransformQuant
from tests.refused import refused
from tests.views import View, negated, packed, views

CODECS = [GroupInt(bits=5, group=8), BlockFloat8(), TAHQuant(), Cast(), Cast(dtype=torch.float16)]
TRANSFORM = TransformQuant(bits=4)
X = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))


def session() -> Session:
    return TRANSFORM.open(shape=X.shape, dtype=X.dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    view=views(), codec=st.sampled_from(CODECS), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    backend=st.sampled_from(["cpu", "reference"]), accumulate=st.booleans(),
)  # fmt: skip
def test_any_view(view: View, codec: Codec, dtype: torch.dtype, backend: str, accumulate: bool) -> None:
    memory, x = view.make(1, dtype)
    expected, before = packed(x), memory.clone()
    with kernels.backend(backend):
        payload = codec.encode(expected)
        assert torch.equal(codec.encode(x), payload)
        if isinstance(codec, Summable):
            assert torch.equal(codec.add(payload.clone(), x), codec.add(payload.clone(), expected))
        try:
            codec.decode(payload, shape=x.shape, out=x, accumulate=accumulate)
        except ValueError:
            assert view.overlaps or view.negated or view.is_strange
            assert torch.equal(memory, before)
            return
        codec.decode(payload, shape=x.shape, out=expected, accumulate=accumulate)
    assert not view.overlaps
    assert torch.equal(packed(x), expected)
    assert torch.equal(view.rest(memory), view.rest(before))


class Held(torch.Tensor):
    """A tensor of a class of its own, with memory of its own."""


@pytest.mark.parametrize("codec", [*CODECS, TRANSFORM], ids=repr)
@pytest.mark.parametrize(
    "view",
    [
        negated(-X),
        torch.complex(X, -X).conj().imag,
        torch.stack([X, X], -1)[..., 1],
        X.clone().requires_grad_(),
        X.as_subclass(Held),
        AsyncCollectiveTensor(X),
    ],
    ids=["negated", "imaginary", "column", "leaf", "subclass", "functional collective"],
)
def test_what_is_read_by_address_is_what_an_operator_would_read(codec: Codec, view: Tensor) -> None:
    """Results of functional collectives have no memory of their own: their address is 0."""
    first, second = (codec.open(shape=X.shape, dtype=X.dtype) for _ in range(2))
    assert torch.equal(first.encode(view), second.encode(X))
    if not codec.stateful:
        assert torch.equal(codec.encode(view), codec.encode(X))


@pytest.mark.parametrize("codec", [*CODECS, TRANSFORM], ids=repr)
def test_a_backward_pass_notices_what_was_overwritten(codec: Codec) -> None:
    payload = codec.open(shape=X.shape, dtype=X.dtype).encode(X)
    y = X.clone().requires_grad_() * 1
    square = y.square().sum()
    codec.open(shape=X.shape, dtype=X.dtype).decode(payload, out=y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("codec", CODECS[:-1], ids=repr)  # the last looks whether numbers fit float16
def test_what_autograd_and_tracing_hand_over(codec: Codec) -> None:
    assert torch.equal(codec.encode(torch.ops.aten._efficientzerotensor(X.shape)), codec.encode(torch.zeros(X.shape)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        payload = codec.encode(torch.empty(X.shape))
        assert payload.shape == (codec.nbytes(X.shape),)
        assert codec.decode(payload, shape=X.shape).shape == X.shape
    gradient = torch.func.grad(lambda x: (codec.round_trip(x) * x).sum())(X)
    assert torch.equal(gradient, codec.round_trip(X))


def test_what_cannot_be_read_or_written_is_refused_in_a_line() -> None:
    codec, x = GroupInt(), torch.randn(64)
    payload, nested = codec.encode(x), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    ends, freed, zeros = session().encode(X), torch.ones(64), torch.ops.aten._efficientzerotensor([64])
    freed.untyped_storage().resize_(0)
    texts = refused(
        (lambda: codec.encode(x.to_sparse()), TypeError, "x is a sparse_coo tensor; allowed: dense tensors"),
        (lambda: codec.encode(nested), TypeError, "x is a nested tensor"),
        (lambda: codec.encode(x.to_mkldnn()), TypeError, "x is a _mkldnn tensor"),
        (lambda: codec.encode(x + 1j), TypeError, "x has dtype torch.complex64"),
        (lambda: codec.encode(freed), ValueError, "x has no memory, as parameters that FSDP has freed; allowed: "),
        (lambda: codec.decode(payload, shape=x.shape, out=freed), ValueError, "out has no memory"),
        (lambda: codec.decode(payload, shape=x.shape, out=zeros), ValueError, "out has no memory"),
        (lambda: codec.encode(x, out=payload[:1].expand(64)), ValueError, "out has elements that share memory"),
        (lambda: codec.add(payload[:1].expand(64), x), ValueError, "payload has elements that share memory"),
        (lambda: session().decode(ends, out=X[:1].expand(4, -1, -1)), ValueError, "out has elements that share"),
        (lambda: session().decode(ends, out=negated(X)), ValueError, "out is a negated view"),
        (lambda: session().decode(ends, out=AsyncCollectiveTensor(X)), TypeError, "out is AsyncCollectiveTensor; all"),
        (lambda: codec.sum([payload], out=negated(x)), ValueError, "out is a negated view"),
        (lambda: codec.sum([payload], out=x, scratch=x.bfloat16()), ValueError, "scratch has 64 of torch.bfloat16; al"),
    )
    assert not any("\n" in text for text in texts)
