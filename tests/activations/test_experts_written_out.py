"""Mixtures of experts that are written out: loops over modules, batched and grouped products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, counted
from tests.activations.models import Gated, distance, gradients
from tests.activations.test_experts import language_model, loss_of, text

DIM, FFN, EXPERTS, TOKENS = 32, 48, 4, 64


class Loop(nn.Module):
    """A norm, a router, and a loop over modules, one for each expert."""

    def __init__(self, gather: str) -> None:
        super().__init__()
        self.norm, self.router, self.gather = nn.RMSNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False), gather
        self.experts = nn.ModuleList(Gated(DIM, FFN) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights, index = self.router(hidden).float().softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            match self.gather:
                case "index":
                    rows = hidden[token]
                case "none":
                    rows = hidden[None, token].reshape(-1, DIM)
                case _:
                    rows = torch.index_select(hidden, 0, token)
            out.index_add_(0, token, (expert(rows) * weights[token, choice, None]).to(out.dtype))
        return x + out


class Products(nn.Module):
    """A norm, and products with the weights of all experts: equal groups of rows, or groups that end somewhere."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.norm, self.function = nn.RMSNorm(DIM), function
        self.first = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * FFN) / DIM**0.5)
        self.second = nn.Parameter(torch.randn(EXPERTS, DIM, FFN) / FFN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden, ends = self.norm(x), torch.tensor([10, 10, 40, TOKENS], dtype=torch.int32)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            if self.function == "grouped_mm":
                return functional.grouped_mm(rows, weight, offs=ends)
            return torch.bmm(rows.view(EXPERTS, -1, rows.shape[-1]), weight).flatten(0, 1)

        gate, up = product(hidden, self.first).chunk(2, -1)
        return x + product(functional.silu(gate) * up, self.second.transpose(1, 2))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Products(name) if name in ("bmm", "grouped_mm") else Loop(name)


def loss(module: nn.Module, autocast: bool = False) -> Tensor:
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return module(x).float().square().sum()


MODULES = ("index", "none", "index_select", "bmm", "grouped_mm")


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("bits", "most"), [(16, 2e-6), (8, 0.01), (4, 0.15)])
def test_gradients(name: str, bits: int, most: float):
    plain = build(name)
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=bits, norm=bits))
    for _ in range(2):
        y, expected = loss(ours), loss(plain)
        torch.testing.assert_close(y, expected)
        assert distance(gradients(ours, y), gradients(plain, expected)) < most


@pytest.mark.parametrize("name", MODULES)
def test_kept_bytes(name: str):
    module, sizes = build(name), []
    for compress in (False, True):
        if compress:
            compress_saved_(module, report=False)
        with counted(module) as saved:
            loss(module, autocast=True).backward()
        sizes.append(saved.total)
    # In a loop every payload takes a few bytes more, and the indices of a few tokens count.
    assert sizes[1] < (0.35 if name in ("bmm", "grouped_mm") else 0.42) * sizes[0]


@pytest.mark.parametrize("frozen", ["first", "second", "norm"])
@pytest.mark.parametrize("name", ["bmm", "grouped_mm"])
def test_frozen_weights(name: str, frozen: str):
    plain = build(name)
    getattr(plain, frozen).requires_grad_(False)
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=16))
    assert distance(gradients(ours, loss(ours)), gradients(plain, loss(plain))) < 2e-6


def test_llama4_multiplies_all_tokens_with_all_experts():
    sizes: dict[str, Any] = {"num_local_experts": 4, "intermediate_size_mlp": 96, "use_qk_norm": False}
    plain, ids = language_model("llama4_text", **sizes), text(0, 2, 33)
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=16), report=False)
    assert distance(gradients(ours, loss_of(ours, ids)), gradients(plain, loss_of(plain, ids))) < 2e-5
    sizes_kept = []
    for model, policy in ((plain, None), (copy.deepcopy(plain), LayerAware())):
        if policy is not None:
            compress_saved_(model, policy, report=False)
        with counted(model) as saved:
            loss_of(model, ids, autocast=True)
        sizes_kept.append(saved.total)
    assert sizes_kept[1] < 0.3 * sizes_kept[0]


def test_wrong_sizes_get_pytorch_s_own_errors():
    plain = build("bmm")
    plain.second = nn.Parameter(torch.randn(EXPERTS, DIM, FFN + 8))
    ours = copy.deepcopy(plain)
    compress_saved_(ours, report=False)
    for module in (plain, ours):
        with pytest.raises(RuntimeError, match="batch2"):
            loss(module)
