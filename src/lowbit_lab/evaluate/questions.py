"""Questions of zero-shot tasks from local files, with the prompts of lm-eval."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lowbit_lab.evaluate.settings import FILE_TASKS
from lowbit_run.config import ConfigError
from lowbit_run.train.answers import check_characters, read_record

_LINES, _PARQUET = (".jsonl", ".json"), ".parquet"
_FIELDS = {
    *("question", "choices", "answerKey", "activity_label", "ctx_a", "ctx_b", "endings", "label"),
    *("sentence", "option1", "option2", "answer", "passage", "goal", "sol1", "sol2"),
}
_MOST_BYTES = 256 << 20
"""Largest size of a file's questions, as read. A small parquet file can hold any number of equal texts."""
_LINE_BYTES = 1 << 20
_BATCH = 16  # rows of a parquet file that are read at once


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its choices.

    Attributes:
        contexts: the text before each choice. endings: the text after it, with the space in front, whose log-likelihood
            counts. WinoGrande's choices differ in their contexts, those of the other tasks in their endings.
        answer: index of the right choice.
    """

    contexts: tuple[str, ...]
    endings: tuple[str, ...]
    answer: int

    @classmethod
    def of(cls, context: str, choices: Sequence[str], answer: int) -> Question:
        endings = tuple(f" {choice}" for choice in choices)
        return cls(contexts=(context,) * len(choices), endings=endings, answer=answer)


def read_questions(name: str, file: str, limit: int = 0) -> list[Question]:
    """Read the first `limit` questions (0: all) from a file in the form of its publisher or the Hugging Face hub.

    arc_easy, arc_challenge: question (text, or an object with stem and choices), choices, answerKey. hellaswag:
    activity_label, ctx_a, ctx_b, endings, label. winogrande: sentence, option1, option2, answer. boolq: passage,
    question, and label or answer. piqa: goal, sol1, sol2, label. Other fields are not read.

    Args:
        name: one of `FILE_TASKS`. file: JSON lines (.jsonl, .json) or parquet.
    """
    task, path = f"task {name}={file}", Path(file)
    if path.suffix not in (*_LINES, _PARQUET):
        raise ConfigError(f"{task}: {path.suffix or path.name!r} cannot be read; allowed: .jsonl, .json or .parquet")
    read = _rows if path.suffix == _PARQUET else _lines
    questions = []
    try:
        if path.suffix in _LINES and not limit:
            _check_bytes(task, path.stat().st_size)  # now, not after minutes
        for where, fields in itertools.islice(read(task, path), limit or None):
            try:
                questions.append(_READERS[name](fields))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                reason = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigError(
                    f"{where} is not a valid question of {name} ({reason}); allowed: the form of its publisher or the "
                    "Hugging Face hub, with the answer, which test splits lack"
                ) from error
    except OSError as error:
        raise ConfigError(f"{task} cannot be read: {error.strerror or error}; allowed: a local file") from error
    if not questions:
        raise ConfigError(f"{task} has no questions; allowed: at least one")
    return questions


def _lines(task: str, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    nbytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _LINE_BYTES + 1), b""), 1):
            nbytes += len(line)
            if line.strip():
                where = f"{task} line {number}"
                if len(line) > _LINE_BYTES:
                    raise ConfigError(f"{where} has more than {_LINE_BYTES} bytes; allowed: a question on each line")
                _check_bytes(task, nbytes)
                fields = read_record(line, where, "an object on each line")
                for key, value in fields.items() if isinstance(fields, dict) else ():
                    check_characters(value, f"{where}: {key}")
                yield where, fields


def _rows(task: str, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    arrow = importlib.import_module("pyarrow")
    try:
        for number, fields in enumerate(itertools.chain.from_iterable(_batches(task, path)), 1):
            yield f"{task} row {number}", fields
    except ConfigError:
        raise
    except (arrow.ArrowException, ValueError, OverflowError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{task} is not parquet ({reason}); allowed: a parquet file") from error


def _batches(task: str, path: Path) -> Iterator[list[dict[str, Any]]]:
    """Read a parquet file a few rows at a time, after a look at the sizes that it states."""
    with path.open("rb") as opened:
        file = importlib.import_module("pyarrow.parquet").ParquetFile(opened)
        names = sorted(_FIELDS.intersection(file.schema_arrow.names))
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):  # columns may abort pyarrow
            if group.total_byte_size > _MOST_BYTES:
                raise ConfigError(
                    f"{task} has {group.total_byte_size} bytes in a group of rows; allowed: at most {_MOST_BYTES}"
                )
        nbytes = 0
        for batch in file.iter_batches(batch_size=_BATCH, columns=names, use_threads=False):
            nbytes += batch.nbytes
            _check_bytes(task, nbytes)
            yield batch.to_pylist()


def _check_bytes(task: str, nbytes: int) -> None:
    if nbytes > _MOST_BYTES:
        raise ConfigError(f"{task} has more than {_MOST_BYTES} bytes of questions; allowed: up to that, or a limit")


def _texts(values: Any, least: int, most: int) -> list[str]:
    if not isinstance(values, list) or not least <= len(values) <= most:
        raise ValueError(f"{values!r:.60} instead of {least if least == most else f'{least} to {most}'} texts")
    if wrong := [each for each in values if not isinstance(each, str) or not each.strip()]:
        raise ValueError(f"{wrong[0]!r:.60} instead of a text that is not empty")
    return values


def _text(fields: Mapping[str, Any], key: str) -> str:
    return _texts([fields[key]], 1, 1)[0]


def _arc(fields: Mapping[str, Any]) -> Question:
    """Read both forms: the hub's, with lists of texts and labels, and the publisher's, with choices in the question."""
    if isinstance(question := fields["question"], dict):
        stem, texts = _text(question, "stem"), [choice["text"] for choice in question["choices"]]
        labels = [choice["label"] for choice in question["choices"]]
    else:
        stem, texts, labels = _text(fields, "question"), fields["choices"]["text"], fields["choices"]["label"]
    texts = _texts(texts, 3, 5)
    labels = _texts(labels, len(texts), len(texts))
    return Question.of(f"Question: {stem}\nAnswer:", texts, labels.index(fields["answerKey"]))


def _hellaswag(fields: Mapping[str, Any]) -> Question:
    context = _text(fields, "activity_label") + ": " + fields["ctx_a"] + " " + fields["ctx_b"].capitalize()
    answer = ["0", "1", "2", "3"].index(str(fields["label"]))
    return Question.of(
        _without_brackets(context), list(map(_without_brackets, _texts(fields["endings"], 4, 4))), answer
    )


def _without_brackets(text: str) -> str:
    """Remove WikiHow's remarks in brackets."""
    # Search for the closing bracket once: a search from every unclosed bracket would take quadratic time.
    return re.sub(r"\[.*?\]|(\[.*)", r"\1", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _winogrande(fields: Mapping[str, Any]) -> Question:
    before, gap, after = _text(fields, "sentence").partition("_")
    if not gap or not after.strip():
        raise ValueError("the sentence has no _ with words behind it")
    answer = ["1", "2"].index(fields["answer"])
    contexts = tuple(before + _text(fields, key) for key in ("option1", "option2"))
    return Question(contexts=contexts, endings=(f" {after.strip()}",) * 2, answer=answer)


def _boolq(fields: Mapping[str, Any]) -> Question:
    """Read both forms: the publisher's, with an answer, and SuperGLUE's, with a label."""
    prompt = f"{_text(fields, 'passage')}\nQuestion: {_text(fields, 'question')}?\nAnswer:"
    answer = [False, True].index(fields["answer"] if "answer" in fields else fields["label"])
    return Question.of(prompt, ["no", "yes"], answer)


def _piqa(fields: Mapping[str, Any]) -> Question:
    solutions = [_text(fields, key) for key in ("sol1", "sol2")]
    return Question.of(f"Question: {_text(fields, 'goal')}\nAnswer:", solutions, ["0", "1"].index(str(fields["label"])))


_READERS: dict[str, Callable[[Mapping[str, Any]], Question]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "boolq": _boolq,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "winogrande": _winogrande,
}
assert set(_READERS) == set(FILE_TASKS)
