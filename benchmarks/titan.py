"""`python -m benchmarks titan`: training speed of TorchTitan's pipeline over emulated slow links, by boundary format.

TorchTitan's Llama is cut by its own pipelining function and parallelized by its own parallelize function; its stages
are PyTorch's or lowbit's. The model has the sizes of `lowbit bench pipeline`, so that the ratios can be compared. All
formats train in the same processes and take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lowbit.codecs import parse
from lowbit.codecs.names import pair_name
from lowbit.config import ConfigError, Positive, section
from lowbit.integrations.engine import engine
from lowbit.report import Baseline, Column, Command, Row, Table, summary
from lowbit.report.style import row_name
from lowbit_lab.bench.recipes import MANY_STAGES, THIN_MODEL
from lowbit_lab.bench.settings import LINK, Links, Names
from lowbit_lab.bench.worker import serve
from lowbit_lab.bench.workers import set_link, started
from lowbit_lab.network import Link

OWN = "stock-fp32"
VOCABULARY = 256
FULL = 32.0


@section()
class TitanBenchmark:
    """Boundary formats and links."""

    links: Links = (Link(100.0),)
    """Links to emulate: a rate, with a round trip if there is a distance, such as 25mbit, 100mbit/40ms or unlimited."""
    boundaries: Names = (OWN, "fp32", "int4", "transform")
    """Formats of activations, by name or in full. stock-fp32 is PyTorch's own stage, which TorchTitan uses."""
    layers: Positive = THIN_MODEL.layers
    """Decoder layers, one for each stage; a multiple of the two ranks."""
    batch: Positive = 32
    """Samples of a step, in 4 micro-batches."""
    sequence: Positive = 128
    """Tokens of a sample."""
    rounds: Positive = 3
    """Turns of each format on each link."""
    steps: Positive = 2
    """Timed steps of a turn. One more comes first and is not timed."""

    def __post_init__(self) -> None:
        for name, factor in (("layers", MANY_STAGES.ranks), ("batch", MANY_STAGES.microbatches)):
            if (value := getattr(self, name)) % factor:
                raise ConfigError(f"{name} is {value}; allowed: multiples of {factor}")
        for boundary in set(self.boundaries) - {OWN}:
            parse(boundary)


def measure(settings: TitanBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every boundary on every link.

    Yields:
        Rows, one for each link and boundary: `boundary`, the fields of `set_link`, `tokens_per_second` (with the fields
        of `summary`), `speedup_stock_fp32`, `bits_forward`, `bits_backward`, `loss` (of the last step).

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with started("benchmarks.titan", MANY_STAGES.ranks, settings.links) as (network, ranks):
        sizes: dict[str, Any] = {"layers": settings.layers, "batch": settings.batch, "sequence": settings.sequence}
        for boundary in settings.boundaries:
            ranks.ask("open", boundary=boundary, **sizes)
        for link in settings.links:
            about, speeds = set_link(network, link), {boundary: [] for boundary in settings.boundaries}
            for _ in range(settings.rounds):
                for boundary in settings.boundaries:
                    for step in range(1 + settings.steps):
                        answers = ranks.ask("step", boundary=boundary)
                        if step:
                            seconds = max(answer["seconds"] for answer in answers)
                            speeds[boundary].append(settings.batch * settings.sequence / seconds)
                    rows[about["link"], boundary] = _row(boundary, about, speeds[boundary], answers)
                    yield list(rows.values())


def _row(boundary: str, about: dict[str, Any], speeds: list[float], answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "boundary": boundary,
        **about,
        **summary(speeds, "tokens_per_second"),
        **{name: statistics.mean(answer[name] for answer in answers) for name in ("bits_forward", "bits_backward")},
        "loss": answers[-1]["loss"],
    }


def _spread(row: Row) -> float:
    return (row["tokens_per_second_high"] - row["tokens_per_second_low"]) / row["tokens_per_second"]


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


COMMAND = Command(
    name="titan",
    summary="Training speed of TorchTitan's pipeline over emulated slow links, by boundary format.",
    examples=("python -m benchmarks titan --link 100mbit --boundary stock-fp32,transform",),
    settings=TitanBenchmark,
    measure=measure,
    baselines=[
        Baseline(field="speedup_stock_fp32", value="tokens_per_second", to={"boundary": OWN}, alike=("link",)),
    ],
    tables=[
        Table(
            title="Training speed of TorchTitan's pipeline",
            gap="link",
            columns=[
                LINK,
                Column("boundary", "boundary", lambda name: row_name(pair_name(name))),
                Column("tokens/s", "tokens_per_second", "{:,.0f}"),
                Column("spread", _spread, "{:.0%}"),
                Column("over its\nown stage", "speedup_stock_fp32", "{:.2f}x"),
                Column("bits\nfwd", "bits_forward", "{:.2f}"),
                Column("bits\nbwd", "bits_backward", "{:.2f}"),
                Column("loss", "loss", "{:.3f}"),
            ],
        )
    ],
)


if __name__ == "__main__":
    serve(TitanRank)
