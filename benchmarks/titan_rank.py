"""One rank of `python -m benchmarks titan`: TorchTitan's Llama as a pipeline, trained on demand, on a CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.titan import OWN
from lowbit.codecs import parse
from lowbit.integrations.engine import engine
from lowbit_lab.bench.recipes import MANY_STAGES, THIN_MODEL
from lowbit_lab.bench.worker import serve

VOCABULARY = 256
FULL = 32.0


class TitanRank:
    """Pipelines by boundary format, on the same weights and tokens."""

    def __init__(self) -> None:
        titan("tools.utils").device_type = "cpu"  # before the others read it: TorchTitan expects CUDA
        self._pipelines: dict[str, SimpleNamespace] = {}

    def open(self, boundary: str, layers: int, batch: int, sequence: int) -> None:
        """Build a pipeline with TorchTitan's own functions."""
        spec = _spec(layers, sequence)
        if boundary != OWN:
            from lowbit.integrations.torchtitan import LowBitConfig, low_bit

            spec = low_bit(spec, LowBitConfig(forward=parse(boundary)))
        configs = titan("config")
        stages = [[f"layers.{i}"] for i in range(layers)]
        stages[0].insert(0, "tok_embeddings")
        stages[-1] += ["norm", "lm_head"]
        parallelism = configs.ParallelismConfig(
            pipeline_parallel_degree=MANY_STAGES.ranks, pipeline_parallel_schedule=MANY_STAGES.schedule,
            pipeline_parallel_microbatch_size=batch // MANY_STAGES.microbatches, module_fqns_per_model_part=stages,
            spmd_backend="partial_dtensor",
        )  # fmt: skip
        compilation, device = configs.CompileConfig(), torch.device("cpu")
        with torch.device("meta"):
            model = spec.model.build()
        loss = titan("components.loss").CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
        schedule, parts, _, has_last = spec.pipelining_fn(
            model,
            parallel_dims=titan("distributed").ParallelDims.from_config(parallelism, dist.get_world_size()),
            training=configs.TrainingConfig(
                local_batch_size=batch, seq_len=sequence, mixed_precision_param="float32"
            ),
            parallelism=parallelism, compile_config=compilation, ac_config=None, dump_folder="", device=device,
            model_config=spec.model, parallelize_fn=spec.parallelize_fn,
            loss_fn=loss.build(compile_config=compilation),
        )  # fmt: skip
        torch.manual_seed(dist.get_rank())
        for part in parts:
            part.to_empty(device=device)
            with torch.no_grad():
                part.init_weights(buffer_device=None)
        tokens = torch.randint(VOCABULARY, (batch, sequence + 1), generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
        self._pipelines[boundary] = SimpleNamespace(
            schedule=schedule, parts=parts, has_last=has_last, optimizer=optimizer, tokens=tokens
        )

    def step(self, boundary: str) -> dict[str, Any]:
        """Train one step."""
        own = self._pipelines[boundary]
        inputs, target = own.tokens[:, :-1], own.tokens[:, 1:]
        losses: list[torch.Tensor] | None = [] if own.has_last else None
        dist.barrier()
        start = time.perf_counter()
        own.schedule.step(
            *(() if dist.get_rank() else (inputs,)), target=target if own.has_last else None, losses=losses,
            loss_kwargs={"global_valid_tokens": torch.tensor(target.numel())}, return_outputs=False,
        )  # fmt: skip
        own.optimizer.step()
        own.optimizer.zero_grad()
        dist.barrier()
        traffic = [stage.traffic for stage in own.schedule._stages if hasattr(stage, "traffic")]
        return {
            "seconds": time.perf_counter() - start,
            "loss": float(torch.stack(losses).sum()) if losses else None,
            "bits_forward": _bits([each.forward_bits for each in traffic]),
            "bits_backward": _bits([each.backward_bits for each in traffic]),
        }


def _bits(sent: list[float]) -> float:
    """The mean over stages that send this way; PyTorch's stages send float32."""
    coded = [bits for bits in sent if bits]
    return sum(coded) / len(coded) if coded else FULL


def _spec(layers: int, sequence: int) -> Any:
    """A `ModelSpec` like that of TorchTitan's debug model, with the sizes of `THIN_MODEL`."""
    llama, common = titan("models.llama3"), titan("models.common")
    spec, dim = llama.model_registry("debugmodel"), THIN_MODEL.dim
    rope = common.ComplexRoPE.Config(dim=dim // THIN_MODEL.heads, max_seq_len=sequence, theta=500000, scaling="llama")
    spec.model.layers = llama._build_llama3_layers(
        n_layers=layers, dim=dim, n_heads=THIN_MODEL.heads, n_kv_heads=THIN_MODEL.kv_heads, hidden_dim=THIN_MODEL.ffn,
        rope=rope, attn_backend="flex",
    )  # fmt: skip
    attention = titan("models.common.attention").ScaledDotProductAttention  # FlexAttention has no backward on a CPU
    for layer in spec.model.layers:
        layer.attention.inner_attention = attention.Config()
    spec.model.dim, spec.model.vocab_size = dim, VOCABULARY
    tokens, norm, head = spec.model.tok_embeddings, spec.model.norm, spec.model.lm_head
    tokens.num_embeddings, tokens.embedding_dim, norm.normalized_shape = VOCABULARY, dim, dim
    head.in_features, head.out_features = dim, VOCABULARY
    return spec


def titan(module: str) -> Any:
    """A module of TorchTitan."""
    return engine(f"torchtitan.{module}", package="torchtitan", extra="titan", tested="0.3.0")


if __name__ == "__main__":
    serve(TitanRank)
