"""Settings of `lowbit calibrate` and `lowbit evaluate`. No import of PyTorch here: the command line uses it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lowbit_run.config import ConfigError, NonNegative, Positive, section

FORMATS = ("bf16", "int4", "feature-int4")
BASELINE = "bf16"
"""The format that others are compared with."""
LOW_BIT = "feature-int4"
STATIC = f"{LOW_BIT}-static"
"""The published format, without a gain for each token."""

FILE_TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "piqa", "winogrande")
"""Tasks whose questions can be read from a local file."""


def default_calibration(model: str, ranks: int) -> Path:
    """Return the default path of a calibration: next to the model's weights."""
    return Path(model) / f"calibration-tp{ranks}.safetensors"


@section()
class InferenceConfig:
    """Settings common to calibration and evaluation: a model, a text, and how to compute."""

    model: str
    """Local folder with a Hugging Face model: a causal language model, or an encoder (BERT, RoBERTa, ...)."""
    text: tuple[str, ...] = ()
    """Files, folders or glob patterns. If omitted, Python's standard library: the last 5 % for evaluation, the rest for
    calibration."""
    length: Annotated[int, Field(ge=2)] = 512
    """Tokens of a sequence."""
    tokenizer: str = ""
    """Local folder with a Hugging Face tokenizer, or "bytes". If omitted, the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the computation. auto: bfloat16 where the device supports it, otherwise float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. auto: CUDA if every local rank has a GPU of its own, otherwise the CPU."""
    threads: NonNegative = 0
    """PyTorch threads. 0: PyTorch's default. With equal numbers, real and emulated ranks give identical results."""
    seed: int = 0
    """Seed of the random choice of calibration sequences."""
    max_bytes: Positive = 16_000_000
    """Read at most this many bytes of text."""


@section()
class CalibrationConfig(InferenceConfig):
    """Settings of a calibration."""

    ranks: Positive = 2
    """Tensor-parallel ranks to calibrate for. Under torchrun, its number of processes is used instead."""
    sequences: Positive = 256
    """Number of sequences to draw from the text."""
    output: str = ""
    """File to write. If omitted, calibration-tp<ranks>.safetensors in the model's folder."""
    features: str = ""
    """Features that are sent in bfloat16: "E/64" (that share of the E features of each layer, those with the largest
    ranges), or a number for each layer. If omitted, E/64, or with --continue as before."""
    gain: Literal["token", "static"] | None = None
    """token: each token has a gain of 16 bits, times the ranges of its features. static: the published format (arXiv
    2411.07942), in which symmetric ranges alone say what codes stand for. If omitted, token, or with --continue as
    before."""
    bits: Annotated[float, Field(gt=3, le=16)] | Literal["uniform"] | None = None
    """Budget of bits per value over all layers, every bit counted, such as 5: layers get codes of 3 to 8 bits by what
    these do to the model's outputs. uniform: 4-bit codes everywhere. If omitted, 4.25, or what uniform takes
    if that is more, as in narrow layers; with --gain static uniform; with --continue as before."""
    inputs: str = ""
    """Format in which layers send their inputs where that takes no more bits than their partial sums in 4 bits, as
    behind attention, such as GroupInt(bits=8, group=64, symmetric=True). Each rank then keeps the whole weights of
    these layers. none: no layer does. If omitted, codes of 4 to 8 bits where a budget is better spent so, or with
    --continue as before."""
    continue_: bool = False
    """Continue the calibration in the output file, for example after a warning that the text has drifted."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Momentum of the moving averages."""

    def __post_init__(self) -> None:
        self.selection(1 << 30)  # wider than any model, whose width is not known yet

    @property
    def path(self) -> Path:
        """Return the file to write."""
        return Path(self.output) if self.output else default_calibration(self.model, self.ranks)

    def selection(self, width: int) -> int:
        """Return k, as `lowbit.tensor_parallel.calibrate` takes it, for E = `width`."""
        wanted = self.features or "E/64"
        share = wanted.removeprefix("E/")
        if not share.isdecimal() or (share != wanted and not int(share)):
            raise ConfigError(
                f"features is {self.features!r}; allowed: 'E/64' or another share of a layer's E features, "
                "or a number of them"
            )
        k = int(share) if share == wanted else width // int(share)
        if k >= width:
            allowed = f"0 to {width - 1}, fewer than" if share == wanted else "'E/2' or another share, not"
            raise ConfigError(f"features is {self.features!r}; allowed: {allowed} all features of a layer")
        return k


