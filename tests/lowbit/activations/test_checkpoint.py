"""Checkpointed layers and compiled models: gradients, what they keep, and what cannot run again."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, checkpoint_, compress_saved_, counted, restore_
from lowbit.activations.layer_plan import layers_of
from lowbit.codecs import BlockFloat8, GroupInt
from tests.lowbit.activations.models import (
    Calls,
    GatedBlock,
    Runs,
    distance,
    gradients,
    hugging_face,
    loss_of,
    saved_bytes,
    tokens,
)

BYTE = GroupInt(bits=8, group=64)


def checkpointed(model: Any, codec: GroupInt | None = None) -> Any:
    for name, layer in layers_of(model).items():
        checkpoint_(layer, codec=codec, name=name)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_exact_and_inputs_alone_are_kept(family: str):
    """Random numbers (GPT-2's dropout) are drawn again."""
    model, ids = hugging_face(family, 3), tokens()
    layers = tuple(layers_of(model))
    with counted(model) as plain:
        exact = gradients(model, loss_of(model, ids))
    checkpointed(model)
    with counted(model) as saved:
        loss = loss_of(model, ids)
    inputs = 3 * ids.numel() * 32 * 4
    at_ends = sum(size for (_, name), size in plain.modules.items() if not name.startswith(layers))
    assert saved.total <= inputs + at_ends
    assert saved.total < 0.3 * plain.total
    assert distance(gradients(model, loss), exact) == 0
    assert saved.now == 0
    restore_(model)
    assert not any("forward" in vars(layer) for layer in layers_of(model).values())


@pytest.mark.parametrize("inside", [None, LayerAware()])
def test_a_low_bit_input_is_what_backward_starts_from(inside: LayerAware | None):
    block = GatedBlock()
    x = torch.randn(4, 20, 32, generator=torch.Generator().manual_seed(0))

    def grads(x: Tensor) -> dict[str, Any]:
        leaf = x.clone().requires_grad_()
        return gradients(block, block(leaf).sum()) | {"x": leaf.grad}

    if inside is not None:
        compress_saved_(block, inside)
    expected = grads(BYTE.round_trip(x))
    checkpoint_(block, codec=BYTE)
    assert torch.allclose(block(x), block.train(False)(x), atol=1e-6)
    block.train()
    assert distance(grads(x), expected) < 1e-6


def test_the_whole_input_is_freed():
    block, x = GatedBlock(), torch.randn(4, 20, 32, requires_grad=True) * 1
    checkpoint_(block, codec=BYTE)
    whole = weakref.ref(x)
    out = block(x)
    del x
    assert whole() is None
    out.sum().backward()


def test_nothing_is_coded_in_the_first_pass_and_the_last_product_is_left_out():
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


def test_what_cannot_run_again_is_refused():
    def shrinking(self: Any, x: Tensor) -> Tensor:
        self.calls -= 1
        for _ in range(self.calls):  # it saves fewer tensors every time
            x = torch.tanh(self.linear(x))
        return x

    def run(layer: nn.Module, name: str, *inputs: Any) -> Any:
        checkpoint_(layer, name=name)
        return layer(*inputs)

    x, linear = torch.randn(2, 8, requires_grad=True), nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match="'a' changes an argument in place"):
        run(Runs(lambda self, x: self.linear(x.add_(1)), linear=linear), "a", x.detach())
    with pytest.raises(RuntimeError, match="'b' changes an argument in place"):
        run(Runs(lambda self, x, rest: x * rest.add_(x.detach())), "b", x, torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=r"'c' saved \d+ tensors for backward, but \d+"):
        run(Runs(shrinking, linear=linear, calls=3), "c", x).sum().backward()
    with pytest.raises(RuntimeError, match="layer 'd' .* none of its arguments is a tensor of floats"):
        run(Runs(lambda self, pair: pair[0] * pair[1]), "d", (x, x))
    layer = nn.Sequential(linear, nn.Tanh())
    other = x.detach().clone()
    out = run(layer, "e", other)
    other += 1
    with pytest.raises(RuntimeError, match="the input of layer 'e' was changed in place"):
        out.sum().backward()
    mask = torch.ones(2, 8)
    out = run(Runs(lambda self, x, mask: self.linear(x * mask), linear=linear), "g", x, mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="an argument of layer 'g', such as a mask, was changed in place"):
        out.sum().backward()
    with pytest.raises(ValueError, match="layer 'f' is checkpointed already"):
        checkpoint_(layer, name="f")


