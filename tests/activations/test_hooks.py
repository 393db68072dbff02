"""`low_bit_saved`: code that cannot be changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import LayerAware, low_bit_saved
from lowbit.activations.hooks import _Held
from lowbit.codecs import GroupInt
from tests.activations.models import Calls, distance, gradients, hugging_face, loss_of, tokens

WIDE = 64


def attend(x: Tensor) -> Tensor:
    q, k, v = (x * s for s in (1.0, 0.5, 2.0))
    return functional.scaled_dot_product_attention(q, k, v)


def inputs() -> Tensor:
    return torch.randn(2, 16, WIDE, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_gradients_come_from_the_rounded_tensors():
    x, x_ = inputs(), inputs()
    with low_bit_saved(LayerAware(bits=3)):
        y = (x * 1).pow(3).sum()
    y.backward()
    rounded = GroupInt(bits=3).round_trip(x_.detach())
    torch.testing.assert_close(x.grad, 3 * rounded**2)


def test_each_storage_is_coded_once_however_it_is_looked_at():
    x = inputs()
    weights = [torch.randn(WIDE, WIDE, requires_grad=True) for _ in range(3)]
    with low_bit_saved(LayerAware(bits=8)), Calls() as calls:
        h = x * 1
        y = h @ weights[0] + h.transpose(0, 1).transpose(0, 1) @ weights[1] + h.view(-1, WIDE).view_as(h) @ weights[2]
    assert calls.count["group_int_encode"] == 1
    y.sum().backward()
    expected = x.detach().view(-1, WIDE).t().sum(1, keepdim=True).expand(WIDE, WIDE)
    for w in weights:
        torch.testing.assert_close(w.grad, expected, rtol=0.02, atol=0.2)


def test_a_change_in_place_is_coded_anew():
    w = torch.ones(WIDE, WIDE, requires_grad=True)
    with low_bit_saved(LayerAware(bits=8)):
        h = inputs() * 1
        first = h @ w
        h += 100
        (first + h @ w).sum().backward()
    assert w.grad is not None
    expected = 2 * inputs().detach().sum((0, 1)) + 32 * 100
    torch.testing.assert_close(w.grad[:, 0], expected, rtol=1e-3, atol=5.0)


def test_what_stays_as_it_is():
    linear, norm = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE)
    mask = torch.randn(2, 16, WIDE)
    with low_bit_saved(), Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        linear(mask)  # a leaf without gradient, a weight and its cast
        norm(mask)
        inputs()[:, :4, :7].exp()  # few elements
        assert (inputs() * mask).requires_grad
    assert not calls.count


@pytest.mark.parametrize(("attention", "coded"), [(16, 0), (8, 4)])
def test_attention_stays_as_it_is_unless_told(attention: int, coded: int):
    x, x_ = inputs(), inputs()
    expected = attend(x_) @ torch.eye(WIDE, requires_grad=True)
    with low_bit_saved(LayerAware(bits=4, attention=attention)), Calls() as calls:
        y = attend(x) @ torch.eye(WIDE, requires_grad=True)
    assert calls.count["group_int_encode"] == coded  # q, k, v and the output, which the product saves, too
    y.square().sum().backward()
    expected.square().sum().backward()
    assert x.grad is not None
    assert x.grad.equal(x_.grad) == (attention == 16)
    torch.testing.assert_close(x.grad, x_.grad, rtol=0.2, atol=0.2)


def test_a_whole_model():
    model, ids = hugging_face("qwen2"), tokens()
    expected = gradients(model, loss_of(model, ids))
    with low_bit_saved(LayerAware(bits=8)), Calls() as calls:
        loss = loss_of(model, ids)
    assert calls.count["group_int_encode"] > 10
    assert 0 < distance(gradients(model, loss), expected) < 0.02


def test_results_that_a_function_saves_are_coded(monkeypatch: pytest.MonkeyPatch):
    held: list[_Held] = []
    monkeypatch.setattr(_Held, "unpack", lambda self: held.append(self) or _unpack(self))
    with low_bit_saved():
        y = inputs().softmax(-1)  # saves what it returns
    y.sum().backward()
    assert [h.coded is not None for h in held] == [True]


_unpack = _Held.unpack


@pytest.mark.parametrize("wrong", [{"norm": 8}, {"mlp": 4}, {"linear": 16}, {"layers": {"a": 4}}])
def test_bits_of_layers_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*knows no layers"):
        low_bit_saved(LayerAware(**wrong)).__enter__()
