"""`lowbit plan memory`: how many bits saved activations get, by pipeline stage and layer type, for the memory there is.

Bytes are counted on one decoder layer of the real shape, with and without what the first and the last stage have
besides, and multiplied; errors of the gradient are measured on the whole model, on few tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lowbit.activations.budget import CHOSEN, StageCost, beside_autograd, plan_bits
from lowbit.activations.in_flight import InFlight, in_flight, order_of
from lowbit.bench.pipeline import check_at_least, model_of
from lowbit.bench.plan_stages import OPTIMIZERS, StageMeter, gradient_errors
from lowbit.bench.report import Report, machine
from lowbit.codecs import parse
from lowbit.codecs.base import check_choice
from lowbit.train.config import FULL_PRECISION, ModelConfig, PipelineConfig
from lowbit.train.layout import Layout, make_layout
from lowbit.train.model import count_layers, vocabulary

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_LEAST = {"sequence": 1, "batch": 1, "error_tokens": 2, "error_steps": 0, "max_bytes": 1}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The pipeline, the model, and the memory of a device.

    Args:
        budget: bytes of a device for weights, gradients, optimizer, saved activations and what the pipeline holds, such
            as 24gb or 500mib; absent: what the neediest rank takes with 4 bits everywhere.
        schedule: of `torch.distributed.pipelining`: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
            ZBVZeroBubble or DualPipeV.
        ranks: of the pipeline; stages_per_rank: more than one for interleaved and V-shaped schedules.
        microbatches: of a step; batch: samples of a micro-batch; sequence: tokens of a sample.
        weights: "fp32" (master weights; matrix products in bfloat16 by autocast) or "bf16" (no master weights).
        gradients: what they are kept in: fp32, or a codec such as fp8.
        optimizer: adamw (float32 states) or adamw-8bit.
        family: architecture: llama, gpt2, ... as in `lowbit train`.
        pretrained: local Hugging Face folder to take the model from; the sizes below then do not count.
        dim: width of the model; layers: decoder layers; heads: attention heads.
        kv_heads: key and value heads; 0: as many as heads. ffn: width of the feed-forward; 0: the family's usual.
        vocab: entries of the embedding.
        group: elements that share a scale.
        error_tokens: tokens of the sample on which errors of the gradient are measured.
        error_steps: of training on such samples before that, unless the model is pretrained: the gradients of random
            weights say little.
        text: files or folders for these samples; absent: Python's standard library.
        max_bytes: read no more text than this; seed: of weights and samples.
    """

    budget: str = ""
    schedule: str = "1F1B"
    ranks: int = 4
    stages_per_rank: int = 1
    microbatches: int = 8
    batch: int = 1
    sequence: int = 1024
    weights: str = "fp32"
    gradients: str = FULL_PRECISION
    optimizer: str = "adamw"
    family: str = "llama"
    pretrained: str = ""
    dim: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 256
    group: int = 64
    error_tokens: int = 256
    error_steps: int = 20
    text: tuple[str, ...] = ()
    max_bytes: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, **_LEAST)
        check_choice("weights", self.weights, ("fp32", "bf16"))
        check_choice("optimizer", self.optimizer, tuple(OPTIMIZERS))
        if self.gradients != FULL_PRECISION:
            parse(self.gradients)
        parse_bytes(self.budget or "1")
        _ = self.layout, vocabulary(self.model, 256)

    @property
    def model(self) -> ModelConfig:
        """The model as `lowbit train` describes it."""
        return model_of(self)

    @property
    def held(self) -> InFlight:
        """Micro-batches that the stages hold."""
        order = order_of(
            self.schedule, ranks=self.ranks, stages_per_rank=self.stages_per_rank, microbatches=self.microbatches
        )
        return in_flight(order)

    @property
    def layout(self) -> Layout:
        """Which rank and which stage has which layers."""
        pipeline = PipelineConfig(
            ranks=self.ranks, stages_per_rank=self.stages_per_rank, schedule=self.schedule,
            microbatches=self.microbatches,
        )  # fmt: skip
        return make_layout(pipeline, ranks=self.ranks, layers=count_layers(self.model))


def parse_bytes(text: str) -> int:
    """The number in "24gb", "1.5gib", "300mb" or "1000000".

    Raises:
        ValueError: another text.
    """
    found = re.fullmatch(r"([0-9.]+) *([a-z]*)", text.strip().lower())
    try:
        return int(float(found[1]) * _UNITS[found[2]])  # pyright: ignore[reportOptionalSubscript]
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"budget is {text!r}; allowed: bytes, such as 24gb, 1.5gib or 800mb") from None


def run(settings: Settings) -> Report:
    """Measure, and choose.

    Returns:
        A report with a row for each stage: `stage`, `rank`, `layers`, `held` (micro-batches at its peak), `norm`,
        `mlp`, `linear` (bits), `saved_bytes` (kept by autograd at that peak), `int4_bytes` and `bf16_bytes` (the same
        with 4 bits everywhere, and in plain BF16), `fixed_bytes` (weights, gradients, optimizer), `pipeline_bytes`
        (inputs, outputs and gradients that the pipeline holds at most), `device_bytes` (of its rank: all its
        stages together, at the rank's worst moment), `error` (its part of the gradient's relative error); and, alike in
        all rows, `budget`, `least` (the smallest that would do), `error_all` and `error_int4` (of the plan, and of 4
        bits everywhere).

    Raises:
        ValueError: a budget that nothing fits in; it names the least that would do.
    """
    held, layout, meter = settings.held, settings.layout, StageMeter(settings)
    stages = [meter.stage(layout, stage) for stage in range(layout.stages)]
    errors = gradient_errors(settings)
    choose = partial(plan_bits, held, sensitivities=errors, group=settings.group)
    int4 = choose([_only(stage.cost, 4) for stage in stages], device_bytes=1 << 62)
    budget = parse_bytes(settings.budget) if settings.budget else max(int4.device_bytes.values())
    plan = choose([stage.cost for stage in stages], device_bytes=budget)
    rows = [
        {
            "stage": one.stage,
            "rank": one.rank,
            "layers": stages[one.stage].cost.layers,
            "held": one.held,
            **one.bits,
            "saved_bytes": one.saved_bytes,
            "int4_bytes": int4.stages[one.stage].saved_bytes,
            "bf16_bytes": one.held * stages[one.stage].plain,
            "fixed_bytes": stages[one.stage].cost.fixed,
            "pipeline_bytes": _pipeline_bytes(held, one.stage, [stage.cost for stage in stages]),
            "device_bytes": plan.device_bytes[one.rank],
            "error": one.error,
            "budget": plan.limit,
            "least": plan.least,
            "error_all": plan.error,
            "error_int4": int4.error,
        }
        for one in plan.stages
    ]
    return Report(command="plan memory", settings=settings, machine=machine(), rows=rows)


def _pipeline_bytes(held: InFlight, stage: int, costs: Sequence[StageCost]) -> int:
    """The most that the pipeline, not autograd, holds of a stage's micro-batches."""
    moments = held.moments[held.rank_of(stage)]
    return max(beside_autograd(held, moment, costs, [stage]) for moment in moments)


def _only(cost: StageCost, bits: int) -> StageCost:
    """The same stage with no choice."""
    return replace(cost, saved={kind: {bits: cost.saved[kind][bits]} for kind in CHOSEN})
