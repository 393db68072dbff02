"""Samples for fine-tuning: lines of a JSONL file, and windows of their tokens, where only the answers are learned.

A line is a prompt with its answer, or a conversation. A sample of n tokens takes n - 1 places of a window: each place
is the input of one token and the target of the next.
"""

import bisect
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit.escape import one_line
from lowbit_run.config import ConfigError
from lowbit_run.train.pretrained import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Target of places whose token is not learned; `torch.nn.functional.cross_entropy` ignores it."""
BYTE_END = 0
"""Token that ends an answer with the tokenizer "bytes"."""
_ALLOWED = "an object with prompt and completion (or answer), or with messages"
_TEXT = "text that is not empty"
_TOGETHER = 1000  # samples that are encoded at once: offsets take 100 bytes for each token


class TextPart(NamedTuple):
    """A piece of a sample's text. learned: whether the model learns to write it."""

    text: str
    learned: bool


@dataclass(frozen=True)
class TextSample:
    """The parts of a sample, in order.

    Attributes:
        plain: the sample is a prompt and its answer without a template; the begin-of-text and end-of-text tokens must
            still be added.
        learns_last: only the last answer of a conversation is learned, because the template writes earlier ones
            differently once another message follows.
    """

    parts: tuple[TextPart, ...]
    plain: bool = True
    learns_last: bool = False


