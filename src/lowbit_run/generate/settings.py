"""Settings of `lowbit generate`."""

from typing import Annotated, Literal

from pydantic import Field

from lowbit_run.config import ConfigError, NonNegative, Positive, section
from lowbit_run.train.config import Seconds, Weights


@section()
class GenerateSettings:
    """The model, what it answers, and how it is spread over ranks."""

    folder: str = ""
    """Folder of a model, or of adapters that `lowbit train` or PEFT saved; or of a run, whose model is taken."""
    base: str = ""
    """Folder of the model that the adapters belong to. If omitted, the one that they name."""
    weights: Weights = "bf16"
    """Format of the weights in memory: fp32, bf16, int8 or nf4 (bitsandbytes). A folder with weights in 4 or 8 bits
    stays as it is."""
    double_quantization: bool = False
    """Quantize the scales of nf4 as well."""
    prompt: str = ""
    """Text to answer. If there are no prompts or samples either, it is read from standard input."""
    prompts: str = ""
    """File of prompts: one on each line, or, if it ends in .jsonl, {"prompt": ...} or {"messages": [...]} on each. The
    answers are printed as JSON, a line for each."""
    score: str = ""
    """File of samples, as `lowbit train` reads them with `data.format` jsonl: print the loss of their answers, and how
    many of them are written exactly."""
    chat: bool | None = None
    """Write prompts with the tokenizer's chat template. If omitted: where it has one, except for a .jsonl file's
    "prompt"."""
    tokens: NonNegative = 0
    """Most tokens of an answer. 0: `max_new_tokens` of the folder's `generation_config.json`, or 256."""
    sample: bool = False
    """Draw tokens as the folder's `generation_config.json` says. Otherwise each token is the likeliest one, after the
    penalties on repetition that the file sets."""
    seed: NonNegative = 0
    """Seed of the draws."""
    batch: Positive = 8
    """Prompts, or samples, that are computed together."""
    ranks: Positive = 2
    """Processes. Where RANK and WORLD_SIZE are set, as by torchrun, WORLD_SIZE is used instead."""
    layers: tuple[Positive, ...] = ()
    """Decoder layers of each rank, such as 20,12. If omitted, as equal as possible."""
    format: str = "GroupInt(bits=8, group=64)"
    """Format of the hidden states that travel between ranks; fp32 is exact."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if every local rank has a GPU of its own, otherwise the CPU."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """PyTorch threads of each rank. 0: the cores of the machine divided by its ranks."""
    timeout_seconds: Seconds = 120.0
    """Longest wait for another rank before it counts as failed."""
    checksums: bool = True
    """Add 8 bytes to each message, to detect damage."""

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "prompts", "score") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given; allowed: one of them")
        if self.prompt and not self.prompt.strip():
            raise ConfigError(f"prompt is {self.prompt!r:.60}; allowed: text that is not empty")
        idle = [name for name in ("tokens", "sample") if getattr(self, name)] + ["chat"] * (self.chat is not None)
        if self.score and idle:
            raise ConfigError(f"{idle[0]} is set and score is given; allowed: with prompts, which are answered")
        if self.seed and not self.sample:
            raise ConfigError(f"seed is {self.seed} and sample is false; allowed: with sample, which draws tokens")
        if self.double_quantization and self.weights != "nf4":
            raise ConfigError(f"double_quantization is true and weights is {self.weights}; allowed: with nf4 only")
