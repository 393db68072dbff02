"""Windows of samples: token ids of prompts and answers, where only the answers are learned.

A sample of n tokens takes n - 1 places of a window: each place is the input of one token and the target of the next.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.config import ConfigError
from lowbit.train.samples import TextPart, TextSample
from lowbit.train.tokenizer import ByteTokenizer, Tokenizer

IGNORED = -100
"""Target of places whose token is not learned; `torch.nn.functional.cross_entropy` ignores it."""
BYTE_END = 0
"""Token that ends an answer with the tokenizer "bytes"."""


@dataclass(frozen=True)
class Encoded:
    """A sample's token ids, and which of them are learned."""

    ids: np.ndarray
    learned: np.ndarray

    @property
    def places(self) -> int:
        """Number of places that the sample takes in a window."""
        return len(self.ids) - 1


def encode(samples: Sequence[TextSample], tokenizer: Tokenizer) -> list[Encoded]:
    """Encode samples; a plain one ends with the tokenizer's end-of-text token.

    Parts are encoded one by one, because at inference the prompt is encoded without its answer.

    Raises:
        ConfigError: the tokenizer has no end-of-text token.
    """
    if isinstance(tokenizer, ByteTokenizer):
        end = BYTE_END
        ids = [[tokenizer.encode(part.text.encode()) for part in sample.parts] for sample in samples]
    else:
        inner = tokenizer.hugging_face()
        end: Any = inner.eos_token_id
        if end is None and any(sample.plain for sample in samples):
            raise ConfigError(
                "data.tokenizer has no end-of-text token, which ends an answer; allowed: a tokenizer with one, or bytes"
            )
        flat = [(part, sample.plain and not number) for sample in samples for number, part in enumerate(sample.parts)]
        encoded = iter(_encode_parts(flat, inner))
        ids = [[next(encoded) for _ in sample.parts] for sample in samples]
    samples_encoded = []
    for sample, parts in zip(samples, ids, strict=True):
        learned = [_learned(each, part, end) for each, part in zip(parts, sample.parts, strict=True)]
        if sample.plain:
            parts.append(np.array([end]))
            learned.append(np.array([True]))
        samples_encoded.append(Encoded(np.concatenate(parts).astype(np.uint32), np.concatenate(learned)))
    return samples_encoded


def _learned(ids: np.ndarray, part: TextPart, end: int | None) -> np.ndarray:
    """Mark the learned tokens of a part: none after the last end-of-text token, where templates may add text."""
    learned = np.full(len(ids), part.learned)
    ends = np.flatnonzero(ids == end)
    if len(ends):
        learned[ends[-1] + 1 :] = False
    return learned


def _encode_parts(parts: list[tuple[TextPart, bool]], tokenizer: Any) -> list[np.ndarray]:
    """Encode parts; those marked True begin with the begin-of-text token, if the tokenizer writes one."""
    texts, begin = [part.text for part, _ in parts], tokenizer.bos_token_id
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    begins = begin is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [begin]
    return [np.array([begin, *each] if first and begins else each) for each, (_, first) in zip(ids, parts, strict=True)]


class Answers:
    """Windows of samples, padded at the end; the counterpart of `lowbit.train.data.Windows`.

    Args:
        samples: each takes at most `sequence` places. sequence: places of a window.
        packing: put several samples into a window; otherwise each has its own.

    Attributes:
        samples: number of samples. packed: whether windows hold several.
    """

    def __init__(self, samples: Sequence[Encoded], sequence: int, *, packing: bool) -> None:
        self.sequence, self.samples, self.packed = sequence, len(samples), packing
        windows = pack([s.places for s in samples], sequence) if packing else [[i] for i in range(len(samples))]
        shape = (len(windows), sequence)
        self._inputs, self._targets = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
        self._positions = np.zeros(shape, np.int32)
        self.used = sum(s.places for s in samples)
        for row, members in enumerate(windows):
            start = 0
            for sample in (samples[i] for i in members):
                place = slice(start, start + sample.places)
                self._inputs[row, place] = sample.ids[:-1]
                self._targets[row, place] = np.where(sample.learned[1:], sample.ids[1:].astype(np.int64), IGNORED)
                self._positions[row, place] = np.arange(sample.places)
                start += sample.places
            self._positions[row, start:] = np.arange(sequence - start)
        self.learns = int((self._targets != IGNORED).sum())

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows: int64, (len(ids), sequence) each; `IGNORED` means no target."""
        inputs, targets = (torch.from_numpy(a[ids.numpy()].astype(np.int64)) for a in (self._inputs, self._targets))
        return inputs, targets

    def positions(self, ids: Tensor) -> Tensor | None:
        """Place of each token in its sample, int64 (len(ids), sequence); None: each window is one sample."""
        return torch.from_numpy(self._positions[ids.numpy()].astype(np.int64)) if self.packed else None

    def learned(self, ids: Tensor) -> int | None:
        """Number of tokens of these windows that the model learns."""
        return int((self._targets[ids.numpy()] != IGNORED).sum())

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Everything that training depends on."""
        return self._inputs, self._targets, self._positions

    def described(self) -> str:
        """Describe the number of samples and windows, and how full they are."""
        windows = max(1, len(self))
        return (
            f"{self.samples:,} samples in {len(self):,} windows of {self.sequence} tokens, "
            f"{self.used / windows:.0f} tokens a window, {self.learns / windows:.0f} of them learned"
        )


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack samples into windows, longest first, each into the fullest window that has room; return their indices.

    Args:
        lengths: of the samples, at most `size` each.

    Returns:
        Windows in the order of their first samples, so that any part of them is a fair sample of the whole.
    """
    open_by_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # the keys of `open_by_room`, ascending
    windows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(rooms, lengths[index])
        if place < len(rooms):
            room = rooms[place]
            window = open_by_room[room].pop()
            if not open_by_room[room]:
                del open_by_room[room], rooms[place]
        else:
            room, window = size, []
            windows.append(window)
        window.append(index)
        left = room - lengths[index]
        if left not in open_by_room:
            open_by_room[left] = []
            bisect.insort(rooms, left)
        open_by_room[left].append(window)
    return sorted((sorted(window) for window in windows), key=lambda window: window[0])


def fit(samples: Sequence[Encoded], sequence: int) -> tuple[list[Encoded], list[str]]:
    """Cut samples to a window's size for training; also return what was cut, in words."""
    warnings: list[str] = []
    long = [s for s in samples if s.places > sequence]
    cut = [Encoded(s.ids[: sequence + 1], s.learned[: sequence + 1]) for s in samples]
    kept = [s for s in cut if s.learned[1:].any()]
    lost, total = sum(s.places - sequence for s in long), sum(len(s.ids) for s in samples)
    if long:
        warnings.append(
            f"{len(long)} of {len(samples)} samples are longer than data.sequence ({sequence}) and lose their ends: "
            f"{lost} of {total} tokens"
        )
    if gone := len(samples) - len(kept):
        warnings.append(f"{gone} of {len(samples)} samples have no answer left and are not used")
    return kept, warnings


def fit_held_out(samples: Sequence[Encoded], sequence: int) -> tuple[list[Encoded], list[str]]:
    """Drop samples that a window cannot hold from those to evaluate on; also return their number, in words."""
    warnings: list[str] = []
    kept = [s for s in samples if s.places <= sequence]
    if left_out := len(samples) - len(kept):
        warnings.append(
            f"{left_out} of {len(samples)} held-out samples are longer than data.sequence ({sequence}) and are not used"
        )
    return kept, warnings
