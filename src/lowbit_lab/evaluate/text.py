"""Text as windows of token ids: drawn at random for a calibration, in order for perplexity."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.config import ConfigError
from lowbit.train import data as corpus
from lowbit.train.config import DataConfig
from lowbit.train.pretrained import FolderTokenizer, Tokenizer, load_tokenizer
from lowbit_lab.evaluate.settings import InferenceConfig

log = logging.getLogger(__name__)
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
        full = [i for i in indices if i < self.whole]
        groups = [full[i : i + size] for i in range(0, len(full), size)]
        groups += [[i] for i in indices if i >= self.whole]
        for group in groups:
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


def read(settings: InferenceConfig, *, held_out: bool = False, encoder: bool = False) -> tuple[Sequences, Tokenizer]:
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
    special = _special(tokenizer, encoder=encoder)
    return Sequences(tokens=tokens, length=settings.length, source=source, **special), tokenizer


def documents(settings: InferenceConfig, *, held_out: bool = False) -> Iterator[bytes]:
    """Return the documents of the settings, up to `max_bytes`."""
    data = DataConfig(text=settings.text, max_bytes=settings.max_bytes)
    texts: Iterable[bytes] = corpus.documents(data)
    return corpus.capped(texts if data.text else _share(list(texts), data.held_out_share, held_out), data.max_bytes)


def _special(tokenizer: Tokenizer, *, encoder: bool) -> dict[str, Any]:
    """Return the ids that the tokenizer puts around every text."""
    if not isinstance(tokenizer, FolderTokenizer):
        return {}
    hugging_face = tokenizer.hugging_face()
    around = hugging_face("a")["input_ids"]
    begin, end = (hugging_face.cls_token_id, hugging_face.sep_token_id) if encoder else (hugging_face.bos_token_id, 0)
    if begin is None or end is None or around[:1] != [begin]:
        return {}
    if not encoder:
        return {"begin": begin}
    return {"begin": begin, "end": end} if around[-1:] == [end] else {}


def _share(documents: list[bytes], share: float, held_out: bool) -> Iterator[bytes]:
    """Yield the last share of the bytes of all documents, or the bytes before it."""
    split = corpus.held_out_start(sum(map(len, documents)), share)
    for document in documents:
        inside = min(max(split, 0), len(document))
        split -= len(document)
        part = document[inside:] if held_out else document[:inside]
        if part:
            yield part
