"""Mixture-of-experts layers in few bits: what is kept, gradients, routing, and what stays as it is."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowbit.activations import LayerAware, compress_saved_, counted, experts, restore_
from lowbit.activations.experts import experts_like
from lowbit.codecs import GroupInt
from tests.lowbit.activations.models import Calls, Runs, at, distance, gradients

DIM, FFN, EXPERTS, CHOICES, TOKENS = 32, 48, 6, 2, 40


class Experts(nn.Module):
    """Experts written as most do: a loop, gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, DIM) / DIM**0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, DIM, FFN) / FFN**0.5)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        if int(index.max()) > EXPERTS or int(index.min()) < 0:
            raise IndexError("no such expert")
        for expert in range(EXPERTS):
            token, choice = torch.where(index == expert)
            gate, up = functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = functional.linear(self.gated(gate, up), self.down_proj[expert])
            out.index_add_(0, token, y * weights[token, choice, None])
        return out

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


def block() -> Any:
    """A norm and experts."""
    torch.manual_seed(3)
    parts = {"norm": nn.RMSNorm(DIM), "experts": Experts()}
    return Runs(lambda self, x, *routing: self.experts(self.norm(x), *routing), **parts)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, DIM, generator=numbers).requires_grad_()
    index = torch.rand(TOKENS, EXPERTS, generator=numbers).topk(CHOICES).indices
    return x, index, torch.rand(TOKENS, CHOICES, generator=numbers).requires_grad_()


