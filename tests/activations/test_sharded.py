"""Functions of DTensors, whose shards need not be even: what they save, and their gradients."""

import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, follow
from tests.activations.models import Calls, Runs
from tests.activations.split_llama import ParallelLayout, measured
from tests.processes import Ranks, on_ranks

WIDTH, INNER, HEADS, LENGTH = 36, 75, 3, 7
"""None of which two ranks share evenly, but for the width."""


class Block(nn.Module):
    """A gated feed-forward behind a norm, whose inner tensors stay DTensors."""

    def __init__(self, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.act = norm(WIDTH), nn.SiLU()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=bias) for bias in (True, False))
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Any) -> Any:
        h = self.norm(x)
        if isinstance(h, DTensor):
            h = h.redistribute(placements=[Replicate()], async_op=True)
        out = self.down(self.act(self.gate(h)) * self.up(h))
        return out.redistribute(placements=x.placements) + x if isinstance(x, DTensor) else out + x


def block(mesh: Any = None, norm: Any = nn.LayerNorm) -> Block:
    torch.manual_seed(3)
    model = Block(norm)
    columns = ColwiseParallel(use_local_output=False)
    plan = {"norm": SequenceParallel(), "gate": columns, "up": columns}
    if mesh is None:
        return model
    # What it makes of a local input has even shards; a DTensor stays as it is.
    down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return parallelize_module(model, mesh, {**plan, "down": down})  # pyright: ignore


def gradients_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of all parameters and the input, whole."""
    model(x).square().sum().backward()
    own: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in own.items()}


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dim", [0, 1])
@on_ranks
def test_a_feed_forward_saves_what_its_shards_save(norm: Any, dim: int) -> None:
    """The norm's input, gate and up. Nothing of the gathered norm's output and of the product: they are rebuilt."""
    mesh = init_device_mesh("cpu", (2,))
    expected = gradients_of(block(norm=norm), inputs())
    seen = []
    for bits, tolerance in ((16, 1e-6), (8, 0.03)):
        model = block(mesh, norm)
        plain = block(mesh, norm)
        compress_saved_(model, LayerAware(bits=bits, smallest=1))
        x, y = (distribute_tensor(inputs(), mesh, [Shard(dim)]).detach().requires_grad_() for _ in range(2))
        with Calls() as calls:
            loss = model(x).square().sum()
        seen.append(calls.count)
        loss.backward()
        plain(y).square().sum().backward()
        for (name, p), q in zip([*model.named_parameters(), ("x", x)], [*plain.parameters(), y], strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.placements == q.grad.placements, name  # pyright: ignore
            whole: Any = p.grad
            error = (whole.full_tensor() - expected[name]).norm() / expected[name].norm()
            assert error < tolerance, (name, error)
    exact, coded = seen
    assert not exact
    assert coded == {"norm_encode": 1, "gated_encode": 1, "group_int_encode": 1}


@on_ranks
def test_attention_of_local_heads() -> None:
    mesh = init_device_mesh("cpu", (2,))
    given = [torch.randn(2, HEADS, LENGTH, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    attention = Runs(lambda self, *x: functional.scaled_dot_product_attention(*x, is_causal=True))
    plain = [t.clone().requires_grad_() for t in given]
    attention(*plain).square().sum().backward()
    model = nn.Sequential(attention, nn.Linear(1, 1))
    compress_saved_(model, LayerAware(attention=8))
    cut: Any = [distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in given]  # heads: 2 and 1
    with Calls() as calls:
        out = model[0](*cut)
    assert calls.count["group_int_encode"] >= 3
    assert out.placements == (Shard(1),)
    out.square().sum().backward()
    for x, y in zip(cut, plain, strict=True):
        assert y.grad is not None
        assert (x.grad.full_tensor() - y.grad).norm() < 0.02 * y.grad.norm()


@on_ranks
def test_what_shards_do_not_suffice_for_is_left_and_told_once() -> None:
    """A row-wise layer of a replicated input, and shards so small that one is empty, in one and the same order."""
    mesh = init_device_mesh("cpu", (2,))
    lines = []
    follow.say_once.cache_clear()
    with mock.patch.object(logging.getLogger("lowbit.activations.follow"), "warning", lines.append):
        torch.manual_seed(3)
        plain, model = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        model.load_state_dict(plain.state_dict())
        parallelize_module(model, mesh, RowwiseParallel(input_layouts=Replicate()))
        model._forward_pre_hooks.clear()  # which would cut the input
        compress_saved_(model)
        x = distribute_tensor(inputs(), mesh, [Replicate()]).detach().requires_grad_()
        expected = gradients_of(plain, inputs())
        for name, gradient in gradients_of(model, x).items():
            assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-4), name
        assert len(lines) == 1
        short, expected = block(mesh), gradients_of(block(), inputs(1))
        compress_saved_(short)
        x = distribute_tensor(inputs(1), mesh, [Shard(1)]).detach().requires_grad_()
        for name, gradient in gradients_of(short, x).items():
            assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name
    assert lines == ["activations are saved in full where they are ['DTensor of torch.float32']"]


@on_ranks
def test_passes_for_some_gradients() -> None:
    """Gradients of some tensors only, twice through one graph."""
    mesh = init_device_mesh("cpu", (2,))
    model = block(mesh)
    compress_saved_(model, LayerAware(bits=16, smallest=1))
    x = distribute_tensor(inputs(), mesh, [Shard(1)]).detach().requires_grad_()
    loss = model(x).square().sum()
    some: Any = torch.autograd.grad(loss, [model.up.weight, x], retain_graph=True)
    every: Any = torch.autograd.grad(loss, [x, *model.parameters()])
    assert torch.allclose(some[1].full_tensor(), every[0].full_tensor(), rtol=1e-5)
    names = [name for name, _ in model.named_parameters()]
    up = every[1 + names.index("up.weight")]
    assert torch.allclose(some[0].full_tensor(), up.full_tensor(), rtol=1e-5)
    dist.barrier()


def check(ranks: Ranks, layout: ParallelLayout, policy: str) -> None:
    """Gradients and bytes of each rank against those of one process."""
    plain, coded = (ranks.run(measured, layout, kind, ranks=layout.ranks) for kind in ("none", policy))
    for before, after in zip(plain, coded, strict=True):
        assert after["error"] == pytest.approx(after["error_alone"], rel=0.05)
        share, share_alone = (after[key] / before[key] for key in ("kept_bytes", "kept_alone"))
        assert share < 1.05 * share_alone, (share, share_alone)


@pytest.mark.parametrize(("layout", "policy"), [
    (ParallelLayout(tensor=2), "ours"),
    (ParallelLayout(tensor=2, sequence=True), "published"),
    (ParallelLayout(data=2), "published"),
], ids=str)  # fmt: skip
def test_gradients_and_bytes_are_those_of_one_process(ranks: Ranks, layout: ParallelLayout, policy: str):
    check(ranks, layout, policy)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    processes = Ranks(8)
    yield processes
    processes.stop()


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_eight_ranks_in_three_dimensions(eight_ranks: Ranks, sequence: bool):
    """Two stages, cut over two ranks each, in two replicas with data of their own; gradients stored and sent in FP8."""
    check(eight_ranks, ParallelLayout(pipeline=2, tensor=2, data=2, sequence=sequence), "published")
