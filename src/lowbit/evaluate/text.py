"""Text as windows of token ids: drawn at random for a calibration, one after the other for perplexity."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.train import ConfigError, corpus
from lowbit.train.config import DataConfig
from lowbit.train.tokenizer import FolderTokenizer, Tokenizer, load_tokenizer

log = logging.getLogger(__name__)
HELD_OUT = DataConfig().held_out_share
LIBRARY = "Python's standard library"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Windows of a text, back to back. Every token is predicted once, but for the very first if there is no `begin`.

    Args:
        tokens: token ids of the whole text, one dimension.
        length: tokens that the model sees at a time; the last window may have fewer.
        begin: id that every window begins with, where the model expects one (its tokenizer's BOS); None: windows begin
            with the token before the first that they predict.
        source: what the text is, for messages and files.
    """

    tokens: np.ndarray
    length: int
    begin: int | None = None
    source: str = "text"

    def __len__(self) -> int:
        return -(-self.predicted // self.length)

    @property
    def predicted(self) -> int:
        """Tokens that have a probability: all, or all but the first."""
        return max(0, len(self.tokens) - (self.begin is None))

    @property
    def whole(self) -> int:
        """Windows of full length."""
        return self.predicted // self.length

    def window(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids that go in, and those to predict: int64, (length,) each; the last window may be shorter."""
        start = index * self.length
        if self.begin is None:
            both = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
            return both[:-1], both[1:]
        targets = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return torch.cat([torch.tensor([self.begin]), targets[:-1]]), targets

    def warn_if_fewer(self, count: int) -> None:
        """Say so if there are not as many windows as were asked for."""
        if count > len(self):
            log.warning(
                "sequences is %d, and %s has %d of %d tokens: all of them are used",
                count, self.source, len(self), self.length,
            )  # fmt: skip

    def spread(self, count: int) -> list[int]:
        """Numbers of `count` windows, evenly spread over the text; of all for 0, or where there are no more."""
        if not count or count >= len(self):
            return list(range(len(self)))
        return [i * len(self) // count for i in range(count)]

    def batches(self, indices: list[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of these windows, (up to `size`, length) each; a shorter window comes by itself."""
        full = [i for i in indices if i < self.whole]
        groups = [full[i : i + size] for i in range(0, len(full), size)]
        groups += [[i] for i in indices if i >= self.whole]
        for group in groups:
            inputs, targets = zip(*map(self.window, group), strict=True)
            yield torch.stack(inputs), torch.stack(targets)

    def draw(self, count: int, seed: int) -> list[Tensor]:
        """Up to `count` different full windows in a random order that depends on `seed` alone: int64, (length,) each.

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
        return [self.window(i)[0] for i in order.tolist()]

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the tokens, however they are cut."""
        digest = hashlib.sha256(str(self.begin).encode())
        digest.update(np.ascontiguousarray(self.tokens, np.int64).data)
        return digest.hexdigest()[:16]


def read(
    text: tuple[str, ...],
    tokenizer: Tokenizer,
    *,
    length: int,
    begin: int | None = None,
    max_bytes: int,
    held_out: bool = False,
) -> Sequences:
    """Windows of a text.

    Args:
        text: files, folders or patterns; nothing: the standard library's sources, of which the last share that
            `lowbit train` holds out is kept for evaluation.
        tokenizer: what makes the ids; length, begin: of the windows.
        max_bytes: read no more than this.
        held_out: of the standard library, take the last share, not the rest.

    Raises:
        ConfigError: no such text, or none in it.
    """
    data = DataConfig(text=text, max_bytes=max_bytes)
    found = corpus.documents(data)
    documents = _share(list(found), held_out) if not text else found
    parts = [tokenizer.encode(document) for document in corpus.capped(documents, max_bytes)]
    tokens = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    source = ", ".join(text) if text else LIBRARY
    if len(tokens) < 2:
        raise ConfigError(f"{source} has {len(tokens)} tokens; allowed: at least 2")
    return Sequences(tokens=tokens, length=length, begin=begin, source=source)


def find_tokenizer(name: str, model: str) -> tuple[Tokenizer, int | None]:
    """A tokenizer, and the id that its sequences begin with (None: with no special one).

    Args:
        name: "bytes" or a folder; empty: the folder of the model.
        model: that folder.

    Raises:
        ConfigError: no tokenizer there.
    """
    try:
        tokenizer = load_tokenizer(name or model)
    except ConfigError as error:
        wanted = f"tokenizer {name!r}" if name else f"the tokenizer of {model}"
        reason = str(error).partition("cannot be loaded: ")[2] or str(error)
        raise ConfigError(f"{wanted} cannot be loaded: {reason}") from error
    if not isinstance(tokenizer, FolderTokenizer):
        return tokenizer, None
    inside = tokenizer.hugging_face()
    begin: Any = inside.bos_token_id
    adds = begin is not None and inside("a")["input_ids"][:1] == [begin]
    return tokenizer, begin if adds else None


def _share(documents: list[bytes], held_out: bool) -> Iterator[bytes]:
    """The last share of the bytes of all documents, or what comes before it."""
    split = sum(map(len, documents))
    split -= int(split * HELD_OUT)
    for document in documents:
        inside = min(max(split, 0), len(document))
        split -= len(document)
        part = document[inside:] if held_out else document[:inside]
        if part:
            yield part