def test_a_low_bit_input_does_not_mind_changes_after_the_layer():
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    checkpoint_(layer, codec=BYTE)
    x = torch.randn(2, 8)
    out = layer(x)
    x += 1
    out.sum().backward()
    assert layer[0].weight.grad is not None


def test_the_input_is_the_tensor_with_a_gradient():
    layer, x = Runs(lambda self, *, mask, x: torch.softmax(x + mask, -1)), torch.randn(2, 8, requires_grad=True)
    checkpoint_(layer, codec=BYTE)
    layer(mask=torch.full((2, 8), -torch.inf).triu(1), x=x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_hugging_faces_cache_is_left_out():
    model, ids = hugging_face("llama"), tokens()
    expected = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    checkpointed(model)
    with counted(model) as kept:
        for _ in range(3):
            found = gradients(model, model(input_ids=ids, labels=ids).loss)
            assert kept.now == 0
    assert distance(found, expected) < 1e-5


SPLIT = "aot_eager_decomp_partition"
"""Partitions the graph as Inductor does, and needs no C++ compiler."""


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("norm", "bits"), [(nn.LayerNorm, 8), (nn.RMSNorm, BlockFloat8())], ids=str)
def test_a_block_is_one_graph(norm: Any, bits: Any):
    torch.manual_seed(0)
    plain = GatedBlock(norm=norm)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=bits, norm=bits, smallest=0))
    compiled: Any = torch.compile(ours, fullgraph=True, backend=SPLIT)
    x = torch.randn(4, 20, 32, requires_grad=True)
    y = x.detach().requires_grad_()
    with saved_bytes(ours) as saved:
        out = compiled(x)
    wanted = plain(y)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    found = gradients(ours, out.square().sum()) | {"x": x.grad}
    expected = gradients(plain, wanted.square().sum()) | {"x": y.grad}
    error = distance(found, expected)
    assert error < (0.02 if bits == 8 else 0.06)
    codec = GroupInt(bits=bits) if isinstance(bits, int) else bits
    row, wide = codec.nbytes((4, 20, 32)), codec.nbytes((4, 20, 72))
    # The norm's input, what gate and up share, and the activation's input. The product follows from its factors.
    assert saved[torch.uint8] == 2 * row + wide


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_llama_in_one_graph_and_layers_that_are_compiled_by_themselves():
    plain, ids = hugging_face("llama"), tokens()
    expected = gradients(plain, loss_of(plain, ids))
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=8))
    model: Any = torch.compile(ours, fullgraph=True, backend=SPLIT)
    for _ in range(2):
        assert distance(gradients(ours, loss_of(model, ids)), expected) < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        assert distance(gradients(ours, loss_of(model, ids)), expected) < 0.05
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager")
    for _ in range(3):
        assert distance(gradients(ours, loss_of(ours, ids)), expected) < 0.03


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_another_shape_and_evaluation(backend: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 72), nn.GELU(), nn.Linear(72, 32))
    expected = copy.deepcopy(model)
    compress_saved_(model, LayerAware(bits=8, smallest=0))
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (20, 12):
        x = torch.randn(4, rows, 32)
        found = gradients(model, compiled(x).square().sum())
        assert distance(found, gradients(expected, expected(x).square().sum())) < 0.02
    model.eval()
    torch.testing.assert_close(compiled(x), expected(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(x))
