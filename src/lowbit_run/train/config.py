"""The configuration of a training run: one frozen value in nine sections.

A section checks its values on construction; `lowbit_run.train.prepare` checks them against files, ranks and the model.
"""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from lowbit_run.config import ConfigError, NonNegative, Positive, build, resolve, section
from lowbit_run.train.effects import check_effects
from lowbit_run.train.schedules import Schedule, schedule_named

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"]
Weights = Literal["fp32", "bf16", "int8", "nf4"]
Share = Annotated[float, Field(ge=0, le=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(ge=1, le=1_000_000)]

FAMILIES = get_args(Family)
FULL_PRECISION, AUTO = "fp32", "auto"
Method = Literal["none", "agoq"]
ANCHOR_TOKENS = 32_768
"""Tokens of a warm-up to which token anchors are fitted: after 31,000 they help (docs/results/convergence.md)."""
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "agoq": {
        "activations": {"bits": (4,), "norm": (4,), "mlp": (), "linear": (), "attention": (16,)},
        "gradients": {"storage": "fp8", "all_reduce": "fp8"},
        "optimizer": {"states": "8bit"},
    },
}
"""Settings of published methods, by section. AGoQ's activations use `LayerAware.published()`."""


def is_day(text: Any) -> bool:
    """Whether this is a date as ISO 8601 writes it, with hyphens."""
    with contextlib.suppress(TypeError, ValueError):
        return datetime.date.fromisoformat(text).isoformat() == text
    return False


