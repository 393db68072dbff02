"""Tokens, cut into numbered windows in a seeded order.

Every rank computes the sample ids of a step from the seed and the number of the step. So nothing about the data is
sent, and a run that resumes at step N sees exactly the samples that it would have seen.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowbit.config import ConfigError
from lowbit.train import corpus
from lowbit.train.checkpoints.manifest import printable
from lowbit.train.config import DataConfig
from lowbit.train.folder import RunFolder
from lowbit.train.tokenizer import ByteTokenizer, Tokenizer, definition, load_tokenizer

log = logging.getLogger(__name__)


class Windows:
    """Windows of `sequence` tokens, back to back; window i is sample i.

    Args:
        tokens: token ids, one dimension.
        sequence: tokens of a window; the token after it is its last target.
    """

    def __init__(self, tokens: np.ndarray, sequence: int) -> None:
        self.tokens = tokens
        self.sequence = sequence

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence)

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples: int64, (len(ids), sequence) each."""
        starts = ids.numpy()[:, None] * self.sequence
        both = torch.from_numpy(self.tokens[starts + np.arange(self.sequence + 1)].astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class Order:
    """The samples of each step: every epoch is a new permutation, without the rest that fills no batch.

    Args:
        samples: their number. batch: samples of a step. seed: of the permutations.
    """

    def __init__(self, *, samples: int, batch: int, seed: int) -> None:
        self.samples, self.batch, self.seed = samples, batch, seed
        self.steps_per_epoch = samples // batch
        self._permutation = lru_cache(maxsize=1)(self._permute)

    def ids(self, step: int) -> Tensor:
        """Sample ids of a step, counted from 0: int64, (batch,), all different."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._permutation(epoch)[position * self.batch : (position + 1) * self.batch]

    def _permute(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randperm(self.samples, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training windows, the held-out windows and their tokenizer."""

    train: Windows
    held_out: Windows
    tokenizer: Tokenizer

    def fingerprint(self) -> str:
        """16 hexadecimal digits; ranks compare them to know that they have the same tokens."""
        digest = hashlib.sha256()
        for windows in (self.train, self.held_out):
            digest.update(f"{windows.tokens.dtype} {windows.sequence} {len(windows.tokens)}".encode())
            digest.update(np.ascontiguousarray(windows.tokens).data)
        return digest.hexdigest()[:16]


def load_data(data: DataConfig, *, cache: Path | None = None) -> Data:
    """Read, tokenize and cut the text.

    Args:
        cache: folder that keeps the ids of a Hugging Face tokenizer, so that they are computed once.

    Raises:
        ConfigError: no tokenizer, or text that is missing, empty or shorter than one batch of windows.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    tokens = _tokens(corpus.capped(corpus.documents(data), data.max_bytes), tokenizer, cache)
    if not len(tokens):
        raise ConfigError(f"{_source(data)} is empty; allowed: text with at least one token")
    if data.held_out:
        held_out = _tokens(corpus.capped(corpus.held_out_documents(data), data.max_bytes), tokenizer, cache)
    else:
        tokens, held_out = np.split(tokens, [corpus.held_out_start(len(tokens), data.held_out_share)])
    loaded = Data(train=Windows(tokens, data.sequence), held_out=Windows(held_out, data.sequence), tokenizer=tokenizer)
    _check_lengths(data, loaded)
    return loaded


def _check_lengths(data: DataConfig, loaded: Data) -> None:
    length, windows = len(loaded.train.tokens), len(loaded.train)
    if not windows:
        raise ConfigError(
            f"data.sequence is {data.sequence}; {_source(data)} has {length} tokens to train on; "
            f"allowed: at most {max(0, length - 1)}"
        )
    if windows < data.batch:
        raise ConfigError(
            f"data.batch is {data.batch}; {_source(data)} has {windows} windows of {data.sequence} tokens to train on; "
            "allowed: at most as many"
        )
    if data.held_out and not len(loaded.held_out):
        length = len(loaded.held_out.tokens)
        raise ConfigError(f"data.held_out has {length} tokens; allowed: more than data.sequence ({data.sequence})")


def _source(data: DataConfig) -> str:
    if data.dataset:
        return f"data.dataset {data.dataset!r}"
    return f"data.text {', '.join(data.text)}" if data.text else "Python's standard library"


def _tokens(documents: Iterator[bytes], tokenizer: Tokenizer, cache: Path | None) -> np.ndarray:
    """Token ids of all documents, from the cache if they are there."""
    if cache is None or isinstance(tokenizer, ByteTokenizer):
        return corpus.encode(documents, tokenizer)
    texts, inner = list(documents), tokenizer.hugging_face()
    digest = hashlib.sha256(f"{inner!r} {definition(inner)}".encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    path = cache / f"tokens-{digest.hexdigest()[:16]}.npy"
    tokens = _read(path)
    if tokens is None:
        tokens = corpus.encode(texts, tokenizer)
        _write(path, tokens)
    return tokens


def _read(path: Path) -> np.ndarray | None:
    """Token ids of an earlier run; None if there are none or they cannot be read."""
    if not path.is_file():
        return None
    try:
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim == 1 and tokens.dtype.kind == "u":
            return tokens
        problem = f"it holds {tokens.dtype} {tokens.shape}"
    except (OSError, ValueError, EOFError) as error:
        problem = str(error)
    log.warning("%s cannot be used and is written again: %s", path, printable(problem))
    return None


def _write(path: Path, tokens: np.ndarray) -> None:
    """Write so that another rank never sees half a file; a file that lowbit did not make stays."""
    folder = RunFolder(path.parent.parent)
    part = path.with_suffix(f".{os.getpid()}.npy")
    names = [f"{path.parent.name}/{file.name}" for file in (part, path)]
    if others := folder.foreign(names):
        log.warning("%s was not made by lowbit and stays; token ids are not cached", folder.path / others[0])
        return
    folder.note(*names)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(part, tokens)
    part.replace(path)
