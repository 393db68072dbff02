"""Settings of `lowbit calibrate` and `lowbit evaluate`. Imports no PyTorch: the command line reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lowbit.config import ConfigError, NonNegative, Positive, section

FORMATS = ("bf16", "int4", "feature-int4")
BASELINE = "bf16"
"""The format that others are compared with."""
LOW_BIT = "feature-int4"


def default_calibration(model: str, ranks: int) -> Path:
    """Return where a calibration lies unless a file is named: beside the model's weights."""
    return Path(model) / f"calibration-tp{ranks}.safetensors"


@section()
class InferenceConfig:
    """Settings common to calibration and evaluation: a model, a text, and how to compute."""

    model: str
    """Local folder with a Hugging Face checkpoint."""
    text: tuple[str, ...] = ()
    """Files, folders or patterns; absent: the sources of Python's standard library, the last 5 % of them for an
    evaluation, the others for a calibration."""
    length: Annotated[int, Field(ge=2)] = 512
    """Tokens of a sequence."""
    tokenizer: str = ""
    """"bytes" or a folder; absent: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the computation; auto: bfloat16 where the device computes in it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    threads: NonNegative = 0
    """Threads of PyTorch; 0: its default. Real and emulated ranks agree to the last bit with the same number."""
    seed: int = 0
    """Of the random draw of sequences for a calibration."""
    max_bytes: Positive = 16_000_000
    """Read no more text than this."""


@section()
class CalibrationConfig(InferenceConfig):
    """Settings of a calibration."""

    ranks: Positive = 2
    """Tensor-parallel ranks to calibrate for; under torchrun the ranks of the job."""
    sequences: Positive = 256
    """Sequences that are drawn from the text."""
    output: str = ""
    """File to write; absent: calibration-tp<ranks>.safetensors in the model's folder."""
    features: str = ""
    """Which of a layer's E features are sent as bfloat16: "E/64" (so many of each layer, those with the largest
    ranges), any number of them, or "distributed" (as many in all, most where they help most); absent: E/64, or with
    --continue as in the calibration that goes on."""
    continue_: bool = False
    """Go on from the calibration in the output, as after a warning that the text has drifted."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Of the moving averages."""

    def __post_init__(self) -> None:
        self.selection(64)

    @property
    def path(self) -> Path:
        """The file to write."""
        return Path(self.output) if self.output else default_calibration(self.model, self.ranks)

    def selection(self, width: int) -> tuple[int | None, str]:
        """Return k (None: E // 64) and layout, as `lowbit.tensor_parallel.calibrate` takes them, for E = `width`."""
        if self.features == "distributed":
            return None, "distributed"
        wanted = self.features or "E/64"
        share = wanted.removeprefix("E/")
        if not share.isdecimal() or (share != wanted and not int(share)):
            raise ConfigError(
                f"features is {self.features!r}; allowed: 'E/64' or another share of a layer's E features, "
                "a number of them, or 'distributed'"
            )
        return (int(share) if share == wanted else width // int(share)), "fixed"


@section()
class EvaluationConfig(InferenceConfig):
    """Settings of an evaluation: what to compare, and on which text."""

    low_bit: bool = False
    """Compare feature-int4 only, with bf16: short for --format bf16,feature-int4."""
    formats: tuple[str, ...] = FORMATS
    """Formats of the partial sums: bf16, int4 (static scales, no outlier features), feature-int4 (outlier features as
    the calibration chose them), feature-int4-distributed (as many, most where they help most), or any codec, such as
    int8 (groups of 64, whose scales are sent). bf16 is always measured, to compare with."""
    tps: tuple[Positive, ...] = ()
    """Numbers of tensor-parallel ranks, emulated in this process; absent: those of 1, 2, 4 and 8 that the model can be
    cut for. Under torchrun: the ranks of the job."""
    calibrations: tuple[str, ...] = ()
    """Files that `lowbit calibrate` wrote, at most one for each number of ranks; absent: the one in the model's folder,
    or if that is missing one that is computed first."""
    calibration_text: tuple[str, ...] = ()
    """Text to make a calibration from, like `text`; absent: the standard library but for its last 5 %."""
    calibration_sequences: Positive = 256
    """Sequences to make a calibration from."""
    sequences: NonNegative = 64
    """Windows of the text, evenly spread over it; 0: all of it, each token once."""
    batch: Positive = 4
    """Windows at a time."""
    tasks: tuple[str, ...] = ()
    """Zero-shot tasks, by lm-eval's names (the extra lowbit[tasks])."""
    task_folder: str = ""
    """Folder with more of them, in YAML files as lm-eval reads them."""
    limit: NonNegative = 0
    """Examples of each task; 0: all."""
    shots: NonNegative = 0
    """Solved examples before each."""
    algorithm: Literal["auto", "one_shot", "two_shot"] = "auto"
    """Of the all-reduce; auto: one_shot for two ranks, else two_shot if large."""
    small: NonNegative | None = None
    """Sums of fewer elements stay in the model's dtype; absent: as in inference."""

    def __post_init__(self) -> None:
        if not self.formats:
            raise ConfigError(f"format is empty; allowed: {', '.join(FORMATS)}, or any codec")
        if self.calibrations and self.calibration_text:
            raise ConfigError(
                f"calibration-text is {', '.join(self.calibration_text)} and calibration is "
                f"{', '.join(self.calibrations)}; allowed: one of them"
            )
        if self.task_folder and not self.tasks:
            raise ConfigError(f"task-folder is {self.task_folder!r}; allowed: with --task")

    @property
    def compared(self) -> tuple[str, ...]:
        """All formats, the baseline first, none twice."""
        return tuple(dict.fromkeys((BASELINE, *((LOW_BIT,) if self.low_bit else self.formats))))
