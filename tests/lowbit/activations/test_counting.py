"""Bytes that autograd saves, compared with what the graph itself holds; how long payloads and copies of them live."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lowbit.activations import LayerAware, compress_saved_, follow, handlers, recipes
from lowbit.activations.counting import counted, layer_type
from tests.lowbit.activations.models import DIM, VOCAB, GatedBlock, Runs, hugging_face, tokens

TOKENS = tokens()
TARGETS = TOKENS.roll(1)


@pytest.fixture
def model() -> Any:
    return hugging_face("llama")


def loss_of(model: Any) -> Tensor:
    logits = model(input_ids=TOKENS, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())


def in_graph(root: Tensor, *but: Tensor) -> int:
    """Slow reference: bytes of all storages that the nodes behind a tensor hold, each once."""
    left = {t.untyped_storage()._cdata for t in but}
    sizes: dict[int, int] = {}
    nodes, seen = [root.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())
        for value in saved:
            for t in value if isinstance(value, list | tuple) else [value]:
                if isinstance(t, Tensor) and t.untyped_storage()._cdata not in left:
                    sizes[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
    return sum(sizes.values())


def own(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), TOKENS]


@pytest.mark.parametrize("bits", [0, 4, 16])
def test_all_that_the_graph_holds_is_counted_once(model: Any, bits: int):
    if bits:
        compress_saved_(model, LayerAware(bits=bits, norm=bits, attention=16))
    graph = loss_of(model)
    expected = in_graph(graph, *own(model))
    with counted(model) as saved:
        loss = loss_of(model)
    assert saved.now == saved.total == expected
    assert set(saved.peak) >= {"norm", "mlp", "attention", "loss"}
    assert sum(saved.modules.values()) == expected
    assert saved.modules["norm", "model.layers.1.input_layernorm"] > 0
    parameters = [*model.parameters()]
    plain, counted_too = (torch.autograd.grad(each, parameters) for each in (graph, loss))
    assert all(map(torch.equal, plain, counted_too))
    del loss
    assert (saved.now, saved.total) == (0, expected)


def test_the_peak_is_of_all_micro_batches_in_flight():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with counted(model) as saved:
        first, second = model(torch.randn(4, 8)), model(torch.randn(4, 8))
        assert saved.now == 2 * 4 * 8 * 4
        first.sum().backward()
        third = model(torch.randn(4, 8))
        assert saved.now == saved.total == 2 * 4 * 8 * 4
        saved.reset()
        (second.sum() + third.sum()).backward()
    assert (saved.now, saved.total) == (0, 2 * 4 * 8 * 4)


def test_copies_of_weights_are_told_apart(model: Any):
    with counted(model) as saved, torch.autocast("cpu", torch.bfloat16):
        loss_of(model)
    linear = [m.weight.numel() * 2 for m in model.modules() if isinstance(m, nn.Linear)]
    assert saved.peak["weights"] == sum(linear)
    assert saved.total == sum(saved.peak.values()) - sum(linear)
    # an activation as large as the weight is none
    square = nn.Sequential(nn.Tanh(), nn.Linear(16, 16))
    with counted(square) as saved, torch.autocast("cpu", torch.bfloat16):
        square(torch.randn(16, 16, requires_grad=True))
    assert saved.peak == {"other": 16 * 16 * 4, "linear": 16 * 16 * 2, "weights": 16 * 16 * 2}


def test_checkpointed_parts_keep_their_inputs():
    inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    model = Runs(lambda self, x: checkpoint(inner, self.first(x), use_reentrant=False), first=nn.Tanh(), inner=inner)
    with counted(model) as saved:
        y = model(torch.randn(4, 8, requires_grad=True))
        y.sum().backward()
    assert saved.peak == {"other": 4 * 8 * 4}
    assert saved.now == 0


def test_nothing_is_saved_without_gradients_and_the_model_is_left_alone(model: Any):
    with torch.no_grad(), counted(model) as saved:
        loss_of(model)
    assert (saved.total, saved.peak) == (0, {})
    with pytest.raises(IndexError), counted(model):
        model(input_ids=TOKENS + VOCAB)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_layer_types_by_where_they_are():
    class Attention(nn.Module): ...

    class GatedMLP(nn.Module): ...

    linear, silu, norm = nn.Linear(2, 2), nn.SiLU(), nn.RMSNorm(2)
    top = nn.Sequential()
    assert layer_type([]) == "loss"
    assert layer_type([top]) == layer_type([top, silu]) == "other"
    assert layer_type([top, linear]) == layer_type([top, Attention(), linear]) == "linear"
    assert layer_type([top, GatedMLP(), linear]) == layer_type([top, GatedMLP(), silu]) == "mlp"
    assert layer_type([top, Attention()]) == layer_type([top, Attention(), silu]) == "attention"
    assert layer_type([top, Attention(), norm]) == layer_type([top, norm]) == "norm"
    assert layer_type([top, nn.Embedding(2, 2)]) == "embedding"


class Storages:
    """Follows the storages of all payloads and of all tensors that are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.payloads: list[StorageWeakRef] = []
        self.copies: list[StorageWeakRef] = []
        for module in (handlers, follow):
            monkeypatch.setattr(module, "room", self._noting(module.room, self.payloads))
        rebuild = self._noting(recipes.NormOutput.rebuild, self.copies)
        monkeypatch.setattr(recipes.NormOutput, "rebuild", rebuild)

    def _noting(self, function: Any, references: list[StorageWeakRef]) -> Any:
        def noting(*args: Any) -> Tensor:
            out = function(*args)
            references.append(StorageWeakRef(out.untyped_storage()))
            return out

        return noting

    def alive(self) -> tuple[int, int]:
        gc.collect()
        payloads, copies = ([r for r in f if not r.expired()] for f in (self.payloads, self.copies))
        return len(payloads), len(copies)


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storages]:
    gc.collect()
    gc.freeze()  # so that collections look only at what a test makes
    yield Storages(monkeypatch)
    gc.unfreeze()