@section("model")
class ModelConfig:
    """The model: trained from scratch, or pretrained."""

    family: Family = "llama"
    """Architecture. Not used with `pretrained`."""
    pretrained: str = ""
    """Folder of a Hugging Face model to start from, which sets all sizes; `lowbit train` also takes a name on the Hub,
    such as "Qwen/Qwen3-8B"."""
    weights: Weights | None = None
    """Format of the weights in memory. int8 and nf4 (4 bits, bitsandbytes) are for the linear layers of a pretrained
    model with adapters, whose other weights are then bf16. If omitted: bf16 for weights that do not change, where
    products are computed in bf16; otherwise fp32. If bf16 weights are trained, each step is computed in float32 and
    rounded at random, so that small steps count. A folder with weights in 4 or 8 bits stays as it is."""
    double_quantization: bool = False
    """Quantize the scales of nf4 as well: 4.13 bits a weight in place of 4.5."""
    dim: Positive = 256
    """Width of the model."""
    layers: Positive = 8
    """Number of decoder layers."""
    heads: Positive = 4
    """Attention heads of a layer."""
    kv_heads: NonNegative = 0
    """Key-value heads of a layer. 0: the number of `heads`."""
    ffn: NonNegative = 0
    """Width of the feed-forward layers. 0: the usual width of the family."""
    vocab: NonNegative = 0
    """Size of the vocabulary. 0: the size of the tokenizer's."""
    tied: bool | None = None
    """Share weights between embedding and output. If omitted, the family's usual choice."""
    dropout: Share = 0.0
    """Dropout probability at all places where the family uses dropout."""

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.family != "gpt2" and self.dim // self.heads % 2):
            raise ConfigError(
                f"model.dim is {self.dim}; allowed: a multiple of model.heads ({self.heads}) "
                "with an even width for each head"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads is {self.kv_heads}; allowed: a divisor of model.heads ({self.heads})")
        if self.double_quantization and self.weights != "nf4":
            raise ConfigError(
                f"model.double_quantization is true and model.weights is {self.weights}; allowed: with nf4 only"
            )


@section("lora")
class LoraConfig:
    """Low-rank adapters (PEFT) on a pretrained model, whose own weights do not change."""

    rank: NonNegative = 0
    """Rank of the adapters. Only they are trained, averaged between pipelines and saved. 0: no adapters; all weights
    are trained."""
    alpha: NonNegativeFloat = 16.0
    """The adapters' output is multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout probability of the adapters' input."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers of a decoder layer that get an adapter, such as "q_proj" and "v_proj"; "all-linear" is all."""

    def __post_init__(self) -> None:
        others = {"alpha": 16.0, "dropout": 0.0, "targets": ("all-linear",)}
        changed = [name for name, default in others.items() if getattr(self, name) != default]
        if changed and not self.rank:
            raise ConfigError(
                f"lora.{changed[0]} is {getattr(self, changed[0])} and lora.rank is 0; "
                "allowed: with lora.rank of at least 1"
            )
        if not self.targets:
            raise ConfigError("lora.targets is empty; allowed: names of linear layers, or all-linear")


@section("data")
class DataConfig:
    """The text to train on, cut into windows of `sequence` tokens."""

    format: Literal["text", "jsonl"] = "text"
    """Content of the files. jsonl: one sample per line, {"prompt": ..., "completion": ...} (or "answer") or
    {"messages": [{"role": ..., "content": ...}, ...]}, where the model learns the answers only."""
    packing: bool = True
    """Put several samples into a window if `format` is jsonl, without attention between them. false: one in each."""
    text: tuple[str, ...] = ()
    """Files, folders or glob patterns to train on. Hidden files and folders in a folder are left out. If omitted
    without `dataset`, Python's standard library."""
    dataset: str = ""
    """Instead of `text`: a folder written by `datasets.save_to_disk`, or a name on the Hugging Face Hub."""
    dataset_config: str = ""
    """Configuration of the dataset."""
    dataset_split: str = "train"
    """Split of the dataset."""
    column: str = "text"
    """Column of the dataset that holds the text."""
    held_out: tuple[str, ...] = ()
    """Files, folders or glob patterns to evaluate on. If omitted, the last `held_out_share`."""
    held_out_share: Annotated[float, Field(ge=0, le=0.9)] = 0.05
    """Share of the tokens or samples that is held out for evaluation."""
    tokenizer: str = ""
    """Local folder with a Hugging Face tokenizer, or "bytes" for one token per byte. If omitted, that of
    `model.pretrained`, or bytes for a model from scratch."""
    sequence: Positive = 256
    """Tokens of a window."""
    batch: Positive = 8
    """Windows of an optimizer step, over all micro-batches and pipelines."""
    max_bytes: Positive = 16_000_000
    """Read at most this many bytes of text."""
    date: "Annotated[str, BeforeValidator(str)]" = ""
    """Day, such as "2026-07-24", that the chat template takes for today, if it writes the date. If omitted, the day on
    which the run starts; a resume keeps it."""

    def __post_init__(self) -> None:
        if self.date and not is_day(self.date):
            raise ConfigError(f"data.date is {self.date!r}; allowed: a day such as 2026-07-24, or nothing")
        if self.date and self.format != "jsonl":
            raise ConfigError(
                f"data.date is {self.date!r} and data.format is {self.format}; allowed: with data.format jsonl only"
            )
        if self.text and self.dataset:
            raise ConfigError(
                f"data.text is {list(self.text)} and data.dataset is {self.dataset!r}; allowed: one of the two"
            )
        if self.format == "jsonl" and not self.text:
            raise ConfigError("data.format is jsonl and data.text is empty; allowed: files in data.text")


@section("pipeline")
class PipelineConfig:
    """Split of the model into stages, and the formats of the messages between them."""

    ranks: Positive = 2
    """Processes of one pipeline. Under torchrun, its number of processes divided by `data_parallel` is used instead."""
    data_parallel: Positive = 1
    """Number of equal pipelines. Each trains on its own share of every batch."""
    stages_per_rank: Positive = 1
    """Stages on each rank: more than 1 for interleaved schedules, 2 for V-shaped ones."""
    layers: tuple[Positive, ...] = ()
    """Decoder layers of each stage, such as [5, 3], for machines of unequal speed or memory. If omitted, as equal as
    possible."""
    schedule: "Annotated[Schedule, BeforeValidator(schedule_named)]" = "1F1B"
    """Schedule of `torch.distributed.pipelining`."""
    microbatches: Positive = 4
    """Micro-batches of a step in each pipeline."""
    forward: tuple[str, ...] = (AUTO,)
    """Formats of activations, by name ("transform", "int4") or in full ("GroupInt(bits=6, group=32)"): one for all
    boundaries between stages, or one for each. "auto": the most exact that the links can carry."""
    backward: tuple[str, ...] = ()
    """Formats of the gradients of activations, written like `forward`. If omitted, each forward format's default:
    itself for "fp32" and "bf16", "transform-backward" for "transform", 6 bits for others."""
    warmup_steps: NonNegative | None = None
    """Number of first steps at full precision. If omitted, a quarter of the run, but at most 100; 0 with
    `model.pretrained`, and with `anchor` as many as have 32,768 tokens, but at most a quarter of the run. A goal, such
    as "TransformQuant(bits='auto')", needs 1 or more."""
    anchor: bool = False
    """Use token anchors: in the warm-up, both ends of a boundary learn to predict activations of a pretrained model
    from the token ids, which both know; after it, only the rest crosses in the `forward` format."""
    tied_rows: str = "bf16"
    """Format of a tied embedding's rows: weights one way, gradients back. "fp32" is exact, like the warm-up."""

    def __post_init__(self) -> None:
        alone = self.forward == (AUTO,) and self.backward in ((), (AUTO,))
        if AUTO in (*self.forward, *self.backward) and not alone:
            raise ConfigError(
                f"pipeline.forward is {list(self.forward)}, backward {list(self.backward)}; allowed with auto: auto "
                "alone in forward, auto or nothing in backward"
            )

    @property
    def is_auto(self) -> bool:
        """Whether the run chooses the formats."""
        return self.forward == (AUTO,)


@section("activations")
class ActivationsConfig:
    """What is kept for the backward pass. Settings of bits take one number, or a list with one for each stage."""

    checkpoint: bool | None = None
    """Keep only the input of each decoder layer, and compute the layer again in the backward pass, with the same
    gradients. If omitted: on with `lora.rank`, unless bits or a plan are given; otherwise off. Backward passes are then
    not split in two, whatever the schedule."""
    bits: tuple[int, ...] = (16,)
    """Bits of saved activations: 2 to 8, or 16 to leave them as they are."""
    norm: tuple[int, ...] = ()
    """Bits for norms. If omitted, `bits`, but at least 8."""
    mlp: tuple[int, ...] = ()
    """Bits for gated activations. If omitted, `bits`."""
    linear: tuple[int, ...] = ()
    """Bits for the inputs of linear layers. If omitted, `bits`."""
    attention: tuple[int, ...] = ()
    """Bits for queries, keys, values and the output of attention. If omitted, `bits`, but at least 8."""
    group: int = 64
    """Elements that share a scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of a value between two levels."""
    plan: str = ""
    """File written by `lowbit plan memory`, with the bits of every stage or layer. It replaces all settings above
    except `rounding`."""

    @property
    def coded(self) -> bool:
        """Whether a plan or bits below 16 say what is kept."""
        return bool(self.plan) or min(*self.bits, *self.norm, *self.mlp, *self.linear, *self.attention, 16) < 16


@section("gradients")
class GradientsConfig:
    """Formats of parameter gradients, in memory and between pipelines."""

    storage: str = FULL_PRECISION
    """Format in which gradients are summed over micro-batches: "fp32" (PyTorch's `.grad`), or a codec such as "fp8",
    which takes less memory."""
    all_reduce: str = "fp8"
    """Format in which gradients are averaged over `pipeline.data_parallel` pipelines, or replicas that come and go.
    If `storage` is fp8 as well, pipelines send gradients as they are stored."""


@section("elastic")
class ElasticConfig:
    """Replicas that come and go: each is a run of its own with this section, joined to the others by torchft."""

    lighthouse: str = ""
    """Address of torchft's lighthouse, such as "http://host:29510", which every replica must reach. Empty: no replicas.
    Gradients are averaged in the format `gradients.all_reduce`; `pipeline.forward` must name formats."""
    name: str = ""
    """Unique name of this replica. It also determines the replica's order of the data."""
    at_least: Positive = 1
    """Number of replicas below which all wait for others, for up to `run.rejoin_seconds`."""
    error_feedback: bool = False
    """Add the coding error of a step's gradients to those of the next. Worth its 8 bytes for each parameter with
    formats of 4 bits and less."""


@section("optimizer")
class OptimizerConfig:
    """AdamW. The learning rate rises linearly and falls along a cosine."""

    states: Literal["fp32", "8bit"] = "fp32"
    """Format of the two moments. 8bit: torchao's AdamW, which keeps them in float32 for parameters with fewer than 4096
    elements, or with a number of elements that its blocks do not divide."""
    lr: NonNegativeFloat = 1e-3
    """Highest learning rate."""
    lr_end: Share = 0.1
    """Learning rate of the last step, as a share of `lr`."""
    lr_warmup_steps: NonNegative = 20
    """Number of steps over which the learning rate rises."""
    beta1: Decay = 0.9
    """Decay of the moving average of gradients."""
    beta2: Decay = 0.95
    """Decay of the moving average of squared gradients."""
    eps: Share = 1e-8
    """Small number added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices. Vectors (norms, biases) have none."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of all stages' gradients together. 0: no clipping."""


@section("run")
class RunConfig:
    """Devices, duration and outputs of a run."""

    output: str = "runs/train"
    """Folder for metrics, checkpoints and the trained model."""
    method: Method = "none"
    """A published method as a whole. agoq: AGoQ (arXiv 2605.00539). It sets `activations` to 4 bits for everything
    except attention, which is not coded, and up to 8 on ranks that hold fewer micro-batches than others (or to the bits
    by stage of `activations.plan`), `gradients.storage` and `gradients.all_reduce` to fp8, and `optimizer.states` to
    8bit. Do not set these as well."""
    steps: Positive = 200
    """Optimizer steps."""
    seed: NonNegative = 0
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if every local rank has a GPU of its own, otherwise the CPU. cuda: local ranks share the GPUs."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the sums over `pipeline.data_parallel` pipelines between GPUs: gloo for slow networks, nccl for fast
    ones. auto: NCCL within a machine, otherwise Gloo. Everything else goes over Gloo."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of matrix products; weights keep theirs. auto: bf16 where the device supports it."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """PyTorch threads of each rank. 0: the cores that a process may use, divided by the machine's ranks."""
    connections: Annotated[int, Field(ge=1, le=32)] | Literal["auto"] = "auto"
    """TCP connections for each pair of ranks over Gloo, 1 to 32. auto: one; if a link between machines loses packets,
    BBR as its congestion control where all machines permit it, otherwise as many connections as make it faster.
    Replicas that come and go keep one between them."""
    timeout_seconds: Seconds = 120.0
    """Longest wait for another rank before it counts as failed."""
    supervise: bool = False
    """Restart the ranks from the newest checkpoint when a rank, a machine or a link fails. Implies `resume`."""
    restarts: NonNegative = 5
    """Consecutive restarts without a new checkpoint before a supervised run gives up."""
    rejoin_seconds: Seconds = 600.0
    """Longest wait of a supervised run for all ranks to join, at the start and after a failure."""
    grace_seconds: Seconds = 120.0
    """Longest time from SIGTERM or Ctrl-C to the end: all ranks finish the step, save a checkpoint, and end with exit
    code 143 or 130. A second signal ends them at once."""
    checksums: bool = True
    """Add 8 bytes to each message, to detect damage. A damaged message ends the run with an error that names its
    sender."""
    checkpoint_every: NonNegative = 100
    """Steps between checkpoints. 0: no checkpoints."""
    checkpoint_minutes: NonNegativeFloat = 10.0
    """Most minutes between checkpoints, by rank 0's clock: one is also saved after the step in which they are over. 0:
    after steps of `checkpoint_every` only."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Number of checkpoints to keep."""
    resume: bool | Literal["auto"] = False
    """Resume from the newest intact checkpoint in `output`. auto: start from scratch if there is none."""
    allow_change: tuple[str, ...] = ()
    """Settings, such as "run.steps", that may differ from those of the resumed run."""
    overwrite: bool = False
    """Remove the files that earlier runs wrote into `output`."""
    eval_every: NonNegative = 0
    """Steps between evaluations on held-out text. 0: evaluate at the end only."""
    eval_batches: NonNegative = 32
    """Largest number of batches of an evaluation. 0: all held-out text."""
    prompt: str = AUTO
    """Text after which the model writes a few words before the first step and after the last, as it is, without a chat
    template. auto: the beginning of a held-out text or sample. Empty: no words."""
    tensorboard: bool = True
    """Write TensorBoard curves."""
    trackers: tuple[Literal["wandb", "trackio"], ...] = ()
    """Other places for the same curves, by Accelerate's trackers: W&B, trackio. Their packages must be installed where
    rank 0 runs, and their own variables (WANDB_API_KEY, WANDB_MODE, TRACKIO_DIR) apply. The project is "lowbit", and
    the run has its folder's name; one that resumes begins another there."""
    progress: bool = True
    """Show progress on every machine: loss, speed, share of time spent waiting for messages, traffic and the share of
    the link that it takes, bits per element forward/backward, and time left."""
    report: bool = True
    """Write `report.html`: curves, speed, traffic, memory, settings and machines."""
    trace: bool = False
    """Record when each rank computes, codes, sends and waits, for the report."""
    trace_steps: Annotated[int, Field(ge=1, le=100)] = 5
    """Number of steps that `trace` records, after the warm-up."""
    save_model: bool = True
    """Save the trained model at the end."""
    save_merged: bool = False
    """Also save, as `merged`, the whole model with the adapters merged into the weights of `model.pretrained`. Rank 0
    reads these from its own folder, layer by layer: nothing is sent."""
    save_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Data type of the saved weights. If omitted, that of the files of `model.pretrained` (bf16 if those are in 4 or 8
    bits), or fp32. Adapters alone are always saved in fp32."""

    def __post_init__(self) -> None:
        if self.allow_change and not (self.resume or self.supervise):
            raise ConfigError(
                f"run.allow_change is {list(self.allow_change)}; allowed: with run.resume or run.supervise only"
            )
        if self.supervise and self.overwrite:
            raise ConfigError(
                f"run.supervise and run.overwrite are both true; allowed: run.supervise alone, which continues what is "
                f"in run.output; to begin anew, name another one, or remove {self.output!r} first"
            )
        if self.resume and self.overwrite:
            raise ConfigError("run.resume and run.overwrite are both true; allowed: one of the two")


@section()
class TrainConfig:
    """The configuration of a training run.

    Raises:
        ConfigError: on construction, sections that contradict each other.
    """

    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    pipeline: PipelineConfig = PipelineConfig()
    activations: ActivationsConfig = ActivationsConfig()
    gradients: GradientsConfig = GradientsConfig()
    elastic: ElasticConfig = ElasticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        for name, values in METHODS[self.run.method].items():
            if name != "activations" or not self.activations.plan:
                object.__setattr__(self, name, self._with(name, values))
        replicas, kept = self.pipeline.data_parallel, self.activations
        if kept.checkpoint and kept.coded:
            cause = f"plan is {kept.plan!r}" if kept.plan else "bits, or those of a kind, are below 16"
            raise ConfigError(
                f"activations.checkpoint is true and activations.{cause}; allowed: one of the two, or a plan of "
                "`lowbit plan memory --by layer`, which has checkpoints"
            )
        if self.lora.rank and not self.model.pretrained:
            raise ConfigError(
                f"lora.rank is {self.lora.rank} and model.pretrained is empty; allowed: with model.pretrained only"
            )
        if self.run.save_merged and not (self.lora.rank and self.run.save_model):
            raise ConfigError(
                f"run.save_merged is true, lora.rank is {self.lora.rank} and run.save_model is {self.run.save_model}; "
                "allowed: with adapters that are saved"
            )
        if self.pipeline.anchor and not self.model.pretrained:
            raise ConfigError(
                "pipeline.anchor is true and model.pretrained is empty; allowed: with model.pretrained only, whose "
                "embedding predicts activations"
            )
        if self.model.weights in ("int8", "nf4") and not self.lora.rank:
            raise ConfigError(
                f"model.weights is {self.model.weights} and lora.rank is 0; allowed: with lora.rank of at least 1, "
                "since weights in few bits cannot be trained themselves"
            )
        if self.data.batch % (self.pipeline.microbatches * replicas):
            times = f" times data_parallel ({replicas})" if replicas > 1 else ""
            raise ConfigError(
                f"data.batch is {self.data.batch}; "
                f"allowed: a multiple of pipeline.microbatches ({self.pipeline.microbatches}){times}"
            )

    def _with(self, name: str, values: Mapping[str, Any]) -> Any:
        section = getattr(self, name)
        for key, value in values.items():
            if (stated := getattr(section, key)) not in (value, getattr(type(section)(), key)):
                raise ConfigError(
                    f"{name}.{key} is {stated!r} and run.method is {self.run.method!r}, which sets it to {value!r}; "
                    "allowed: one of the two"
                )
        return dataclasses.replace(section, **values)

    @property
    def ranks(self) -> int:
        """Processes of the whole run."""
        return self.pipeline.ranks * self.pipeline.data_parallel

    @property
    def rows(self) -> int:
        """Windows in a micro-batch."""
        return self.data.batch // (self.pipeline.microbatches * self.pipeline.data_parallel)

    @property
    def checkpoints(self) -> bool:
        """Whether decoder layers run again in the backward pass: `activations.checkpoint`, or its default."""
        if self.activations.checkpoint is not None:
            return self.activations.checkpoint
        return bool(self.lora.rank) and not self.activations.coded

    @property
    def tokenizer(self) -> str:
        """`data.tokenizer`, or its default."""
        return self.data.tokenizer or self.model.pretrained or "bytes"

    @property
    def codec_warmup_steps(self) -> int:
        """`pipeline.warmup_steps`, or its default."""
        if self.pipeline.warmup_steps is not None:
            return self.pipeline.warmup_steps
        most = self.anchor_steps if self.pipeline.anchor else 0 if self.model.pretrained else 100
        return min(most, self.run.steps // 4)

    @property
    def step_tokens(self) -> int:
        """Tokens of all pipelines in a step."""
        return self.data.batch * self.data.sequence

    @property
    def warmup_tokens(self) -> int:
        """Tokens of each pipeline in the warm-up."""
        steps = min(self.codec_warmup_steps, self.run.steps)
        return steps * self.step_tokens // self.pipeline.data_parallel

    @property
    def anchor_steps(self) -> int:
        """Steps whose tokens suffice to fit token anchors; the same for any number of pipelines, which may change."""
        return -(-ANCHOR_TOKENS // self.step_tokens)

    def check_given(self, typed: Iterable[str]) -> None:
        """Check that options have an effect, those of the command line also if they equal the default."""
        for key in ("data.text", "data.held_out"):
            if isinstance(typed, Mapping) and typed.get(key) == "":  # such as a shell variable that is not set
                raise ConfigError(f"{key} is empty; allowed: one or more files, or no such option")
        check_effects(self, typed)

    def to_json(self) -> str:
        """Return JSON that `from_mapping(json.loads(...))` reads back."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """Build a configuration from nested mappings, as TOML and JSON give them.

    Raises:
        ConfigError: an unknown section or key (the closest known one is named), a wrong type or value.
    """
    return build(TrainConfig, values)


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a configuration from a TOML file (or the defaults), with overrides such as "pipeline.forward=int4".

    Raises:
        ConfigError: a missing or invalid TOML file, an override without "section.key=value", or an error of
            `from_mapping`.
    """
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not (equals and "." in key):
            raise ConfigError(f"override is {text!r}; allowed: section.key=value")
        pairs.append((key.strip(), value.strip()))
    return resolve(TrainConfig, path, pairs)
