"""Tokens, cut into numbered windows that come in a fixed, seeded order.

Every rank works out for itself which sample ids a step has: from the seed and the number of the step alone. Nothing
about the data has to be sent, and a run that resumes at step N sees exactly what it would have seen.
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

from lowbit.train import corpus
from lowbit.train.checkpoints.manifest import printable
from lowbit.train.config import DataConfig
from lowbit.train.folder import RunFolder
from lowbit.train.section import ConfigError
from lowbit.train.tokenizer import Tokenizer, definition, load_tokenizer

log = logging.getLogger(__name__)


class Windows:
    """Windows of `sequence` tokens, back to back; window i is sample i.

    Args:
        tokens: token ids, one dimension.
        sequence: tokens of a window; each also has the token that follows it, its last target.
    """

    def __init__(self, tokens: np.ndarray, sequence: int) -> None:
        self.tokens = tokens
        self.sequence = sequence

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence)

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples: int64, (len(ids), sequence) each."""
        starts = ids.numpy()[:, None] * self.sequence
        both = self.tokens[starts + np.arange(self.sequence + 1)].astype(np.int64)
        whole = torch.from_numpy(both)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


class Order:
    """Which samples each step has: every epoch is a new permutation; what does not fill a batch is left out of it.

    Args:
        samples: how many there are; batch: how many a step takes; seed: of the permutations.
    """

    def __init__(self, *, samples: int, batch: int, seed: int) -> None:
        self.samples = samples
        self.batch = batch
        self.seed = seed
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
    """Everything a run reads: the training windows, the held-out ones, and the tokenizer that made them."""

    train: Windows
    held_out: Windows
    tokenizer: Tokenizer

    def fingerprint(self) -> str:
        """16 hexadecimal digits by which ranks see that they have the same tokens."""
        digest = hashlib.sha256()
        for windows in (self.train, self.held_out):
            digest.update(f"{windows.tokens.dtype} {windows.sequence} {len(windows.tokens)}".encode())
            digest.update(np.ascontiguousarray(windows.tokens).data)
        return digest.hexdigest()[:16]


def load_data(data: DataConfig, *, cache: Path | None = None) -> Data:
    """Read, tokenize and cut the text.

    Args:
        data: what to read.
        cache: folder where the ids of a Hugging Face tokenizer are kept, so that they are worked out once.

    Raises:
        ConfigError: text that is missing, empty or shorter than one batch of windows, or no tokenizer.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    tokens = _tokens(corpus.capped(corpus.documents(data), data.max_bytes), tokenizer, cache)
    if not len(tokens):
        raise ConfigError(f"{_source(data)} is empty; allowed: text with at least one token")
    if data.held_out:
        held_out = _tokens(corpus.capped(corpus.held_out_documents(data), data.max_bytes), tokenizer, cache)
    else:
        split = len(tokens) - int(len(tokens) * data.held_out_share)
        tokens, held_out = tokens[:split], tokens[split:]
    found = Data(
        train=Windows(tokens, data.sequence),
        held_out=Windows(held_out, data.sequence),
        tokenizer=tokenizer,
    )
    _check_lengths(data, found)
    return found


def _check_lengths(data: DataConfig, found: Data) -> None:
    length = len(found.train.tokens)
    if not len(found.train):
        raise ConfigError(
            f"data.sequence is {data.sequence}; {_source(data)} has {length} tokens to train on; "
            f"allowed: at most {max(0, length - 1)}"
        )
    if len(found.train) < data.batch:
        raise ConfigError(
            f"data.batch is {data.batch}; {_source(data)} has {len(found.train)} windows of {data.sequence} tokens "
            "to train on; allowed: at most as many"
        )
    if data.held_out and not len(found.held_out):
        raise ConfigError(
            f"data.held_out has {len(found.held_out.tokens)} tokens; allowed: more than data.sequence ({data.sequence})"
        )


def _source(data: DataConfig) -> str:
    if data.dataset:
        return f"data.dataset {data.dataset!r}"
    return f"data.text {', '.join(data.text)}" if data.text else "Python's standard library"


def _tokens(found: Iterator[bytes], tokenizer: Tokenizer, cache: Path | None) -> np.ndarray:
    """Token ids of all documents, one after the other."""
    if cache is None or tokenizer.size == 256:  # bytes cost nothing
        return _encode(found, tokenizer)
    texts = list(found)
    digest = hashlib.sha256(definition(tokenizer.hugging_face()).encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    path = cache / f"tokens-{digest.hexdigest()[:16]}.npy"
    if (kept := _read(path)) is not None:
        return kept
    tokens = _encode(iter(texts), tokenizer)
    _write(path, tokens)
    return tokens


def _encode(found: Iterator[bytes], tokenizer: Tokenizer) -> np.ndarray:
    parts = [tokenizer.encode(document) for document in found]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _read(path: Path) -> np.ndarray | None:
    """Token ids that were kept; None where there are none that can be read."""
    if not path.is_file():
        return None
    try:
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim == 1 and tokens.dtype.kind == "u":
            return tokens
        problem = f"it holds {tokens.dtype} {tokens.shape}"
    except (OSError, ValueError, EOFError) as error:
        problem = str(error)
    log.warning("%s cannot be used and is made anew: %s", path, printable(problem))
    return None


def _write(path: Path, tokens: np.ndarray) -> None:
    """Write so that another rank never sees half a file, and nothing that lowbit did not make is replaced."""
    folder = RunFolder(path.parent.parent)
    part = path.with_suffix(f".{os.getpid()}.npy")
    names = [f"{path.parent.name}/{file.name}" for file in (part, path)]
    if others := folder.foreign(names):
        log.warning("%s is not lowbit's and stays; token ids are not kept", folder.path / others[0])
        return
    folder.note(*names)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(part, tokens)
    part.replace(path)