def coded() -> nn.Sequential:
    module = nn.Sequential(GatedBlock(), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))
    compress_saved_(module)
    return module


def test_payloads_end_with_backward_while_the_loss_lives(storages: Storages):
    y = coded()(torch.randn(3, DIM))
    loss = y.sum()
    assert storages.alive() == (4, 0)
    loss.backward()
    assert storages.alive() == (0, 0)
    assert len(storages.copies) == 2  # one for gate and up, one for the layer at the end
    assert loss.isfinite()


def test_payloads_of_attention_end_with_its_backward_while_the_graph_lives(storages: Storages):
    def attention(_: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*x.view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4))

    ours = Runs(attention)
    compress_saved_(nn.ModuleList([ours, nn.Linear(8, 8)]))
    y = ours(torch.randn(2, 16, 96, requires_grad=True))
    assert storages.alive() == (3, 0)
    y.sum().backward(retain_graph=True)  # the graph holds them
    loss = y.sum()
    assert storages.alive() == (3, 0)
    loss.backward()
    assert storages.alive() == (0, 0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("last", [nn.LayerNorm(DIM), nn.GELU()])
def test_payloads_end_with_backward_while_the_output_lives(storages: Storages, last: nn.Module):
    ours, after = nn.Sequential(nn.Linear(DIM, DIM), last), nn.Linear(DIM, DIM)
    compress_saved_(nn.ModuleList([ours, after]), LayerAware(smallest=0))
    x = torch.randn(3, DIM)
    y = ours(x)
    assert storages.alive() == (2, 0)
    y.sum().backward(retain_graph=True)  # the graph holds them
    assert storages.alive() == (2, 0)
    y.sum().backward()
    assert storages.alive() == (0, 0)
    again = after(y)  # the recipe is gone, so that y is saved anew
    assert storages.alive() == (1, 0)
    (grad,) = torch.autograd.grad(again.sum(), after.weight)
    torch.testing.assert_close(grad, y.detach().sum(0).expand(DIM, DIM), rtol=0, atol=0.5)


def test_checkpointing_saves_no_payloads(storages: Storages):
    x = torch.randn(3, DIM, requires_grad=True)
    y: Any = checkpoint(coded(), x, use_reentrant=False)
    assert len(storages.payloads) == 4
    assert storages.alive() == (0, 0)
    y.sum().backward()
    assert storages.alive() == (0, 0)


def test_payloads_that_hooks_move_away_are_freed(storages: Storages):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = coded()(torch.randn(3, DIM)).sum()
    assert storages.alive() == (0, 0)
    loss.backward()


def test_a_pass_for_one_gradient_leaves_no_copy(storages: Storages):
    ours: Any = coded()
    loss = ours(torch.randn(3, DIM)).sum()
    torch.autograd.grad(loss, [ours[0].mlp.w1.weight], retain_graph=True)
    assert len(storages.copies) == 1
    assert storages.alive() == (4, 0)
    loss.backward()
    assert len(storages.copies) == 3
