"""Prompts and samples: text from options and files, as token ids."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit_run.config import ConfigError
from lowbit_run.generate.settings import GenerateSettings
from lowbit_run.train.answers import (
    Encoded,
    check_characters,
    check_messages,
    check_written,
    encode,
    read_record,
    read_samples,
)
from lowbit_run.train.pretrained import Tokenizer, encode_prompt, reason

_ALLOWED = "an object with prompt, or with messages"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was given, and its token ids."""

    shown: Any
    ids: list[int]


def read_prompts(settings: GenerateSettings, tokenizer: Any, *, longest: int | None) -> list[Prompt]:
    """Read the prompts of an option or a file.

    Args:
        tokenizer: Transformers'. longest: positions of the model, if they are limited.

    Raises:
        ConfigError: a file cannot be read, or a prompt is empty, invalid or too long; the message says which.
    """
    chat = bool(tokenizer.chat_template) if settings.chat is None else settings.chat
    if chat and not tokenizer.chat_template:
        raise ConfigError("chat is true, and the tokenizer has no chat template; allowed: false")
    prompts = []
    for where, value in _given(settings):
        # A sample's prompt has no template when `lowbit train` learns it.
        plain = isinstance(value, dict) and settings.chat is None
        text = value.get("prompt") if isinstance(value, dict) else value
        messages: Any = None
        if isinstance(value, dict) and "messages" in value:
            messages = value["messages"]
            check_messages(messages, where)
            if messages[-1]["role"] == "assistant":
                raise ConfigError(
                    f"{where}: the last of {len(messages)} messages is of role 'assistant'; allowed: another role, "
                    "which is answered; --score FILE compares answers"
                )
        if messages is None and not (isinstance(text, str) and text.strip()):
            raise ConfigError(f"{where} is {text!r:.60}; allowed: text that is not empty")
        check_characters(value, where)
        if messages is not None or (chat and not plain):
            record = value if messages else {"messages": [{"role": "user", "content": text}]}
            ids = _from_template(tokenizer, record, where)
        else:
            ids = encode_prompt(tokenizer, str(text))
        if longest is not None and len(ids) >= longest:
            raise ConfigError(f"{where} has {len(ids)} tokens; allowed: fewer than the model's positions, {longest}")
        if not ids:
            raise ConfigError(f"{where} has no tokens; allowed: text that the tokenizer knows")
        prompts.append(Prompt(value, ids))
    if not prompts:
        raise ConfigError(f"prompts is {settings.prompts!r}, which holds no prompts; allowed: one on each line")
    return prompts


def read_scored(settings: GenerateSettings, tokenizer: Tokenizer, *, longest: int | None) -> list[Encoded]:
    """Read the samples to score. Raises ConfigError: as `read_prompts`."""
    path = Path(settings.score)
    samples, left = read_samples([path], limit=_MOST_BYTES, tokenizer=tokenizer.hugging_face())
    if not samples or left:
        raise ConfigError(
            f"score is {settings.score!r}, with {len(samples)} samples in its first {_MOST_BYTES >> 20} MiB and "
            f"{left} bytes more; allowed: a smaller file with samples"
        )
    encoded = encode(samples, tokenizer)
    most = max(sample.places for sample in encoded)
    if longest is not None and most > longest:
        raise ConfigError(f"score has a sample of {most + 1} tokens; allowed: the model's positions, {longest}")
    return encoded


def _given(settings: GenerateSettings) -> Iterator[tuple[str, Any]]:
    """Yield each prompt with its name in errors."""
    if not settings.prompts:
        yield "prompt", settings.prompt
        return
    path = Path(settings.prompts)
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"prompts is {settings.prompts!r}: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"prompts is {settings.prompts!r}; allowed: a file of at most {_MOST_BYTES >> 20} MiB")
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        if path.suffix != ".jsonl":
            try:
                yield where, line.decode("utf-8-sig").strip("\r")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where} is not UTF-8 (byte {error.start}); allowed: text in UTF-8") from error
            continue
        record = read_record(line, where, _ALLOWED)
        if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
            raise ConfigError(f"{where} is {json.dumps(record):.60}; allowed: {_ALLOWED}")
        if "answer" in record:
            raise ConfigError(
                f"{where} has an answer, which that of the model would replace; allowed: another name, such as "
                "reference; --score FILE compares answers"
            )
        yield where, record


def _from_template(tokenizer: Any, record: dict[str, Any], where: str) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(
            record["messages"], tools=record.get("tools"), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a foreign template may raise anything
        raise ConfigError(f"{where}: the chat template refuses the messages: {reason(error)}") from error
    check_written(record, text, where)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
