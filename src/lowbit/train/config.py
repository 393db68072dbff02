"""The configuration of a training run: one frozen value in seven sections.

A section checks its values when it is made; `lowbit.train.prepare` checks them against files, ranks and the model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from lowbit.config import ConfigError, NonNegative, Positive, build, resolve, section

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"]
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
Boundary = Literal["lowbit", "stock-fp32", "stock-bf16"]
Share = Annotated[float, Field(ge=0, le=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(ge=1, le=1_000_000)]

FAMILIES = get_args(Family)
SCHEDULES = {name.lower(): name for name in get_args(Schedule)}
FULL_PRECISION = "fp32"


def _schedule(name: Any) -> Any:
    """A schedule's name in PyTorch's capitalization."""
    return SCHEDULES.get(name.lower(), name) if isinstance(name, str) else name


@section("model")
class ModelConfig:
    """The model: a causal language model of these sizes, or pretrained from a local folder."""

    family: Family = "llama"
    """Architecture; not used with `pretrained`."""
    pretrained: str = ""
    """Local folder in Hugging Face format to start from; the sizes below then come from it."""
    dim: Positive = 256
    """Width."""
    layers: Positive = 8
    """Decoder layers."""
    heads: Positive = 4
    """Attention heads."""
    kv_heads: NonNegative = 0
    """Key and value heads; 0: as many as `heads`."""
    ffn: NonNegative = 0
    """Width of the feed-forward; 0: the family's usual."""
    vocab: NonNegative = 0
    """Entries of the embedding; 0: as many as the tokenizer has."""
    tied: bool | None = None
    """Whether embedding and output share their weights; absent: the family's usual."""
    dropout: Share = 0.0
    """Probability of dropout, wherever the family has it."""

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.family != "gpt2" and self.dim // self.heads % 2):
            raise ConfigError(
                f"model.dim is {self.dim}; allowed: a multiple of model.heads ({self.heads}) "
                "with an even width for each head"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads is {self.kv_heads}; allowed: a divisor of model.heads ({self.heads})")


@section("data")
class DataConfig:
    """Text, cut into windows of `sequence` tokens that keep their number, the sample id, for the whole run."""

    text: tuple[str, ...] = ()
    """Files, folders (all files below) or glob patterns; absent, without `dataset`: Python's standard library."""
    dataset: str = ""
    """A folder that `datasets.save_to_disk` wrote, or a name on the Hugging Face hub."""
    dataset_config: str = ""
    """Configuration of the dataset."""
    dataset_split: str = "train"
    """Split of the dataset."""
    column: str = "text"
    """Column of the dataset that holds the text."""
    held_out: tuple[str, ...] = ()
    """Like `text`, for evaluation; absent: the last `held_out_share` of the tokens."""
    held_out_share: Annotated[float, Field(ge=0, le=0.9)] = 0.05
    """Share of the tokens that is held out for evaluation."""
    tokenizer: str = "bytes"
    """"bytes" (256 tokens, no files) or a local folder with a Hugging Face tokenizer."""
    sequence: Positive = 256
    """Tokens in a window."""
    batch: Positive = 8
    """Windows in a step, over all micro-batches."""
    max_bytes: Positive = 16_000_000
    """Most bytes of text to read."""

    def __post_init__(self) -> None:
        if self.text and self.dataset:
            raise ConfigError(
                f"data.text is {list(self.text)} and data.dataset is {self.dataset!r}; allowed: one of the two"
            )


@section("pipeline")
class PipelineConfig:
    """How the model is cut into stages, and the formats of what they exchange."""

    ranks: Positive = 2
    """Processes of each pipeline; under torchrun, its number of processes divided by `data_parallel` counts instead."""
    data_parallel: Positive = 1
    """Equal pipelines side by side, each with its own share of every batch."""
    stages_per_rank: Positive = 1
    """More than one for the interleaved schedules, two for the V-shaped ones."""
    schedule: Annotated[Schedule, BeforeValidator(_schedule)] = "1F1B"
    """A schedule of `torch.distributed.pipelining`."""
    microbatches: Positive = 4
    """Micro-batches of a step."""
    forward: tuple[str, ...] = ("subspace",)
    """Codecs of activations, by name ("subspace", "int4") or in full ("SubspaceQuant(bits=4)"): one for all boundaries,
    or a list with one for each."""
    backward: tuple[str, ...] = ()
    """Codecs of gradients, in the same notation. Absent: the default for each of `forward`
    (`lowbit.codecs.backward_codec`): itself for "fp32" and "bf16", "subspace-backward" for "subspace", else 6 bits."""
    warmup_steps: NonNegative | None = None
    """First steps at full precision. Absent: min(100, steps / 4) from scratch, 0 with `model.pretrained`. A codec with
    an open parameter, such as "SubspaceQuant(directions='auto')", chooses it in the last of them and needs one."""
    boundary: Boundary = "lowbit"
    """lowbit, or for comparison PyTorch's own stage, which sends float32 or bfloat16."""


@section("activations")
class ActivationsConfig:
    """Bits of saved activations (`lowbit.activations.compress_saved_`).

    Each of the first four is a number for all stages, or a list with one for each stage: late stages of a pipeline hold
    fewer micro-batches.
    """

    bits: tuple[int, ...] = (16,)
    """2 to 8, or 16 (uncompressed), for all layer types without bits of their own."""
    norm: tuple[int, ...] = ()
    """2 to 8, or 16, for norms; absent: as `bits`, at least 8."""
    mlp: tuple[int, ...] = ()
    """2 to 8, or 16, for gated activations; absent: as `bits`."""
    linear: tuple[int, ...] = ()
    """2 to 8, or 16, for the inputs of linear layers; absent: as `bits`."""
    group: int = 64
    """Elements for each scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How values between two levels are rounded."""
    plan: str = ""
    """File of `lowbit plan memory` with the bits of every stage, instead of all settings above but `rounding`."""


@section("gradients")
class GradientsConfig:
    """Formats of gradients until the optimizer's step, and between pipelines."""

    storage: str = FULL_PRECISION
    """"fp32" (PyTorch's `.grad`), or a codec such as "fp8", in which micro-batches are added up; the optimizer gets one
    parameter at a time in full precision (`lowbit.gradients.GradientStorage`)."""
    all_reduce: str = "fp8"
    """Codec in which gradients are averaged over `pipeline.data_parallel` pipelines."""


@section("optimizer")
class OptimizerConfig:
    """AdamW with a linear rise of the learning rate and a cosine fall."""

    lr: NonNegativeFloat = 1e-3
    """The highest learning rate."""
    lr_end: Share = 0.1
    """Learning rate of the last step, as a share of `lr`."""
    lr_warmup_steps: NonNegative = 20
    """Steps in which the learning rate rises."""
    beta1: Decay = 0.9
    """Decay of the moving average of gradients."""
    beta2: Decay = 0.95
    """Decay of the moving average of squared gradients."""
    eps: Share = 1e-8
    """Added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices; vectors (norms, biases) have none."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the gradients of all stages together; 0: no clipping."""


@section("run")
class RunConfig:
    """Where to train, for how long, and what to write."""

    output: str = "runs/train"
    """Folder for metrics, checkpoints and the trained model."""
    steps: Positive = 200
    """Optimizer steps."""
    seed: NonNegative = 0
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if each rank of a machine has a device of its own; cuda: its ranks take its devices in turn."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Between GPUs: gloo (slow networks), nccl (fast ones, one device a rank); auto: NCCL within a machine only."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of matrix products (weights stay in float32); auto: bf16 where the device computes in it."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """PyTorch's threads in each rank; 0: the machine's cores divided among its ranks."""
    timeout_seconds: Seconds = 120.0
    """Longest wait for a peer before it counts as gone."""
    supervise: bool = False
    """Restart the ranks from the newest checkpoint when a rank, a machine or a link fails; implies `resume`."""
    restarts: NonNegative = 5
    """Attempts in a row without a new checkpoint before a supervised run gives up."""
    rejoin_seconds: Seconds = 600.0
    """Longest wait of a supervised run for ranks to join, at the start and after a failure."""
    checksums: bool = True
    """8 bytes with each message; one that arrives damaged ends the run with an error that names the sender."""
    checkpoint_every: NonNegative = 100
    """Steps between checkpoints; 0: none."""
    keep: Annotated[int, Field(ge=2)] = 2
    """How many checkpoints stay."""
    resume: bool | Literal["auto"] = False
    """Resume from the newest intact checkpoint in `output`; auto: without one, begin at step 0."""
    allow_change: tuple[str, ...] = ()
    """Keys, such as "run.steps", that may differ from the run that is resumed."""
    overwrite: bool = False
    """Remove what earlier runs wrote into `output`."""
    eval_every: NonNegative = 0
    """Steps between evaluations; 0: at the end only."""
    eval_batches: NonNegative = 32
    """Most batches of held-out text in one evaluation."""
    tensorboard: bool = True
    """Write training curves."""
    progress: bool = True
    """Show progress."""
    save_model: bool = True
    """Save the model at the end."""

    def __post_init__(self) -> None:
        if self.allow_change and not self.resume:
            raise ConfigError(
                f"run.allow_change is {list(self.allow_change)} and run.resume is false; allowed: with run.resume only"
            )
        for key in ("resume", "supervise"):
            if getattr(self, key) and self.overwrite:
                raise ConfigError(f"run.{key} and run.overwrite are both true; allowed: one of the two")


@section()
class TrainConfig:
    """A whole training run.

    Raises:
        ConfigError: on construction, sections that contradict each other.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    pipeline: PipelineConfig = PipelineConfig()
    activations: ActivationsConfig = ActivationsConfig()
    gradients: GradientsConfig = GradientsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        replicas = self.pipeline.data_parallel
        if self.data.batch % (self.pipeline.microbatches * replicas):
            times = f" times data_parallel ({replicas})" if replicas > 1 else ""
            raise ConfigError(
                f"data.batch is {self.data.batch}; "
                f"allowed: a multiple of pipeline.microbatches ({self.pipeline.microbatches}){times}"
            )

    @property
    def ranks(self) -> int:
        """Processes of the whole run."""
        return self.pipeline.ranks * self.pipeline.data_parallel

    @property
    def rows(self) -> int:
        """Windows in a micro-batch."""
        return self.data.batch // (self.pipeline.microbatches * self.pipeline.data_parallel)

    @property
    def codec_warmup_steps(self) -> int:
        """`pipeline.warmup_steps`, or its default."""
        if self.pipeline.warmup_steps is not None:
            return self.pipeline.warmup_steps
        return 0 if self.model.pretrained else min(100, self.run.steps // 4)

    def to_json(self) -> str:
        """JSON; `from_mapping(json.loads(...))` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """A configuration from nested mappings, as TOML and JSON give them.

    Raises:
        ConfigError: an unknown section or key (the closest known one is named), a wrong type or value.
    """
    return build(TrainConfig, values)


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """A configuration from a TOML file (or the defaults) with overrides such as "pipeline.forward=int4".

    Raises:
        ConfigError: a file that is missing or no TOML, an override without "section.key=value", or what `from_mapping`
            refuses.
    """
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not (equals and "." in key):
            raise ConfigError(f"override is {text!r}; allowed: section.key=value")
        pairs.append((key.strip(), value.strip()))
    return resolve(TrainConfig, path, pairs)
