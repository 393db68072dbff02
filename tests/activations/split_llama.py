"""A Llama that is split over pipeline, tensor and data: bytes kept and errors of gradients, next to one process."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, counted
from lowbit.codecs import BlockFloat8, Cast
from lowbit.collectives import all_reduce
from lowbit.gradients import GradientStorage
from lowbit.pipeline import LowBitStage
from tests.activations.models import distance, hugging_face

POLICIES = {"none": None, "ours": LayerAware(), "published": LayerAware.published()}
VOCABULARY, LAYERS, LENGTH, ROWS, MICRO_BATCHES = 256, 2, 32, 2, 2
FORMAT = BlockFloat8()
Gradients = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How a model is split. `sequence`: sequence parallel.

    Replicas store gradients in FP8 and average them by an 8-bit all-reduce.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    sequence: bool = False

    @property
    def ranks(self) -> int:
        return self.pipeline * self.tensor * self.data


class LlamaStage(nn.Module):
    """Some of a Llama's layers; the first stage embeds tokens, the last one has the head."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 172, "head_dim": 16}
        whole = hugging_face("llama", LAYERS, **sizes)
        each = LAYERS // count
        layers = list(whole.model.layers)[index * each : (index + 1) * each]
        self.embed = whole.model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleDict({str(index * each + i): layer for i, layer in enumerate(layers)})
        self.rotary, self.positions = whole.model.rotary_emb, torch.arange(LENGTH).unsqueeze(0)
        last = index == count - 1
        self.norm, self.head = (whole.model.norm, whole.lm_head) if last else (None, None)

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
        given: dict[str, Placement] = {"hidden_states": Shard(1)}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts=given, desired_input_kwarg_layouts=dict.fromkeys(given, Replicate())
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        ends["norm"] = SequenceParallel()
    parallelize_module(stage, mesh, {name: style for name, style in ends.items() if getattr(stage, name) is not None})
    for layer in stage.layers.values():
        parallelize_module(layer, mesh, plan)


def tokens(replica: int) -> Tensor:
    """Return all micro-batches of a replica."""
    shape = (ROWS * MICRO_BATCHES, LENGTH + 1)
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(replica))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy."""
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def backward(stage: LlamaStage, replica: int) -> int:
    """Run all micro-batches of a replica, one after the other; return the most bytes that layers kept."""
    with counted(stage) as kept:
        for part in tokens(replica).chunk(MICRO_BATCHES):
            (loss_of(stage(part[:, :-1]), part[:, 1:]) / MICRO_BATCHES).backward()
    return kept.total - kept.peak.get("loss", 0)


def alone(policy: str, replicas: int, *, eight_bits: bool = False) -> tuple[Gradients, int]:
    """Return mean gradients of all replicas in one process, and bytes kept; `eight_bits`: stored and averaged so."""
    stage = made(policy)
    storage = GradientStorage(stage, codec=FORMAT) if eight_bits else None
    parts, kept = [], 0
    for replica in range(replicas):
        stage.zero_grad()
        kept = backward(stage, replica)
        read = storage.gradient if storage else (lambda p: p.grad)
        parts.append({name: read(p).clone() for name, p in stage.named_parameters()})  # pyright: ignore
    code = FORMAT.round_trip if eight_bits else (lambda x: x)
    mean = {name: sum(code(part[name]) for part in parts) / replicas for name in parts[0]}
    return {name: code(code(x)) for name, x in mean.items()}, kept  # pyright: ignore


def made(policy: str, index: int = 0, count: int = 1) -> LlamaStage:
    """Make a stage that keeps activations by this policy."""
    stage, chosen = LlamaStage(index, count), POLICIES[policy]
    if chosen is not None:
        compress_saved_(stage, chosen)
    return stage


def measured(layout: ParallelLayout, policy: str) -> dict[str, Any]:
    """Measure this rank's bytes and errors, and those of one process with the same data."""
    eight_bits = layout.data > 1
    exact, _ = alone("none", layout.data)
    expected, kept_alone = alone(policy, layout.data, eight_bits=eight_bits)
    shape = (layout.pipeline, layout.data, layout.tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data", "tensor"))
    place, replica = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    stage = made(policy, place, layout.pipeline)
    if layout.tensor > 1:
        shard_(stage, mesh["tensor"], sequence=layout.sequence)
    storage = GradientStorage(stage, codec=FORMAT) if eight_bits else None
    kept = _pipelined(stage, mesh, place, replica) if layout.pipeline > 1 else backward(stage, replica)
    if storage is not None:
        group = mesh.get_group("data")
        storage.all_reduce(lambda flat: all_reduce(flat, FORMAT, group, "avg", small=1))
    read = storage.gradient if storage else (lambda p: p.grad)
    own: dict[str, Any] = {name: read(p) for name, p in stage.named_parameters()}
    own = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in own.items()}
    exact, expected = ({name: grads[name] for name in own} for grads in (exact, expected))
    errors = {"error": distance(own, exact), "error_alone": distance(expected, exact)}
    return {"kept_bytes": kept, "kept_alone": kept_alone, **errors}


def _pipelined(stage: LlamaStage, mesh: DeviceMesh, place: int, replica: int) -> int:
    exact: Any = Cast(dtype=torch.float32)
    group = mesh.get_group("pipeline")
    count = dist.get_world_size(group)
    staged = LowBitStage(stage, place, count, "cpu", group=group, forward=exact, backward=exact)
    schedule = Schedule1F1B(staged, MICRO_BATCHES, loss_fn=loss_of)
    batch = tokens(replica)
    with counted(stage) as kept:
        schedule.step(
            *((batch[:, :-1],) if place == 0 else ()), target=batch[:, 1:] if place == count - 1 else None
        )  # fmt: skip
    return kept.total - kept.peak.get("loss", 0)
