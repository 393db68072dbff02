"""How long payloads and decoded copies live."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lowbit.activations import LayerAware, compress_saved_, follow, handlers, recipes
from tests.activations.models import DIM, GatedBlock, Runs


class Storages:
    """Follows the storages of all payloads and of all tensors that are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.payloads: list[StorageWeakRef] = []
        self.copies: list[StorageWeakRef] = []
        where = {
            (handlers, "room"): self.payloads,
            (follow, "room"): self.payloads,
            (recipes.NormOutput, "rebuild"): self.copies,
        }
        for (module, name), references in where.items():
            monkeypatch.setattr(module, name, self._noting(getattr(module, name), references))

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


def model() -> nn.Module:
    module = nn.Sequential(GatedBlock(), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))
    compress_saved_(module)
    return module


def test_payloads_end_with_backward_while_the_loss_lives(storages: Storages):
    y = model()(torch.randn(3, DIM))
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
    y: Any = checkpoint(model(), x, use_reentrant=False)
    assert len(storages.payloads) == 4
    assert storages.alive() == (0, 0)
    y.sum().backward()
    assert storages.alive() == (0, 0)


def test_payloads_that_hooks_move_away_are_freed(storages: Storages):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = model()(torch.randn(3, DIM)).sum()
    assert storages.alive() == (0, 0)
    loss.backward()


def test_a_pass_for_one_gradient_leaves_no_copy(storages: Storages):
    ours: Any = model()
    loss = ours(torch.randn(3, DIM)).sum()
    torch.autograd.grad(loss, [ours[0].mlp.w1.weight], retain_graph=True)
    assert len(storages.copies) == 1
    assert storages.alive() == (4, 0)
    loss.backward()
    assert len(storages.copies) == 3
