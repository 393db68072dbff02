"""Read samples for fine-tuning, one per line of a JSONL file: prompts with answers, or conversations."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALLOWED = "an object with prompt and completion (or answer), or with messages"
_ANSWERS = ("completion", "answer")


@dataclass(frozen=True)
class TextPart:
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
    files: list[Path], *, limit: int, tokenizer: PreTrainedTokenizerBase | None
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


def _sample(line: bytes, where: str, tokenizer: PreTrainedTokenizerBase | None) -> TextSample:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start}); allowed: {ALLOWED}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); allowed: {ALLOWED}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is {_kind(record)}; allowed: {ALLOWED}")
    if "messages" in record and "prompt" not in record:
        return _conversation(record, where, tokenizer)
    answers = [key for key in _ANSWERS if key in record]
    if "prompt" not in record or "messages" in record or len(answers) != 1:
        raise ConfigError(f"{where} has the fields {', '.join(record) or 'none'}; allowed: {ALLOWED}")
    for key in ("prompt", *answers):
        if not isinstance(record[key], str) or not record[key].strip():
            raise ConfigError(f"{where}: {key} is {_kind(record[key])}; allowed: text that is not empty")
    return TextSample((TextPart(record["prompt"], learned=False), TextPart(record[answers[0]], learned=True)))


def _conversation(record: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase | None) -> TextSample:
    """Render a conversation with the tokenizer's chat template; the model learns the assistant's messages."""
    messages = record["messages"]
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            f"{where} has messages, and the tokenizer has no chat template; "
            "allowed: prompt and completion, or a data.tokenizer with a chat template"
        )
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is {_kind(messages)}; allowed: a list of messages")
    for index, message in enumerate(messages, 1):
        has_role = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not has_role or not isinstance(message.get("content"), str):
            raise ConfigError(f"{where}: message {index} is {_kind(message)}; allowed: an object with role and content")
        if message["role"] == "assistant" and not message["content"].strip():
            raise ConfigError(f"{where}: message {index}, of the assistant, is empty; allowed: text that is not empty")
    if messages[-1]["role"] != "assistant" or len(messages) == 1:
        raise ConfigError(
            f"{where}: the last of {len(messages)} messages is of role {messages[-1]['role']!r}; "
            "allowed: assistant, after at least one message of another role"
        )
    return _rendered(messages, record.get("tools"), where, tokenizer)


def _rendered(messages: list[dict[str, Any]], tools: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> TextSample:
    from jinja2 import TemplateError

    def render(count: int, *, prompt: bool = False) -> str:
        text = tokenizer.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
        )  # fmt: skip
        assert isinstance(text, str)
        return text

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    try:
        whole = render(len(messages))
        spans = [(render(i, prompt=True), render(i + 1)) for i in answers]
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{where}: the chat template refuses the messages: {reason}") from error
    for index, message in enumerate(messages, 1):
        if message["role"] != "assistant" and message["content"].strip() not in whole:
            raise ConfigError(
                f"{where}: the chat template leaves out message {index}, of role {message['role']!r}; "
                "allowed: roles that the template knows"
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


def _kind(value: Any) -> str:
    """Describe a JSON value in a few words."""
    if isinstance(value, str):
        return "text that is empty" if not value.strip() else "text"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {dict: "an object", list: "a list", int: "a number", float: "a number"}
    return kinds[type(value)] + (" that is empty" if value in ({}, []) else "")
