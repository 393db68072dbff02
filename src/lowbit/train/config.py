"""The whole of a training run as one frozen value, in seven sections.

Every value is checked when a section is made; what needs files or other sections is checked by
`lowbit.train.prepare`.
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

FAMILIES, BOUNDARIES = get_args(Family), get_args(Boundary)
SCHEDULES = {name.lower(): name for name in get_args(Schedule)}
FULL_PRECISION = "fp32"


def _schedule(name: Any) -> Any:
    """A schedule's name as PyTorch writes it, however it is capitalized."""
    return SCHEDULES.get(name.lower(), name) if isinstance(name, str) else name


@section("model")
class ModelConfig:
    """What is trained: a causal language model from a few numbers, or a local folder to start from."""

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
    """Embedding and output share their weights; absent: as the family does it."""
    dropout: Share = 0.0
    """Probability, everywhere the family has one."""

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
    """Files, folders (every file below) or glob patterns. Nothing here and no `dataset`: the sources of Python's own
    standard library, which every machine has."""
    dataset: str = ""
    """A folder that `datasets.save_to_disk` wrote, or a name on the Hugging Face hub."""
    dataset_config: str = ""
    """Which configuration of the dataset."""
    dataset_split: str = "train"
    """Which split of the dataset."""
    column: str = "text"
    """Which column of the dataset holds the text."""
    held_out: tuple[str, ...] = ()
    """Like `text`, for evaluation; absent: the last `held_out_share` of the tokens."""
    held_out_share: Annotated[float, Field(ge=0, le=0.9)] = 0.05
    """Share of the tokens that is kept for evaluation."""
    tokenizer: str = "bytes"
    """"bytes" (256 tokens, no files) or a local folder with a Hugging Face tokenizer."""
    sequence: Positive = 256
    """Tokens in a window."""
    batch: Positive = 8
    """Windows in a step, over all micro-batches."""
    max_bytes: Positive = 16_000_000
    """Read no more text than this."""

    def __post_init__(self) -> None:
        if self.text and self.dataset:
            raise ConfigError(
                f"data.text is {list(self.text)} and data.dataset is {self.dataset!r}; allowed: one of the two"
            )


@section("pipeline")
class PipelineConfig:
    """How the model is cut, and what travels between the stages."""

    ranks: Positive = 2
    """Processes of a pipeline; `lowbit train` starts `ranks` times `data_parallel`. Under torchrun its processes count,
    divided by `data_parallel`."""
    data_parallel: Positive = 1
    """Equal pipelines side by side, each with its own share of every batch."""
    stages_per_rank: Positive = 1
    """More than one for the interleaved schedules, two for the V-shaped ones."""
    schedule: Annotated[Schedule, BeforeValidator(_schedule)] = "1F1B"
    """A schedule of `torch.distributed.pipelining`."""
    microbatches: Positive = 4
    """Pieces of the batch."""
    forward: tuple[str, ...] = ("tah-quant",)
    """Codecs of activations, by name ("tah-quant", "int4") or in full ("GroupInt(bits=6, group=32)"): one for all
    boundaries, or a list with one for each."""
    backward: tuple[str, ...] = ()
    """Codecs of gradients, in the same notation. Absent: what fits each of `forward`
    (`lowbit.codecs.gradients_beside`): "fp32" and "bf16" travel alike both ways, "subspace" comes back as
    "subspace-backward", all else in 6 bits."""
    warmup_steps: NonNegative | None = None
    """Steps at full precision first. Absent: min(100, steps / 4) from scratch, where the early signal is small beside
    the noise of few bits; none when a `model.pretrained` is fine-tuned. A codec that leaves something to choose, such
    as "SubspaceQuant(rank='auto')", is settled in the last of them and needs one at least."""
    boundary: Boundary = "lowbit"
    """lowbit, or PyTorch's own stage, which sends float32 or bfloat16, to compare with."""