@section()
class EvaluationConfig(InferenceConfig):
    """Settings of an evaluation: what to compare, and on which text."""

    low_bit: bool = False
    """Compare only feature-int4 with bf16: short for --format bf16,feature-int4."""
    formats: tuple[str, ...] = ()
    """Formats of the partial sums: bf16, int4 (a gain for each token times calibrated ranges, no outliers),
    feature-int4 (with the outlier features of the calibration), feature-int4-static (the published format: ranges
    alone, E/64 outliers, unless the calibration was made with --gain static: as it says), a codec such as int8 (groups
    of 64 with a scale each), or a file of `lowbit calibrate` (.safetensors), as it says. bf16 is always measured. If
    omitted, bf16, int4 and feature-int4."""
    tps: tuple[Positive, ...] = ()
    """Numbers of tensor-parallel ranks, emulated in this process. If omitted, those of 1, 2, 4 and 8 that the model can
    be split for. Under torchrun, its number of processes is used instead."""
    calibrations: tuple[str, ...] = ()
    """Files written by `lowbit calibrate`, at most one for each number of ranks. If omitted, the file in the model's
    folder; without such a file, a calibration is computed first."""
    calibration_text: tuple[str, ...] = ()
    """Text for such a calibration, given as `text` is. If omitted, Python's standard library without its last 5 %."""
    calibration_sequences: Positive = 256
    """Number of sequences for such a calibration."""
    sequences: NonNegative = 64
    """Windows of the text to evaluate on, spread evenly over it. 0: the whole text, each token once."""
    sentences: Annotated[int, Field(ge=12)] = 1000
    """Sentences of the text whose nearest neighbours are compared; encoders only."""
    generate: NonNegative = 0
    """Tokens that are generated greedily after 16 windows and compared; causal language models only."""
    batch: Positive = 4
    """Windows to evaluate at a time; 8 times as many sentences; as many tokens of questions as these windows have."""
    tasks: tuple[str, ...] = ()
    """Zero-shot tasks, by their names in lm-eval (the extra lowbit[tasks]), or with a local file of questions:
    arc_easy=test.parquet. Files are supported for arc_challenge, arc_easy, boolq, hellaswag, piqa and winogrande, as
    JSON lines or parquet, and do not need lm-eval."""
    task_folder: str = ""
    """Folder with more tasks, as YAML files that lm-eval reads."""
    limit: NonNegative = 0
    """Number of examples of each task, from the first on. 0: all."""
    algorithm: Literal["auto", "one_shot", "two_shot"] = "auto"
    """All-reduce algorithm. auto: one_shot for two ranks and for small messages, otherwise two_shot."""
    small: NonNegative | None = None
    """Sums with fewer elements are sent in the model's data type. If omitted, the default of inference."""

    def __post_init__(self) -> None:
        if self.low_bit and self.formats:
            raise ConfigError(f"format is {', '.join(self.formats)} and low-bit is given; allowed: one of them")
        if self.calibrations and self.calibration_text:
            raise ConfigError(
                f"calibration-text is {', '.join(self.calibration_text)} and calibration is "
                f"{', '.join(self.calibrations)}; allowed: one of them"
            )
        if self.calibrations and self.calibration_sequences != EvaluationConfig.calibration_sequences:
            raise ConfigError(
                f"calibration-sequences is {self.calibration_sequences} and calibration is "
                f"{', '.join(self.calibrations)}; allowed: one of them"
            )
        if self.task_folder and not self.harness_tasks:
            raise ConfigError(f"task-folder is {self.task_folder!r}; allowed: with --task and a name in lm-eval")
        named = [task.partition("=")[0] for task in self.tasks]
        for task, name in zip(self.tasks, named, strict=True):
            if "=" in task and (name not in FILE_TASKS or not self.task_files[name]):
                raise ConfigError(f"task is {task!r}; allowed with a file: NAME=FILE of {', '.join(FILE_TASKS)}")
            if named.count(name) > 1:
                raise ConfigError(f"task is {', '.join(self.tasks)}; allowed: each task once")
        if self.limit and not self.tasks:
            raise ConfigError(f"limit is {self.limit}; allowed: with --task")

    @property
    def task_files(self) -> dict[str, str]:
        """Return the files of tasks that have one, by task."""
        return {name: file for name, is_file, file in (task.partition("=") for task in self.tasks) if is_file}

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """Return the tasks that lm-eval loads."""
        return tuple(task for task in self.tasks if "=" not in task)

    @property
    def compared(self) -> tuple[str, ...]:
        """Return all formats, each once, the baseline first."""
        return tuple(dict.fromkeys((BASELINE, *((LOW_BIT,) if self.low_bit else self.formats or FORMATS))))
