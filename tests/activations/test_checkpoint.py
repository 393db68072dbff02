"""Checkpointed layers: gradients, what they keep, random numbers, and what cannot run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, checkpoint_, compress_saved_, counted, restore_
from lowbit.codecs import GroupInt
from tests.activations.models import GatedBlock, distance, gradients, hugging_face, loss_of, tokens

BYTE = GroupInt(bits=8, group=64)


def checkpointed(model: Any, codec: GroupInt | None = None) -> Any:
    for i, layer in enumerate(model.model.layers):
        checkpoint_(layer, codec=codec, name=f"model.layers.{i}")
    return model


def test_gradients_are_exact_and_inputs_alone_are_kept():
    model, ids = hugging_face("llama", 3), tokens()
    with counted(model) as plain:
        exact = gradients(model, loss_of(model, ids))
    checkpointed(model)
    with counted(model) as saved:
        loss = loss_of(model, ids)
    inputs = 3 * ids.numel() * 32 * 4
    at_ends = sum(size for (_, name), size in plain.modules.items() if "layers" not in name)
    assert saved.total <= inputs + at_ends
    assert saved.total < 0.3 * plain.total
    assert distance(gradients(model, loss), exact) == 0
    assert saved.now == 0
    restore_(model)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize("inside", [None, LayerAware()])
def test_a_low_bit_input_is_what_backward_starts_from(inside: LayerAware | None):
    block = GatedBlock()
    x = torch.randn(4, 20, 32, generator=torch.Generator().manual_seed(0))

    def grads(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        block(leaf).backward(torch.ones_like(leaf))
        assert leaf.grad is not None
        return leaf.grad, {n: p.grad for n, p in block.named_parameters() if p.grad is not None}

    if inside is not None:
        compress_saved_(block, inside)
    expected_x, expected = grads(BYTE.round_trip(x))
    checkpoint_(block, codec=BYTE)
    assert torch.allclose(block(x), block.train(False)(x), atol=1e-6)
    block.train()
    own_x, own = grads(x)
    assert torch.allclose(own_x, expected_x, atol=1e-6)
    assert distance(own, expected) < 1e-6


def test_nothing_is_coded_in_the_first_pass_and_the_last_product_is_left_out():
    from tests.activations.models import Calls

    block = GatedBlock()
    compress_saved_(block)
    checkpoint_(block)
    x = torch.randn(2, 20, 32, requires_grad=True)
    with Calls() as calls:
        y = block(x)
    assert not any("encode" in name for name in calls.count)
    with Calls() as calls:
        y.sum().backward()
    assert calls.count["norm_encode"] == calls.count["gated_encode"] == 1


def test_random_numbers_are_drawn_again():
    model, ids = hugging_face("gpt2"), tokens()
    exact = gradients(model, loss_of(model, ids))
    for i, layer in enumerate(model.transformer.h):
        checkpoint_(layer, name=str(i))
    state = torch.get_rng_state()
    again = gradients(model, loss_of(model, ids))
    assert distance(again, exact) == 0
    torch.set_rng_state(state)


def test_backward_may_run_twice_and_ask_for_some_gradients():
    block = GatedBlock()
    x = torch.randn(2, 20, 32, requires_grad=True)
    plain = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    checkpoint_(block)
    loss = block(x).square().sum()
    for _ in range(2):
        again = torch.autograd.grad(loss, [x, *block.parameters()], retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    (only,) = torch.autograd.grad(loss, [x])
    assert torch.equal(only, plain[0])


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x)


class Counting(nn.Module):
    """Saves one tensor more every time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 3

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        for _ in range(self.calls):
            x = torch.tanh(self.linear(x))
        return x


def test_what_cannot_run_again_is_one_line():
    x = torch.randn(2, 8)
    layer = InPlace()
    checkpoint_(layer, name="blocks.3")
    with pytest.raises(RuntimeError, match="layer 'blocks.3' changes an argument in place, so it cannot run again"):
        layer(x.clone())
    layer = Counting()
    checkpoint_(layer, name="blocks.4")
    with pytest.raises(RuntimeError, match=r"'blocks.4' saved \d+ tensors for backward, but \d+ when it ran"):
        layer(x).sum().backward()
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    checkpoint_(layer, name="blocks.5")
    other = x.clone()
    out = layer(other)
    other += 1
    with pytest.raises(RuntimeError, match="the input of layer 'blocks.5' was changed in place after the layer ran"):
        out.sum().backward()
    with pytest.raises(ValueError, match="layer 'a' is checkpointed already; allowed: restore_"):
        checkpoint_(layer, name="a")


def test_a_low_bit_input_does_not_mind_changes_after_the_layer():
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    checkpoint_(layer, codec=BYTE)
    x = torch.randn(2, 8)
    out = layer(x)
    x += 1
    out.sum().backward()
    assert layer[0].weight.grad is not None


class Second(nn.Module):
    """Changes its second argument in place."""

    def forward(self, x: Tensor, rest: Tensor) -> Tensor:
        rest.add_(x.detach())
        return x * rest


class Nested(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


def test_other_arguments_are_watched():
    layer, x = Second(), torch.randn(2, 8, requires_grad=True)
    checkpoint_(layer, name="a")
    with pytest.raises(RuntimeError, match="layer 'a' changes an argument in place"):
        layer(x, torch.ones(2, 8))
    layer = Nested()
    checkpoint_(layer, name="b")
    with pytest.raises(RuntimeError, match="none of its arguments is a tensor of floats"):
        layer((x, x))


def test_the_input_is_the_tensor_with_a_gradient():
    class Masked(nn.Module):
        def forward(self, *, mask: Tensor, x: Tensor) -> Tensor:
            return torch.softmax(x + mask, -1)

    layer, x = Masked(), torch.randn(2, 8, requires_grad=True)
    checkpoint_(layer, codec=BYTE)
    layer(mask=torch.full((2, 8), -torch.inf).triu(1), x=x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_hugging_faces_cache_is_left_out():
    model, ids = hugging_face("llama"), tokens()
    expected = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    for layer in model.model.layers:
        checkpoint_(layer)
    with counted(model) as kept:
        for _ in range(3):
            found = gradients(model, model(input_ids=ids, labels=ids).loss)
            assert kept.now == 0
    assert distance(found, expected) < 1e-5
