"""Functions of DTensors, whose shards need not be even, and a Llama split over pipeline, tensor and data."""

import logging
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, counted, follow
from lowbit.codecs import BlockFloat8, Cast
from lowbit.collectives import all_reduce
from lowbit.gradients import GradientStorage
from lowbit.pipeline import LowBitStage
from tests.lowbit.activations.models import Calls, Runs, distance, hugging_face
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


POLICIES = {"none": None, "ours": LayerAware(), "published": LayerAware.published()}
VOCABULARY, LAYERS, TOKENS, ROWS, MICRO_BATCHES = 256, 2, 32, 2, 2
FP8 = BlockFloat8()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is split. Replicas store gradients in FP8 and average them by an 8-bit all-reduce."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    sequence: bool = False

    @property
    def ranks(self) -> int:
        return self.pipeline * self.tensor * self.data


class LlamaStage(nn.Module):
    """Some of a Llama's layers; the first stage embeds tokens, the last one has the head."""

    def __init__(self, policy: str, index: int = 0, count: int = 1) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 172, "head_dim": 16}
        whole, each = hugging_face("llama", LAYERS, **sizes), LAYERS // count
        self.embed = whole.model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in range(index * each, (index + 1) * each)})
        self.rotary, self.positions = whole.model.rotary_emb, torch.arange(TOKENS).unsqueeze(0)
        last = index == count - 1
        self.norm, self.head = (whole.model.norm, whole.lm_head) if last else (None, None)
        chosen = POLICIES[policy]
        if chosen is not None:
            compress_saved_(self, chosen)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the stage's output from tokens or hidden states (with sequence parallelism, this rank's part)."""
        x = x if self.embed is None else self.embed(x)
        rotary = self.rotary(x, self.positions)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=rotary)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def shard_(stage: LlamaStage, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split a stage over the ranks of `mesh`."""
    between = Shard(1) if sequence else Replicate()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")}
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        whole = {"hidden_states": Replicate()}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts=whole  # pyright: ignore
        )  # fmt: skip
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        ends["norm"] = SequenceParallel()
    parallelize_module(stage, mesh, {name: style for name, style in ends.items() if getattr(stage, name) is not None})
    for layer in stage.layers.values():
        parallelize_module(layer, mesh, plan)


def tokens(replica: int) -> Tensor:
    """All micro-batches of a replica."""
    shape = (ROWS * MICRO_BATCHES, TOKENS + 1)
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(replica))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def backward(stage: LlamaStage, replica: int) -> int:
    """Run all micro-batches of a replica, one after the other; return the most bytes that layers kept."""
    with counted(stage) as kept:
        for part in tokens(replica).chunk(MICRO_BATCHES):
            (loss_of(stage(part[:, :-1]), part[:, 1:]) / MICRO_BATCHES).backward()
    return kept.total - kept.peak.get("loss", 0)


def pipelined(stage: LlamaStage, mesh: DeviceMesh, place: int, replica: int) -> int:
    exact, group = Cast(dtype=torch.float32), mesh.get_group("pipeline")
    count = dist.get_world_size(group)
    staged = LowBitStage(stage, place, count, "cpu", group=group, forward=exact, backward=exact)
    schedule, batch = Schedule1F1B(staged, MICRO_BATCHES, loss_fn=loss_of), tokens(replica)
    given, target = [batch[:, :-1]] if place == 0 else [], batch[:, 1:] if place == count - 1 else None
    with counted(stage) as kept:
        schedule.step(*given, target=target)
    return kept.total - kept.peak.get("loss", 0)


def stored(stage: LlamaStage, eight_bits: bool) -> tuple[GradientStorage | None, Any]:
    """A storage in FP8, if it is asked for, and a function that reads a parameter's gradient."""
    storage = GradientStorage(stage, codec=FP8) if eight_bits else None
    return storage, storage.gradient if storage else lambda p: p.grad


def alone(policy: str, replicas: int, eight_bits: bool) -> tuple[dict[str, Tensor], int]:
    """Mean gradients of all replicas in one process, and bytes kept."""
    stage = LlamaStage(policy)
    _, read = stored(stage, eight_bits)
    parts, kept = [], 0
    for replica in range(replicas):
        stage.zero_grad()
        kept = backward(stage, replica)
        parts.append({name: read(p).clone() for name, p in stage.named_parameters()})
    code = FP8.round_trip if eight_bits else (lambda x: x)
    mean: Any = {name: sum(code(part[name]) for part in parts) / replicas for name in parts[0]}
    return {name: code(code(x)) for name, x in mean.items()}, kept


def measured(layout: Layout, policy: str) -> dict[str, float]:
    """This rank's bytes and errors, and those of one process with the same data."""
    eight_bits = layout.data > 1
    exact, _ = alone("none", layout.data, False)
    expected, kept_alone = alone(policy, layout.data, eight_bits)
    shape = (layout.pipeline, layout.data, layout.tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data", "tensor"))
    place, replica = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    stage = LlamaStage(policy, place, layout.pipeline)
    if layout.tensor > 1:
        shard_(stage, mesh["tensor"], sequence=layout.sequence)
    storage, read = stored(stage, eight_bits)
    kept = pipelined(stage, mesh, place, replica) if layout.pipeline > 1 else backward(stage, replica)
    if storage is not None:
        group = mesh.get_group("data")
        storage.all_reduce(lambda flat: all_reduce(flat, FP8, group, "avg", small=1))
    own: dict[str, Any] = {name: read(p) for name, p in stage.named_parameters()}
    own = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in own.items()}
    exact, expected = ({name: grads[name] for name in own} for grads in (exact, expected))
    errors = {"error": distance(own, exact), "error_alone": distance(expected, exact)}
    return {"kept": kept, "kept_alone": kept_alone, **errors}


def check(ranks: Ranks, layout: Layout, policy: str) -> None:
    """Gradients and bytes of each rank against those of one process."""
    plain, coded = (ranks.run(measured, layout, kind, ranks=layout.ranks) for kind in ("none", policy))
    for before, after in zip(plain, coded, strict=True):
        assert after["error"] == pytest.approx(after["error_alone"], rel=0.05)
        share, share_alone = (after[key] / before[key] for key in ("kept", "kept_alone"))
        assert share < 1.05 * share_alone, (share, share_alone)


@pytest.mark.parametrize(("layout", "policy"), [
    (Layout(tensor=2), "ours"),
    (Layout(tensor=2, sequence=True), "published"),
    (Layout(data=2), "published"),
], ids=str)  # fmt: skip
def test_gradients_and_bytes_are_those_of_one_process(ranks: Ranks, layout: Layout, policy: str):
    check(ranks, layout, policy)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_eight_ranks_in_three_dimensions(sequence: bool):
    """Two stages, cut over two ranks each, in two replicas with data of their own; gradients stored and sent in FP8."""
    ranks = Ranks(8)
    try:
        check(ranks, Layout(pipeline=2, tensor=2, data=2, sequence=sequence), "published")
    finally:
        ranks.stop()
