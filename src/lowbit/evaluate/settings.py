"""What `lowbit calibrate` and `lowbit evaluate` are asked to do. Imports no PyTorch: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lowbit.train import ConfigError

FORMATS = ("bf16", "int4", "feature-int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ALGORITHMS = ("auto", "one_shot", "two_shot")
BASE = "bf16"
"""What other formats are compared with."""
LOW_BIT = "feature-int4"


def default_calibration(model: str, ranks: int) -> Path:
    """Where a calibration lies if nobody says where: beside the model's weights."""
    return Path(model) / f"calibration-tp{ranks}.safetensors"


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How a calibration is made.

    Args:
        model: local folder with a Hugging Face checkpoint.
        ranks: tensor-parallel ranks to calibrate for; under torchrun they are the ranks of the job.
        text: files, folders or patterns; absent: the sources of Python's standard library but for their last 5 %.
        sequences: how many are drawn from the text.
        length: tokens of a sequence.
        output: file to write; absent: calibration-tp<ranks>.safetensors in the model's folder.
        features: which of a boundary's E features travel in bfloat16: "E/64" (so many of each boundary, those with the
            largest ranges), any number of them, or "distributed" (as many in all, most where they help most); absent:
            E/64, or with continue_ as in the calibration that goes on.
        continue_: go on from the calibration in the output, as after a warning that the text has drifted.
        momentum: of the moving averages.
        tokenizer: "bytes" or a folder; absent: the model's own.
        dtype: auto (bfloat16 where the device computes in it, else float32), float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        threads: of PyTorch, 0: its default; seed: of the draw; max_bytes: read no more text than this.
    """

    model: str
    ranks: int = 2
    text: tuple[str, ...] = ()
    sequences: int = 256
    length: int = 512
    output: str = ""
    features: str = ""
    continue_: bool = False
    momentum: float = 0.99
    tokenizer: str = ""
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    seed: int = 0
    max_bytes: int = 16_000_000

    def __post_init__(self) -> None:
        at_least(self, ranks=1, sequences=1, length=2, threads=0, max_bytes=1)
        one_of(self, dtype=DTYPES, device=DEVICES)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}; allowed: from 0 to below 1")
        self.selection(64)

    @property
    def path(self) -> Path:
        """The file to write."""
        return Path(self.output) if self.output else default_calibration(self.model, self.ranks)

    def selection(self, width: int) -> tuple[int | None, str]:
        """k (None: E // 64) and layout, as `lowbit.tensor_parallel.calibrate` takes them, for boundaries this wide."""
        if self.features == "distributed":
            return None, "distributed"
        wanted = self.features or "E/64"
        share = wanted.removeprefix("E/")
        if not share.isdecimal() or (share != wanted and not int(share)):
            raise ConfigError(
                f"features is {self.features!r}; allowed: 'E/64' or another share of a boundary's E features, "
                "a number of them, or 'distributed'"
            )
        return (int(share) if share == wanted else width // int(share)), "fixed"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is compared, and on which text.

    Args:
        model: local folder with a Hugging Face checkpoint.
        low_bit: compare feature-int4 only, with bf16: short for --format bf16,feature-int4.
        formats: what partial sums travel in: bf16, int4 (static scales, no outlier features), feature-int4 (outlier
            features as the calibration chose them), feature-int4-distributed (as many, most where they help most), or
            any codec, such as int8 (groups of 64, their scales travel). bf16 is always measured, to compare with.
        tps: numbers of tensor-parallel ranks, emulated in this process; absent: those of 1, 2, 4 and 8 that the model
            can be cut for. Under torchrun: the ranks of the job.
        calibrations: files that `lowbit calibrate` wrote, at most one for each number of ranks; absent: the one in the
            model's folder, or where that is missing one that is made first.
        calibration_text: text to make one from, like `text`; absent: the standard library but for its last 5 %.
        calibration_sequences: how many.
        text: files, folders or patterns; absent: the last 5 % of the sources of Python's standard library.
        sequences: how many windows of the text, evenly spread over it; 0: all of it, each token once.
        length: tokens of a window.
        batch: windows at a time.
        tasks: zero-shot tasks, by the names that lm-eval has for them (the extra lowbit[tasks]).
        task_folder: with more of them, in YAML files as lm-eval reads them.
        limit: examples of each task, 0: all; shots: solved examples before each.
        algorithm: of the all-reduce: auto (one_shot for two ranks, else two_shot if large), one_shot or two_shot.
        small: sums of fewer elements travel in the model's dtype; absent: as in inference.
        tokenizer: "bytes" or a folder; absent: the model's own.
        dtype: auto (bfloat16 where the device computes in it, else float32), float32, bfloat16 or float16.
        device: auto, cpu or cuda.
        threads: of PyTorch, 0: its default. Real ranks and emulated ones agree to the last bit with the same number.
        seed: of the draw for a calibration.
        max_bytes: read no more text than this.
    """

    model: str
    low_bit: bool = False
    formats: tuple[str, ...] = FORMATS
    tps: tuple[int, ...] = ()
    calibrations: tuple[str, ...] = ()
    calibration_text: tuple[str, ...] = ()
    calibration_sequences: int = 256
    text: tuple[str, ...] = ()
    sequences: int = 64
    length: int = 512
    batch: int = 4
    tasks: tuple[str, ...] = ()
    task_folder: str = ""
    limit: int = 0
    shots: int = 0
    algorithm: str = "auto"
    small: int | None = None
    tokenizer: str = ""
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    seed: int = 0
    max_bytes: int = 16_000_000

    def __post_init__(self) -> None:
        at_least(
            self, sequences=0, length=2, batch=1, limit=0, shots=0, threads=0, max_bytes=1, calibration_sequences=1,
        )  # fmt: skip
        one_of(self, dtype=DTYPES, device=DEVICES, algorithm=ALGORITHMS)
        if not self.formats:
            raise ConfigError(f"format is empty; allowed: {', '.join(FORMATS)}, or any codec")
        if any(tp < 1 for tp in self.tps):
            raise ConfigError(f"tp is {self.tps}; allowed: at least 1")
        if self.calibrations and self.calibration_text:
            raise ConfigError(
                f"calibration-text is {', '.join(self.calibration_text)} and calibration is "
                f"{', '.join(self.calibrations)}; allowed: one of them"
            )
        if self.task_folder and not self.tasks:
            raise ConfigError(f"task-folder is {self.task_folder!r}; allowed: with --task")

    @property
    def compared(self) -> tuple[str, ...]:
        """All formats, the one to compare with first, none twice."""
        return tuple(dict.fromkeys((BASE, *((LOW_BIT,) if self.low_bit else self.formats))))


def at_least(settings: object, **lowest: int) -> None:
    """Raise unless these fields are as large.

    Raises:
        ConfigError: one is smaller.
    """
    for name, low in lowest.items():
        if getattr(settings, name) < low:
            raise ConfigError(f"{name} is {getattr(settings, name)}; allowed: at least {low}")


def one_of(settings: object, **choices: tuple[str, ...]) -> None:
    """Raise unless these fields are among their choices.

    Raises:
        ConfigError: one is something else.
    """
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise ConfigError(f"{name} is {getattr(settings, name)!r}; allowed: {', '.join(allowed)}")