@section("activations")
class ActivationsConfig:
    """What activations are kept in between forward and backward (`lowbit.activations.compress_saved_`).

    Each of the first four is a number for all stages, or a list with one for each stage: late stages of a pipeline hold
    fewer micro-batches.
    """

    bits: tuple[int, ...] = (16,)
    """2 to 8 for all layer types that have none of their own; 16: nothing is compressed there."""
    norm: tuple[int, ...] = ()
    """2 to 8, or 16 (as they are), for norms; absent: as `bits`, at least 8."""
    mlp: tuple[int, ...] = ()
    """2 to 8, or 16 (as they are), for gated activations; absent: as `bits`."""
    linear: tuple[int, ...] = ()
    """2 to 8, or 16 (as they are), for the inputs of linear layers; absent: as `bits`."""
    group: int = 64
    """Elements for each scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How values between two levels are rounded."""
    plan: str = ""
    """File that `lowbit plan memory` wrote, with the bits of every stage; all settings above but `rounding` are then
    left at their defaults."""


@section("gradients")
class GradientsConfig:
    """What gradients are kept in until the optimizer's step, and what they travel in between pipelines."""

    storage: str = FULL_PRECISION
    """"fp32" (PyTorch's `.grad`), or a codec by name or in full, such as "fp8": each micro-batch is added to what is
    stored, and the optimizer sees full precision a parameter at a time (`lowbit.gradients.GradientStorage`)."""
    all_reduce: str = "fp8"
    """Codec, by name or in full, in which gradients are averaged over `pipeline.data_parallel` pipelines
    (`lowbit.collectives.all_reduce`)."""


@section("optimizer")
class OptimizerConfig:
    """AdamW with a linear rise of the learning rate and a cosine fall."""

    lr: NonNegativeFloat = 1e-3
    """The highest learning rate."""
    lr_end: Share = 0.1
    """Share of the learning rate that is left at the last step."""
    lr_warmup_steps: NonNegative = 20
    """Steps in which the learning rate rises."""
    beta1: Decay = 0.9
    """Decay of the moving average of gradients."""
    beta2: Decay = 0.95
    """Decay of the moving average of squared gradients."""
    eps: Share = 1e-8
    """Added to the root of that average before gradients are divided by it."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices; vectors (norms, biases) have none."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of all gradients together, over all stages; 0: no clipping."""


@section("run")
class RunConfig:
    """Where, how long, how exact, how often to write."""

    output: str = "runs/train"
    """Folder for metrics, checkpoints and the trained model."""
    steps: Positive = 200
    """Optimizer steps."""
    seed: NonNegative = 0
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What computes; auto: CUDA if each rank of a machine has a device to itself; cuda: the ranks of a machine take its
    devices in turn."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries messages between GPUs: gloo (for slow networks), nccl (for fast ones; a device for each rank), or
    auto: NCCL within a machine, Gloo between machines."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of matrix products (weights stay in float32); auto: bf16 where the device computes in it."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """PyTorch's threads in each rank; 0: the machine's cores divided among its ranks."""
    timeout_seconds: Seconds = 120.0
    """Longest wait for a peer before it counts as gone."""
    supervise: bool = False
    """Train in processes of their own, and start them again from the newest checkpoint when a rank, a machine or a
    link fails; implies `resume`."""
    restarts: NonNegative = 5
    """Attempts in a row without a new checkpoint before a supervised run gives up."""
    rejoin_seconds: Seconds = 600.0
    """Longest wait of a supervised run for ranks that have not come (back) yet."""
    checksums: bool = True
    """8 bytes behind each message tell if it arrived as it was sent; if not, the run ends with an error that names the
    sender."""
    checkpoint_every: NonNegative = 100
    """Steps between checkpoints; 0: none."""
    keep: Annotated[int, Field(ge=2)] = 2
    """How many checkpoints stay."""
    resume: bool | Literal["auto"] = False
    """Go on from the newest intact checkpoint in `output`; auto: where there is none, begin."""
    allow_change: tuple[str, ...] = ()
    """Keys, such as "run.steps", that may differ from the run that is resumed."""
    overwrite: bool = False
    """Throw away what lowbit has made in `output`."""
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
        pieces = self.pipeline.microbatches * self.pipeline.data_parallel
        if self.data.batch % pieces:
            several = self.pipeline.data_parallel > 1
            times = f" times data_parallel ({self.pipeline.data_parallel})" if several else ""
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
        """Steps at full precision, with the default worked out."""
        if self.pipeline.warmup_steps is not None:
            return self.pipeline.warmup_steps
        return 0 if self.model.pretrained else min(100, self.run.steps // 4)

    def to_json(self) -> str:
        """The configuration as text that `from_mapping(json.loads(...))` reads back."""
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