def all_gradients(block: Any, x: Tensor, index: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Of the parameters and inputs."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    y = block(x, index, weights)
    factors = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    grads = gradients(block, (y * factors).sum())
    return grads | {"x": x.grad, "weights": weights.grad}  # pyright: ignore[reportReturnType]


def assert_close(grads: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(grads, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def blocks() -> tuple[Any, Any]:
    """A compressed one with exact saved activations, and PyTorch's."""
    ours, plain = block(), block()
    compress_saved_(ours, LayerAware(bits=16))
    return ours, plain


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gradients_are_those_at_the_rounded_inputs(bits: int):
    codec = GroupInt(bits=bits, group=40)
    ours, plain = block(), block()
    compress_saved_(ours, LayerAware(bits=bits, norm=bits, group=40))
    x, index, weights = inputs()
    order = index.flatten().sort(stable=True).indices

    def reference(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        own = plain.experts
        x_ = codec.round_trip(x)
        h, h_ = (t[order // CHOICES] for t in (at(plain.norm, (x, x_)), plain.norm(x_)))
        chosen = index.flatten()[order]

        def first(h: Tensor) -> Tensor:
            return torch.einsum("si,soi->so", h, own.gate_up_proj[chosen])

        def last(inner: Tensor) -> Tensor:
            return torch.einsum("si,soi->so", inner, own.down_proj[chosen]) * weights.flatten()[order, None]

        gate, up = at(first, (h, h_)).chunk(2, -1)
        rounded = codec.round_trip(gate.contiguous()), codec.round_trip(up.contiguous())
        out = at(last, (at(own.gated, (gate, rounded[0]), (up, rounded[1])), own.gated(*rounded)))
        return torch.zeros_like(x).index_add(0, order // CHOICES, out)

    grads = all_gradients(ours, x, index, weights)
    plain.forward = reference  # pyright: ignore[reportAttributeAccessIssue]
    assert_close(grads, all_gradients(plain, x, index, weights), 2e-4)


def routings() -> Iterator[Any]:
    for expert in (0, EXPERTS - 1):
        yield pytest.param(torch.full((TOKENS, CHOICES), expert), id=f"all-to-{expert}")
    index = inputs()[1]
    yield pytest.param(torch.where(index == 2, 3, index), id="an-expert-without-tokens")
    yield pytest.param(torch.where(index < 2, EXPERTS, index), id="tokens-without-an-expert")
    yield pytest.param(torch.full_like(index, EXPERTS), id="no-token-with-an-expert")
    yield pytest.param(index.to(torch.int32), id="int32")
    yield pytest.param(index[:, :1], id="one-choice")


@pytest.mark.parametrize("index", [*routings()])
def test_routing_is_exact(index: Tensor, blocks: tuple[Any, Any]):
    x, _, weights = inputs()
    weights = weights[:, : index.shape[1]]
    expected = all_gradients(blocks[1], x, index, weights)
    assert_close(all_gradients(blocks[0], x, index, weights), expected)
    low = block()
    compress_saved_(low, LayerAware(bits=8))
    grads = all_gradients(low, x, index, weights)
    if (index < EXPERTS).any():
        assert distance(grads, expected) < 0.02
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        unused = [expert for expert in range(EXPERTS) if not (index == expert).any()]
        assert not grads[name][unused].any()


def test_the_product_for_all_experts_at_once_gives_the_same(monkeypatch: Any, blocks: tuple[Any, Any]):
    monkeypatch.setattr(experts, "_in_one_launch", lambda x, weight: True)
    x, index, weights = inputs()
    index = torch.where(index == 2, 3, index)
    assert_close(all_gradients(blocks[0], x, index, weights), all_gradients(blocks[1], x, index, weights))


def test_hidden_states_are_saved_once_and_nothing_whole():
    model = block()
    compress_saved_(model, LayerAware(bits=4))
    x, index, weights = inputs()
    with counted(model) as saved:
        model(x, index, weights).sum().backward()
    rows = TOKENS * CHOICES
    norm = GroupInt(bits=8).nbytes((TOKENS, DIM))
    gates = 2 * GroupInt(bits=4).nbytes((rows, FFN))
    routing = rows * (4 + 4)  # the order in int32, and the routing weights
    assert saved.total <= norm + gates + routing


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "both", "weights", "x"])
def test_what_is_frozen_gets_no_gradient(frozen: str, blocks: tuple[Any, Any]):
    x, index, weights = inputs()
    results = []
    for block in blocks:
        for name in ("gate_up_proj", "down_proj"):
            getattr(block.experts, name).requires_grad_(frozen not in (name, "both"))
        inner_x, inner_w = (t.detach().requires_grad_(frozen != n) for t, n in ((x, "x"), (weights, "weights")))
        block.norm.requires_grad_(frozen != "x")
        grads = gradients(block, block(inner_x, index, inner_w).square().sum())
        results.append(grads | {n: t.grad for n, t in (("x", inner_x), ("w", inner_w)) if t.grad is not None})
    assert_close(*results)


def test_checkpointing_and_copies(blocks: tuple[Any, Any]):
    ours, plain = blocks
    x, index, weights = inputs()
    expected = all_gradients(plain, x, index, weights)
    other = copy.deepcopy(ours)
    with torch.no_grad():
        ours.experts.gate_up_proj.zero_()
    assert_close(all_gradients(other, x, index, weights), expected)
    own = other.forward
    other.forward = lambda *args: checkpoint(own, *args, use_reentrant=False)  # pyright: ignore
    assert_close(all_gradients(other, x, index, weights), expected)
    restore_(other)
    assert "forward" not in vars(other.experts)


def test_wrong_input_gets_the_module_s_own_error(blocks: tuple[Any, Any]):
    ours, plain = blocks
    x, index, weights = inputs()
    calls = (
        (x, torch.where(index == 0, EXPERTS + 1, index), weights),
        (x, torch.where(index == 0, -1, index), weights),
        (x[:, : DIM // 2], index, weights),
        (x, index, weights.to(torch.bfloat16)[: TOKENS // 2]),
        (x.bfloat16(), index, weights),
    )
    for call in calls:
        with pytest.raises((RuntimeError, IndexError)) as expected:
            plain.experts(*call)
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            ours.experts(*call)
    with pytest.raises(TypeError):
        ours.experts(x, index)


def test_named_arguments_evaluation_and_hooks(blocks: tuple[Any, Any]):
    ours, plain = blocks
    compress_saved_(plain)
    x, index, weights = inputs()
    y = ours.experts(weights=weights, hidden=x, index=index)
    assert y.grad_fn.name() == "ExpertsFunctionBackward"
    for change in ("eval", "hook", "no_grad"):
        block = copy.deepcopy(ours)
        if change == "eval":
            block.eval()
        if change == "hook":
            block.experts.act_fn.register_forward_hook(lambda *call: call[-1] * 2)
        with torch.set_grad_enabled(change != "no_grad"):
            out = block.experts(x, index, weights)
        assert out.grad_fn is None or out.grad_fn.name() != "ExpertsFunctionBackward"
        assert torch.allclose(out, y) == (change != "hook")


def test_a_gate_without_an_operator_is_recomputed_in_full_precision():
    class Squared(Experts):
        def gated(self, gate: Tensor, up: Tensor) -> Tensor:
            return self.act_fn(gate).square() * (up + 1)

        def _apply_gate(self, pre: Tensor) -> Tensor:
            return self.gated(*pre.chunk(2, -1))

    ours, plain = block(), block()
    ours.experts.__class__ = plain.experts.__class__ = Squared
    done = compress_saved_(ours, LayerAware(bits=8, norm=16))
    assert set(done.bits) == {"norm", "experts"}
    x, index, weights = inputs()
    expected = all_gradients(plain, x, index, weights)
    assert distance(all_gradients(ours, x, index, weights), expected) < 0.01
    with counted(ours) as saved, Calls() as calls:
        ours(x, index, weights).sum().backward()
    assert not any("gated" in name for name in calls.count)  # nothing inside is rounded once more
    assert saved.total < 4 * x.numel() + 1.1 * TOKENS * CHOICES * (2 * FFN + 8)


def test_other_formulas_are_left_alone():
    class Scaled(Experts):
        def gated(self, gate: Tensor, up: Tensor) -> Tensor:
            return super().gated(gate, up) * 1.01

    class Normed(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(DIM))

    learned = Experts()
    learned.act_fn = nn.PReLU()
    flat = Experts()
    flat.down_proj = nn.Parameter(torch.randn(DIM, FFN))
    assert experts_like(Experts()) is not None
    for module in (Scaled(), Normed(), learned, flat, nn.Linear(3, 3)):
        assert experts_like(module) is None
