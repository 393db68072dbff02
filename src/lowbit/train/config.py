"""The whole of a training run as one frozen value, in seven sections.

    [model]        what is trained: an architecture from a few numbers, or a local folder to start from
    [data]         text, tokenizer, windows and the held-out share
    [pipeline]     ranks, stages, schedule, and what the boundaries carry
    [activations]  what they are kept in between forward and backward
    [gradients]    what they are kept in between micro-batches
    [optimizer]    AdamW, learning rate and clipping
    [run]          where, how long, how exact, how often to write

Every value is checked when a section is made; what needs files or other sections is checked by `lowbit.train.check`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import ClassVar

from lowbit.train.section import ConfigError, Section

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
FULL_PRECISION = "fp32"
BOUNDARIES = ("lowbit", "stock-fp32", "stock-bf16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A causal language model.

    Args:
        family: architecture; not used with `pretrained`.
        pretrained: local folder in Hugging Face format to start from; the sizes below then come from it.
        dim, layers, heads: width, decoder layers, attention heads.
        kv_heads: key and value heads; 0: as many as `heads`. ffn: width of the feed-forward; 0: the family's usual.
        vocab: entries of the embedding; 0: as many as the tokenizer has.
        tied: embedding and output share their weights; absent: as the family does it.
        dropout: probability, everywhere the family has one.
    """

    name: ClassVar = "model"
    ranges: ClassVar = {
        "dim": (1, math.inf), "layers": (1, math.inf), "heads": (1, math.inf),
        "kv_heads": (0, math.inf), "ffn": (0, math.inf), "vocab": (0, math.inf), "dropout": (0, 1),
    }  # fmt: skip
    choices: ClassVar = {"family": FAMILIES}

    family: str = "llama"
    pretrained: str = ""
    dim: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    tied: bool | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads or (self.family != "gpt2" and self.dim // self.heads % 2):
            raise ConfigError(
                f"model.dim is {self.dim}; allowed: a multiple of model.heads ({self.heads}) "
                "with an even width for each head"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads is {self.kv_heads}; allowed: a divisor of model.heads ({self.heads})")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Text, cut into windows of `sequence` tokens that keep their number, the sample id, for the whole run.

    Args:
        text: files, folders (every file below) or glob patterns. Nothing here and no `dataset`: the sources of Python's
            own standard library, which every machine has.
        dataset: a folder that `datasets.save_to_disk` wrote, or a name on the Hugging Face hub;
            dataset_config, dataset_split, column: which part of it.
        held_out: like `text`, for evaluation; absent: the last `held_out_share` of the tokens.
        tokenizer: "bytes" (256 tokens, no files) or a local folder with a Hugging Face tokenizer.
        sequence: tokens in a window; batch: windows in a step, over all micro-batches.
        max_bytes: read no more text than this.
    """

    name: ClassVar = "data"
    ranges: ClassVar = {
        "sequence": (1, math.inf), "batch": (1, math.inf), "max_bytes": (1, math.inf),
        "held_out_share": (0, 0.9),
    }  # fmt: skip

    text: tuple[str, ...] = ()
    dataset: str = ""
    dataset_config: str = ""
    dataset_split: str = "train"
    column: str = "text"
    held_out: tuple[str, ...] = ()
    held_out_share: float = 0.05
    tokenizer: str = "bytes"
    sequence: int = 256
    batch: int = 8
    max_bytes: int = 16_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text and self.dataset:
            raise ConfigError(
                f"data.text is {list(self.text)} and data.dataset is {self.dataset!r}; allowed: one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """How the model is cut, and what travels between the cuts.

    Args:
        ranks: processes of a pipeline; `lowbit train` starts so many times `data_parallel`. Under torchrun its number
            counts, divided by `data_parallel`.
        data_parallel: equal pipelines side by side, each on its own share of every batch.
        stages_per_rank: more than one for the interleaved schedules, two for the V-shaped ones.
        schedule: a schedule of `torch.distributed.pipelining`; microbatches: pieces of the batch.
        forward, backward: codecs of activations and gradients, by name ("tah-quant", "int4") or in full
            ("GroupInt(bits=6, group=32)"): one for all boundaries, or a list with one for each. Absent, `backward` is
            what belongs to each of `forward` (`lowbit.codecs.backward_codec`): "fp32" and "bf16" travel alike both
            ways, "subspace" comes back as "subspace-backward", all else in 6 bits.
        warmup_steps: steps at full precision first. Absent: min(100, steps / 4) from scratch, where the early signal is
            small beside the noise of few bits; none when a `model.pretrained` is fine-tuned. A codec that leaves
            something to choose, such as "SubspaceQuant(directions='auto')", is settled in the last and needs one at
            least.
        boundary: "lowbit", or PyTorch's own stage with float32 or bfloat16 on the wire to compare with.
    """

    name: ClassVar = "pipeline"
    ranges: ClassVar = {
        "ranks": (1, math.inf), "data_parallel": (1, math.inf), "stages_per_rank": (1, math.inf),
        "microbatches": (1, math.inf), "warmup_steps": (0, math.inf),
    }  # fmt: skip
    choices: ClassVar = {"boundary": BOUNDARIES}

    ranks: int = 2
    data_parallel: int = 1
    stages_per_rank: int = 1
    schedule: str = "1F1B"
    microbatches: int = 4
    forward: tuple[str, ...] = ("tah-quant",)
    backward: tuple[str, ...] = ()
    warmup_steps: int | None = None
    boundary: str = "lowbit"

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = SCHEDULES.get(self.schedule.lower())
        if schedule is None:
            raise ConfigError(f"pipeline.schedule is {self.schedule!r}; allowed: {', '.join(SCHEDULES.values())}")
        object.__setattr__(self, "schedule", schedule)
        if self.backward == ("",):
            object.__setattr__(self, "backward", ())


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig(Section):
    """What activations are kept in between forward and backward (`lowbit.activations.compress_saved_`).

    Each of the first four is a number for all stages, or a list with one for each stage: late stages of a pipeline hold
    fewer micro-batches.

    Args:
        bits: 2 to 8 for all layer types that have none of their own; 16: nothing is compressed there.
        norm, mlp, linear: 2 to 8, or 16 (as they are), of these layer types; absent: as `bits`, norms at least 8.
        group: elements for each scale; rounding: "nearest" or "stochastic".
    """

    name: ClassVar = "activations"
    choices: ClassVar = {"rounding": ("nearest", "stochastic")}

    bits: tuple[int, ...] = (16,)
    norm: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    linear: tuple[int, ...] = ()
    group: int = 64
    rounding: str = "nearest"


@dataclass(frozen=True, kw_only=True)
class GradientsConfig(Section):
    """What gradients are kept in until the optimizer's step, and what they travel in between pipelines.

    Args:
        storage: "fp32" (PyTorch's `.grad`), or a codec by name or in full, such as "fp8": each micro-batch is added to
            what is stored, and the optimizer sees full precision a parameter at a time
            (`lowbit.gradients.GradientStorage`).
        all_reduce: codec, by name or in full, in which gradients are averaged over `pipeline.data_parallel` pipelines
            (`lowbit.collectives.all_reduce`).
    """

    name: ClassVar = "gradients"

    storage: str = FULL_PRECISION
    all_reduce: str = "fp8"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW with a linear rise of the learning rate and a cosine fall.

    Args:
        lr: the highest learning rate; lr_end: share of it that is left at the last step.
        lr_warmup_steps: steps of the rise.
        weight_decay: of matrices; vectors (norms, biases) are not decayed.
        clip: largest norm of all gradients together, over all stages; 0: no clipping.
    """

    name: ClassVar = "optimizer"
    ranges: ClassVar = {
        "lr": (0, math.inf), "lr_end": (0, 1), "lr_warmup_steps": (0, math.inf), "beta1": (0, 0.9999999),
        "beta2": (0, 0.9999999), "eps": (0, 1), "weight_decay": (0, math.inf), "clip": (0, math.inf),
    }  # fmt: skip

    lr: float = 1e-3
    lr_end: float = 0.1
    lr_warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Where, how long, how exact, how often to write.

    Args:
        output: folder for metrics, checkpoints and the trained model.
        steps: optimizer steps; seed: of weights, data order and dropout.
        device: "auto" (CUDA if each rank of a machine has a device to itself), "cpu", or "cuda" (the ranks of a machine
            take its devices in turn).
        backend: what carries messages between GPUs: "gloo" (for slow networks), "nccl" (for fast ones; a device for
            each rank), or "auto": NCCL within a machine, Gloo between machines.
        precision: "fp32", "bf16" (autocast), or "auto": bf16 where the device computes in it.
        threads: of PyTorch, for each rank; 0: the machine's cores divided among its ranks.
        timeout_seconds: longest wait for a peer before it counts as gone.
        supervise: train in processes of their own, and start them again from the newest checkpoint when they fail;
            implies `resume`. restarts: attempts in a row without a new checkpoint before it gives up.
        rejoin_seconds: longest wait of a supervised run for ranks that have not come (back) yet.
        checksums: 8 bytes behind each message tell if it arrived as it was sent; if not, the run ends with an error
            that names the sender.
        checkpoint_every: steps; 0: none. keep: how many checkpoints stay.
        resume: go on from the newest intact checkpoint in `output`; "auto": where there is none, begin.
        allow_change: keys, such as "run.steps", that may differ from the run that is resumed.
        overwrite: throw away what lowbit has made in `output`.
        eval_every: steps; 0: at the end only. eval_batches: most batches of held-out text in one evaluation.
        tensorboard, progress, save_model: write curves, show progress, save the model at the end.
    """

    name: ClassVar = "run"
    ranges: ClassVar = {
        "steps": (1, math.inf), "threads": (0, 4096), "timeout_seconds": (1, 1e6),
        "restarts": (0, math.inf), "rejoin_seconds": (1, 1e6), "keep": (2, math.inf),
        "checkpoint_every": (0, math.inf), "eval_every": (0, math.inf), "eval_batches": (0, math.inf),
        "seed": (0, 2**63 - 1),
    }  # fmt: skip
    choices: ClassVar = {
        "device": ("auto", "cpu", "cuda"), "backend": ("auto", "gloo", "nccl"), "precision": ("auto", "fp32", "bf16"),
    }  # fmt: skip

    output: str = "runs/train"
    steps: int = 200
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    precision: str = "auto"
    threads: int = 0
    timeout_seconds: float = 120.0
    supervise: bool = False
    restarts: int = 5
    rejoin_seconds: float = 600.0
    checksums: bool = True
    checkpoint_every: int = 100
    keep: int = 2
    resume: bool | str = False
    allow_change: tuple[str, ...] = ()
    overwrite: bool = False
    eval_every: int = 0
    eval_batches: int = 32
    tensorboard: bool = True
    progress: bool = True
    save_model: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume not in (True, False, "auto"):
            raise ConfigError(f"run.resume is {self.resume!r}; allowed: true, false or auto")
        if self.allow_change and not self.resume:
            raise ConfigError(
                f"run.allow_change is {list(self.allow_change)} and run.resume is false; allowed: with run.resume only"
            )
        if self.resume and self.overwrite:
            raise ConfigError("run.resume and run.overwrite are both true; allowed: one of the two")
        if self.supervise and self.overwrite:
            raise ConfigError("run.supervise and run.overwrite are both true; allowed: one of the two")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run.

    Raises:
        ConfigError: on construction, sections that contradict each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

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