def read_samples(
    files: list[Path], *, limit: int, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[list[TextSample], int]:
    """Read the samples of all files up to the first line that does not fit; also return the number of bytes left out.

    Args:
        limit: most bytes to read, in whole lines. tokenizer: has the template of conversations; None: no template.

    Raises:
        ConfigError: a file cannot be read, or a line holds no valid sample; the message names file and line.
    """
    samples: list[TextSample] = []
    left_out, full = 0, False
    for path in files:
        try:
            with path.open("rb") as file:
                size, read = path.stat().st_size, 0
                for number in itertools.count(1) if not full else ():
                    text = file.readline(max(0, limit) + 2)  # enough of the line to see whether it fits
                    line = text.removesuffix(b"\n")
                    if not text:
                        break
                    if line.strip():
                        limit -= len(line) + 1
                        if full := limit < -1:
                            break
                        samples.append(_sample(line, f"{path} line {number}", tokenizer))
                    read += len(text)
                left_out += max(0, size - read) if full else 0
        except OSError as error:
            raise ConfigError(f"text file {path}: {error.strerror}") from error
    return samples, left_out


def read_record(line: bytes, where: str, allowed: str) -> Any:
    """Parse a line of JSON; a byte order mark in front, which some editors write, is skipped.

    Raises:
        ConfigError: the line is not UTF-8 or not JSON.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start}); allowed: {allowed}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); allowed: {allowed}") from error


def check_characters(value: Any, where: str) -> None:
    """Raise ConfigError if a text in a JSON value holds half a surrogate pair, which tokenizers refuse."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ConfigError(f"{where} has half an emoji or other character, {half!a}; allowed: whole ones") from error


def _sample(line: bytes, where: str, tokenizer: "PreTrainedTokenizerBase | None") -> TextSample:
    record = read_record(line, where, _ALLOWED)
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is {record!r:.60}; allowed: {_ALLOWED}")
    if (weight := record.get("weight")) not in (None, 1):
        raise ConfigError(f"{where} has the weight {weight!r:.60}; allowed: 1, or none: all samples count alike")
    if "messages" in record and not {"prompt", "completion", "answer"} & record.keys():
        return _conversation(record, where, tokenizer)
    answers = [key for key in ("completion", "answer") if key in record]
    if "prompt" not in record or "messages" in record or len(answers) != 1:
        raise ConfigError(f"{where} has the fields {one_line(', '.join(record)) or 'none'}; allowed: {_ALLOWED}")
    for key in ("prompt", *answers):
        if not isinstance(record[key], str) or not record[key].strip():
            raise ConfigError(f"{where}: {key} is {record[key]!r:.60}; allowed: {_TEXT}")
        check_characters(record[key], f"{where}: {key}")
    return TextSample((TextPart(record["prompt"], learned=False), TextPart(record[answers[0]], learned=True)))


def _conversation(record: dict[str, Any], where: str, tokenizer: "PreTrainedTokenizerBase | None") -> TextSample:
    """Render a conversation with the tokenizer's chat template; the model learns the assistant's messages."""
    messages = record["messages"]
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            f"{where} has messages, and the tokenizer has no chat template; "
            "allowed: prompt and completion, or a data.tokenizer with a chat template"
        )
    check_messages(messages, where)
    if messages[-1]["role"] != "assistant" or len(messages) == 1:
        raise ConfigError(
            f"{where}: the last of {len(messages)} messages is of role {messages[-1]['role']!r}; "
            "allowed: assistant, after at least one message of another role"
        )
    check_characters(record.get("tools"), f"{where}: tools")

    def render(count: int, *, prompt: bool = False) -> str:
        text = tokenizer.apply_chat_template(
            messages[:count], tools=record.get("tools"), tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(text, str)
        return text

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    try:
        whole = render(len(messages))
        spans = [(render(i, prompt=True), render(i + 1)) for i in answers]
    except Exception as error:  # a foreign template may raise anything
        reason = one_line(str(error)) or type(error).__name__
        raise ConfigError(f"{where}: the chat template refuses the messages: {reason}") from error
    check_written(record, whole, where)
    if spans[-1][1] != whole:  # both are the whole conversation
        raise ConfigError(
            f"{where}: the chat template writes the same messages differently each time; "
            "allowed: a template without random values"
        )
    agreed = [whole.startswith(after) and after.startswith(before) for before, after in spans]
    if not agreed[-1]:
        raise ConfigError(
            f"{where}: the chat template writes an answer differently from the prompt that asks for it; "
            "allowed: prompt and completion instead of messages"
        )
    parts: list[TextPart] = []
    done = 0
    for before, after in spans if all(agreed) else spans[-1:]:
        parts += [TextPart(whole[done : len(before)], learned=False), TextPart(after[len(before) :], learned=True)]
        done = len(after)
    return TextSample(tuple(parts), plain=False, learns_last=not all(agreed))


def check_written(record: dict[str, Any], whole: str, where: str) -> None:
    """Raise ConfigError if the template has left out a message, a tool or a call of one."""
    tools: dict[str, Any] = {"tools": record.get("tools")}
    for index, message in enumerate(record["messages"], 1):
        if message["role"] != "assistant" and message["content"].strip() not in whole:
            raise ConfigError(
                f"{where}: the chat template leaves out message {index}, of role {message['role']!r}; "
                "allowed: roles that the template knows"
            )
        tools[f"tool_calls of message {index}"] = message.get("tool_calls")
    for key, values in tools.items():
        for value in values if isinstance(values, list) else ():
            function = value.get("function", value) if isinstance(value, dict) else None
            if isinstance(function, dict) and str(name := function.get("name", "")) not in whole:
                raise ConfigError(
                    f"{where}: the chat template leaves out {key}: {name!r:.60}; "
                    "allowed: a tokenizer whose template writes them"
                )


def check_messages(messages: Any, where: str) -> None:
    """Raise ConfigError unless it is a list of messages with role and content."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is {messages!r:.60}; allowed: a list of messages")
    for index, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(f"{where}: message {index} is {message!r:.60}; allowed: an object with role and content")
        check_characters(message, f"{where}: message {index}")
        if message["role"] == "assistant" and message.get("weight", 1) != 1:
            raise ConfigError(
                f"{where}: message {index}, of the assistant, has the weight {message['weight']!r:.60}; allowed: 1, or "
                "none: the model learns every answer"
            )
        if message["role"] == "assistant" and not message["content"].strip():
            raise ConfigError(f"{where}: message {index}, of the assistant, is empty; allowed: {_TEXT}")


@dataclass(frozen=True)
class Encoded:
    """A sample's token ids, and which of them are learned.

    Attributes:
        splits: a prompt that is encoded without its answer ends in other ids.
    """

    ids: np.ndarray
    learned: np.ndarray
    splits: bool = False

    @property
    def places(self) -> int:
        """Number of places that the sample takes in a window."""
        return len(self.ids) - 1


def encode(samples: Sequence[TextSample], tokenizer: Tokenizer) -> list[Encoded]:
    """Encode samples; a plain one begins like the tokenizer's texts and ends with its end-of-text token.

    The ids are those of the whole text. A token belongs to the part in which it ends: the first token of an answer is
    learned even if it begins with the prompt's last characters.

    Raises:
        ConfigError: the tokenizer has no end-of-text token, or cannot locate its tokens in a text.
    """
    begin, end = _around([sample for sample in samples if sample.plain], tokenizer)
    encoded = []
    for sample, (tokens, token_ends, part_ends) in zip(samples, _located(samples, tokenizer), strict=True):
        ids, parts = np.array(tokens, np.uint32), np.searchsorted(part_ends, token_ends)
        last = np.full(len(sample.parts), len(ids))
        for place in np.flatnonzero(ids == end):
            last[parts[place]] = place
        # Nothing is learned after a part's last end-of-text token, where templates may add text.
        learned = np.array([part.learned for part in sample.parts])[parts] & (np.arange(len(ids)) <= last[parts])
        splits = _splits(sample, tokens, token_ends, part_ends, tokenizer)
        if sample.plain:
            ids = np.concatenate([np.array(begin, np.uint32), ids, np.array([end], np.uint32)])
            learned = np.concatenate([np.zeros(len(begin), bool), learned, [True]])
        encoded.append(Encoded(ids, learned, splits))
    return encoded


def _around(plain: Sequence[TextSample], tokenizer: Tokenizer) -> tuple[list[int], Any]:
    """Return the ids that the tokenizer puts in front of plain samples, and its end-of-text token, if it has one."""
    if isinstance(tokenizer, ByteTokenizer):
        return [], BYTE_END
    inner: Any = tokenizer.hugging_face()
    if plain and inner.eos_token_id is None:
        raise ConfigError(
            "data.tokenizer has no end-of-text token, which ends an answer; allowed: a tokenizer with one, or bytes"
        )
    if not getattr(inner, "is_fast", False):
        raise ConfigError(
            f"data.tokenizer is a {type(inner).__name__}, which cannot locate its tokens in a text, and data.format is "
            "jsonl; allowed: a folder with a tokenizer.json, or bytes"
        )
    if not plain:
        return [], inner.eos_token_id
    first = inner(plain[0].parts[0].text, return_special_tokens_mask=True, verbose=False)
    return first["input_ids"][: [*first["special_tokens_mask"], 0].index(0)], inner.eos_token_id


def _located(
    samples: Sequence[TextSample], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], Sequence[int], Sequence[int]]]:
    """Yield the ids of each sample's whole text, and where in it each token and each part ends."""
    if isinstance(tokenizer, ByteTokenizer):
        for sample in samples:
            pieces = [part.text.encode() for part in sample.parts]
            text = b"".join(pieces)
            yield list(text), range(1, len(text) + 1), list(itertools.accumulate(map(len, pieces)))
        return
    inner: Any = tokenizer.hugging_face()
    # Such an added token takes the white space after it along, but belongs where its own characters are.
    greedy = {token for token, added in inner.added_tokens_decoder.items() if added.rstrip}
    for first in range(0, len(samples), _TOGETHER):
        group = samples[first : first + _TOGETHER]
        texts = ["".join(part.text for part in sample.parts) for sample in group]
        encoded = inner(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for sample, text, ids, spans in zip(group, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            ends = [
                start + len(text[start:end].rstrip()) if token in greedy else end
                for token, (start, end) in zip(ids, spans, strict=True)
            ]
            yield ids, ends, list(itertools.accumulate(len(part.text) for part in sample.parts))


def _splits(
    sample: TextSample, ids: list[int], token_ends: Sequence[int], part_ends: Sequence[int], tokenizer: Tokenizer
) -> bool:
    """Return whether the text before an answer has other ids if it is encoded alone."""
    for start, part in zip(part_ends, sample.parts[1:], strict=False):
        before = bisect.bisect_right(token_ends, start)
        # A gap is either the beginning of a token that ends in the answer, or white space that the tokenizer drops.
        if part.learned and start > (token_ends[before - 1] if before else 0):
            text = "".join(part.text for part in sample.parts)[:start]
            assert not isinstance(tokenizer, ByteTokenizer), "no token has characters of two parts"
            if tokenizer.hugging_face()(text, add_special_tokens=False, verbose=False)["input_ids"] != ids[:before]:
                return True
    return False


class Answers:
    """Windows of samples, padded at the end; the counterpart of `lowbit_run.train.data.Windows`.

    Args:
        samples: each takes at most `sequence` places.
        packing: put several samples into a window; otherwise each has its own.
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

    Windows are in the order of their first samples, so that any part of them is a fair sample of the whole.
    """
    windows: list[list[int]] = []
    rooms: list[tuple[int, int, list[int]]] = []  # ascending: room of a window, its last turn (negative), the window
    for turn, index in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        place = bisect.bisect_left(rooms, (lengths[index],))
        if place < len(rooms):
            room, _, window = rooms.pop(place)
        else:
            room, window = size, []
            windows.append(window)
        window.append(index)
        bisect.insort(rooms, (room - lengths[index], -turn, window))
    return sorted((sorted(window) for window in windows), key=lambda window: window[0])


def fit(samples: Sequence[Encoded], sequence: int) -> tuple[list[Encoded], list[str]]:
    """Cut samples to a window's size for training; also return what was cut, in words."""
    warnings: list[str] = []
    cut = [Encoded(s.ids[: sequence + 1], s.learned[: sequence + 1]) for s in samples]
    kept = [s for s in cut if s.learned[1:].any()]
    if long := [s.places - sequence for s in samples if s.places > sequence]:
        warnings.append(
            f"{len(long)} of {len(samples)} samples are longer than data.sequence ({sequence}) and lose their ends: "
            f"{sum(long)} of {sum(len(s.ids) for s in samples)} tokens"
        )
    if gone := len(samples) - len(kept):
        warnings.append(f"{gone} of {len(samples)} samples have no answer left and are not used")
    return kept, warnings


def fit_held_out(samples: Sequence[Encoded], sequence: int) -> tuple[list[Encoded], list[str]]:
    """Drop samples that a window cannot hold from those to evaluate on; also return their number, in words."""
    kept = [s for s in samples if s.places <= sequence]
    if not (left_out := len(samples) - len(kept)):
        return kept, []
    longer = f"{left_out} of {len(samples)} held-out samples are longer than data.sequence ({sequence})"
    return kept, [f"{longer} and are not used"]
