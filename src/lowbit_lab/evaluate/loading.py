"""Loads what both commands need: a local checkpoint, whole or on the ranks of a job, text as tokens, calibrations."""

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lowbit.tensor_parallel import Calibration, SumSettings, tensor_parallel_
from lowbit.tensor_parallel.low_bit import load_agreed
from lowbit.tensor_parallel.observed import logged_progress
from lowbit.tensor_parallel.plan import ENCODERS
from lowbit.wire.pytorch import default_group
from lowbit_lab.evaluate.settings import InferenceConfig
from lowbit_run.config import ConfigError
from lowbit_run.job.process_group import joined, world
from lowbit_run.terminal import console, filtered_again
from lowbit_run.train import data as corpus
from lowbit_run.train.config import DataConfig
from lowbit_run.train.device import choose_autocast, choose_device
from lowbit_run.train.pretrained import (
    FolderTokenizer,
    Tokenizer,
    check_files,
    load,
    load_tokenizer,
    transformers_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
TIMEOUT = 300.0
CAUSAL, ENCODER = "causal language model", "encoder"
LIBRARY = "Python's standard library"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Windows of a text, back to back. Every token is predicted once, except for the very first without a `begin`.

    Args:
        tokens: token ids of the whole text, one dimension.
        length: tokens of a model's input; that of the last window may be shorter.
        begin: id that every window begins with, if the model expects one (its tokenizer's BOS); None: a window begins
            with the token before the first that it predicts.
        end: id that every window of an encoder ends with, in place of its last token.
        source: name of the text, for messages and files.
    """

    tokens: np.ndarray
    length: int
    begin: int | None = None
    end: int | None = None
    source: str = "text"

    def __len__(self) -> int:
        return -(-self.predicted // self.length)

    @property
    def predicted(self) -> int:
        """Number of tokens that are predicted: all, or all but the first."""
        return max(0, len(self.tokens) - (self.begin is None))

    @property
    def whole(self) -> int:
        """Number of windows of full length."""
        return self.predicted // self.length

    def window(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets: int64, (length,) each; the last window may be shorter."""
        start = index * self.length
        both = torch.from_numpy(self.tokens[start : start + self.length + (self.begin is None)].astype(np.int64))
        if self.begin is None:
            return both[:-1], both[1:]
        return torch.cat([torch.tensor([self.begin]), both[:-1]]), both

    def warn_if_fewer(self, count: int) -> None:
        """Log a warning if there are fewer windows than `count`."""
        if count > len(self):
            log.warning(
                "sequences is %d, and %s has %d of %d tokens: using all of them",
                count, self.source, len(self), self.length,
            )  # fmt: skip

    def spread(self, count: int) -> list[int]:
        """Return the indices of `count` windows, evenly spread over the text; all if `count` is 0 or too large."""
        if not count or count >= len(self):
            return list(range(len(self)))
        return [i * len(self) // count for i in range(count)]

    def batches(self, indices: list[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of these windows, (up to `size`, length) each; a shorter window comes alone."""
        full, shorter = [i for i in indices if i < self.whole], [[i] for i in indices if i >= self.whole]
        for group in [*(full[i : i + size] for i in range(0, len(full), size)), *shorter]:
            inputs, targets = zip(*map(self.window, group), strict=True)
            yield torch.stack(inputs), torch.stack(targets)

    def draw(self, count: int, seed: int) -> list[Tensor]:
        """Return up to `count` different full windows in an order that depends on the seed: int64, (length,) each.

        Raises:
            ConfigError: the text is shorter than one window.
        """
        if not self.whole:
            raise ConfigError(
                f"{self.source} has {len(self.tokens)} tokens; allowed: at least one sequence of {self.length} "
                f"({self.length + (self.begin is None)} tokens)"
            )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.whole, generator=generator)[:count]
        return [self.sequence(i) for i in order.tolist()]

    def sequence(self, index: int) -> Tensor:
        """Return a window as a model reads it, with its `end`: int64, (length,)."""
        inputs, _ = self.window(index)
        return inputs if self.end is None else torch.cat([inputs[:-1], torch.tensor([self.end])])

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the tokens, whatever the length of the windows."""
        digest = hashlib.sha256(str(self.begin).encode())
        digest.update(np.ascontiguousarray(self.tokens, np.int64).data)
        return digest.hexdigest()[:16]


def read_text(
    settings: InferenceConfig, *, held_out: bool = False, encoder: bool = False
) -> tuple[Sequences, Tokenizer]:
    """Read the text of the settings; also return its tokenizer.

    Args:
        held_out: take the end of the standard library that `lowbit train` holds out, not the rest.
        encoder: the model reads a text between two special tokens.
    """
    tokenizer = load_tokenizer(settings.tokenizer or settings.model, key="tokenizer")
    tokens = corpus.encode_documents(documents(settings, held_out=held_out), tokenizer)
    source = ", ".join(settings.text) or LIBRARY
    if len(tokens) < 2:
        raise ConfigError(f"{source} has {len(tokens)} tokens; allowed: at least 2")
    ends: Any = None, None  # the ids that the tokenizer puts around every text
    if isinstance(tokenizer, FolderTokenizer):
        own = tokenizer.hugging_face()
        around = own("a")["input_ids"]
        ends = (own.cls_token_id, own.sep_token_id) if encoder else (own.bos_token_id, None)
        if ends[0] is None or around[:1] != [ends[0]] or (encoder and around[-1:] != [ends[1]]):
            ends = None, None
    sequences = Sequences(tokens=tokens, length=settings.length, begin=ends[0], end=ends[1], source=source)
    return sequences, tokenizer


def documents(settings: InferenceConfig, *, held_out: bool = False) -> Iterator[bytes]:
    """Return the documents of the settings, up to `max_bytes`; of the standard library one part (`held_out`)."""
    data = DataConfig(text=settings.text, max_bytes=settings.max_bytes)
    texts: Iterable[bytes] = corpus.documents(data)
    if not data.text:
        texts = list(texts)
        split = corpus.held_out_start(sum(map(len, texts)), data.held_out_share)
        starts = itertools.accumulate(map(len, texts), initial=0)
        cuts = [(text, max(split - start, 0)) for text, start in zip(texts, starts, strict=False)]
        texts = filter(None, (text[cut:] if held_out else text[:cut] for text, cut in cuts))
    return corpus.capped(texts, data.max_bytes)


def prepare(settings: InferenceConfig) -> torch.device:
    """Check the model's folder, set the number of threads, and return the device of this rank."""
    device = choose_device(settings.device, world()[1], key="device")
    config = model_config(settings.model)
    check_files(settings.model, "model")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and settings.length > longest:
        raise ConfigError(f"length is {settings.length}; the model has {longest} positions; allowed: at most as many")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return device


@contextlib.contextmanager
def job(device: torch.device) -> Iterator[None]:
    """Join the process group of the job for this block, if there is a job."""
    if world()[1] == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined(TIMEOUT, backend="nccl" if device.type == "cuda" else "gloo"):
        yield


def load_model(folder: str, dtype: str, device: torch.device) -> "PreTrainedModel":
    """Load a language model or encoder: split over the ranks of the job, or whole without one; nothing is downloaded.

    It is split on the CPU: the host briefly holds a whole model for each rank, a device only its rank's part.

    Args:
        folder: with `config.json` and weights; dtype: see the settings.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM if model_kind(folder) == CAUSAL else AutoModel
    # "auto": bfloat16 if the device has instructions for it.
    kind = choose_autocast("auto", device) or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    model, missing = load(auto, folder, "model", complete=False, dtype=kind)
    if any(name.startswith("pooler.") for name in missing):  # the pooler is not needed
        model.pooler, missing = None, [name for name in missing if not name.startswith("pooler.")]
    if missing:
        raise ConfigError(f"model {folder!r} has no weights {', '.join(missing[:3])}; allowed: a complete checkpoint")
    attention = model.config._attn_implementation
    if attention != "sdpa":
        log.warning("%s computes attention by %s: it supports nothing else", type(model).__name__, attention)
    model.eval()
    if world()[1] > 1:
        tensor_parallel_(model)
    return model.to(device)  # pyright: ignore[reportArgumentType]


def model_kind(folder: str) -> str:
    """Return `CAUSAL` or `ENCODER`, as the checkpoint's config says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = model_config(folder).model_type
    if kind in ENCODERS:
        return ENCODER
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model {folder!r} is of the type {kind!r}; allowed: causal language models, and the "
            f"encoders {', '.join(ENCODERS)}"
        )
    return CAUSAL


def model_config(folder: str) -> "PreTrainedConfig":
    """Return the config of the checkpoint's text model, with the defaults of its architecture."""
    return transformers_config(folder, "model").get_text_config()


def possible_ranks(folder: str, most: int = 128) -> list[int]:
    """Return the numbers of ranks that can share the model's heads evenly."""
    config = model_config(folder)
    heads = [getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")]
    return [n for n in range(1, most + 1) if all(h % n == 0 for h in heads if h)]


def check_ranks(key: str, ranks: int, folder: str) -> None:
    """Raise ConfigError, which names the setting `key`, unless this many ranks can share the model's heads evenly."""
    if ranks not in (possible := possible_ranks(folder)):
        raise ConfigError(f"{key} is {ranks}; allowed: what divides the model's heads, {', '.join(map(str, possible))}")


def load_calibrations(files: tuple[str, ...]) -> dict[int, Calibration]:
    """Load calibrations, at most one for each number of ranks, and return them by number (`load_calibration`)."""
    loaded: dict[int, Calibration] = {}
    for calibration in map(load_calibration, files):
        if (ranks := calibration.world) in loaded:
            raise ConfigError(f"calibration has two files for {ranks} ranks; allowed: one for each number of ranks")
        loaded[ranks] = calibration
    return loaded


def load_calibration(path: str | Path) -> Calibration:
    """Load a calibration; in a job, all ranks return the same one or raise the same error."""
    if world()[1] == 1:
        return Calibration.load(path)
    loaded = load_agreed(path, default_group(), SumSettings())
    assert isinstance(loaded, Calibration)
    return loaded


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on the terminal of the first rank, or log a line every half minute where there is no terminal.

    Yields:
        A function that takes the number of finished items.
    """
    from rich.markup import escape
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    hidden = os.environ.get("RANK", "0") != "0"
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=hidden) as bar, filtered_again():
        task = bar.add_task(escape(title), total=total)
        if hidden or screen.is_terminal:
            yield lambda done: bar.update(task, completed=done)
        else:
            yield logged_progress(title, total)
