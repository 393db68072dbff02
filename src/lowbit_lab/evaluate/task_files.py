"""Questions of zero-shot tasks from local files, each task in its own format, with the prompts of lm-eval."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.config import ConfigError
from lowbit_lab.evaluate.settings import FILE_TASKS

_LINES, _PARQUET = (".jsonl", ".json"), ".parquet"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its choices.

    Attributes:
        contexts: the text before each choice. endings: what follows it, with the space in front; its log-likelihood is
            the choice's. WinoGrande's choices differ in their contexts, those of the other tasks in their endings.
        answer: index of the right choice.
    """

    contexts: tuple[str, ...]
    endings: tuple[str, ...]
    answer: int


def read_questions(name: str, file: str, limit: int = 0) -> list[Question]:
    """Read the first `limit` questions (0: all) from a file as its publisher or the Hugging Face hub ships it.

    arc_easy, arc_challenge: question (text, or an object with stem and choices), choices, answerKey. hellaswag:
    activity_label, ctx_a, ctx_b, endings, label. winogrande: sentence, option1, option2, answer. boolq: passage,
    question, and label or answer. Other fields are not read.

    Args:
        name: one of `FILE_TASKS`. file: JSON lines (.jsonl, .json) or parquet.

    Raises:
        ConfigError: no such file, none of its questions, or one that is not in the task's format; it names the line.
        ModuleNotFoundError: parquet without pyarrow, which comes with datasets.
    """
    task = f"task {name}={file}"
    records = itertools.islice(_records(task, Path(file)), limit or None)
    questions = [_READERS[name](record) for record in records]
    if not questions:
        raise ConfigError(f"{task} has no questions; allowed: at least one")
    return questions


def fingerprint(questions: list[Question]) -> str:
    """Return 16 hexadecimal digits of the questions."""
    return hashlib.sha256(repr(questions).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Record:
    """Fields of a question, and where it is."""

    where: str
    fields: Mapping[str, Any]

    def get(self, key: str) -> Any:
        if key not in self.fields:
            raise ConfigError(f"{self.where} has no {key}; it has {', '.join(self.fields) or 'nothing'}")
        return self.fields[key]

    def text(self, key: str, *, empty: bool = False) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not (empty or value.strip()):
            self.refuse(key, value, "text" if empty else "text that is not empty")
        return value

    def texts(self, key: str, least: int, most: int) -> list[str]:
        value = self.get(key)
        allowed = f"{least} texts" if least == most else f"{least} to {most} texts"
        if not isinstance(value, list) or not least <= len(value) <= most:
            self.refuse(key, value, allowed)
        for each in value:
            if not isinstance(each, str) or not each.strip():
                self.refuse(key, each, f"{allowed} that are not empty")
        return value

    def one_of(self, key: str, choices: Sequence[Sequence[Any]], allowed: str) -> int:
        """Return the index of the choice that has this value among its spellings; 1 and True are not alike."""
        value = self.get(key)
        for index, spellings in enumerate(choices):
            if any(type(value) is type(each) and value == each for each in spellings):
                return index
        return self.refuse(key, value, allowed)

    def part(self, key: str) -> _Record:
        value = self.get(key)
        if not isinstance(value, dict):
            self.refuse(key, value, "an object")
        return _Record(f"{self.where}: {key}", value)

    def refuse(self, key: str, value: Any, allowed: str) -> Any:
        shown = f"a list of {len(value)}" if isinstance(value, list) else _short(value)
        raise ConfigError(f"{self.where}: {key} is {shown}; allowed: {allowed}")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _records(task: str, path: Path) -> Iterator[_Record]:
    if path.suffix not in (*_LINES, _PARQUET):
        raise ConfigError(f"{task}: {path.suffix or path.name!r} is not read; allowed: .jsonl, .json or .parquet")
    try:
        if path.suffix == _PARQUET:
            yield from _rows(task, path)
        else:
            yield from _lines(task, path)
    except OSError as error:
        raise ConfigError(f"{task} cannot be read: {error.strerror or error}; allowed: a local file") from error


def _lines(task: str, path: Path) -> Iterator[_Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{task} line {number}"
            try:
                fields = json.loads(line.decode("utf-8"))
                json.dumps(fields, ensure_ascii=False).encode()  # tokenizers refuse half a surrogate pair
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is not JSON ({error}); allowed: an object on each line") from error
            if not isinstance(fields, dict):
                raise ConfigError(f"{where} is {_short(fields)}; allowed: an object on each line")
            yield _Record(where, fields)


def _rows(task: str, path: Path) -> Iterator[_Record]:
    with path.open("rb") as file:
        parquet = importlib.import_module("pyarrow.parquet")
        try:
            rows = parquet.read_table(file).to_pylist()
        except (ValueError, OSError) as error:  # pyarrow's errors are both
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{task} is not parquet ({reason}); allowed: a parquet file") from error
    for number, fields in enumerate(rows, 1):
        yield _Record(f"{task} row {number}", fields)


def _arc(record: _Record) -> Question:
    """Both forms: the hub's, with lists of texts and labels, and the publisher's, with the choices in the question."""
    if isinstance(record.fields.get("question"), dict):
        question = record.part("question")
        stem, given = question.text("stem"), question.get("choices")
        listed = given if isinstance(given, list) and all(isinstance(each, dict) for each in given) else None
        if listed is None:
            question.refuse("choices", given, "a list of objects with text and label")
        choices = _Record(question.where, {key: [each.get(key) for each in listed or ()] for key in ("text", "label")})
    else:
        stem, choices = record.text("question"), record.part("choices")
    texts = choices.texts("text", 3, 5)
    labels = choices.texts("label", len(texts), len(texts))
    answer = record.one_of("answerKey", [[label] for label in labels], f"one of {', '.join(labels)}")
    return _endings(f"Question: {stem}\nAnswer:", texts, answer)


def _hellaswag(record: _Record) -> Question:
    context = f"{record.text('ctx_a', empty=True)} {record.text('ctx_b', empty=True).capitalize()}"
    endings = record.texts("endings", 4, 4)
    answer = record.one_of("label", [(str(i), i) for i in range(4)], "0 to 3 (the test split has no answers)")
    query = _without_brackets(f"{record.text('activity_label')}: {context}")
    return _endings(query, list(map(_without_brackets, endings)), answer)


def _without_brackets(text: str) -> str:
    """Remove what WikiHow leaves in brackets."""
    # A bracket that nothing closes takes the rest of its line: search it once, not from each such bracket.
    return re.sub(r"\[.*?\]|(\[.*)", r"\1", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _winogrande(record: _Record) -> Question:
    sentence = record.text("sentence")
    before, gap, after = sentence.partition("_")
    if not gap or not after.strip():
        record.refuse("sentence", sentence, "text with _ for the missing words, and with words behind it")
    options = [record.text(key) for key in ("option1", "option2")]
    answer = record.one_of("answer", ["1", "2"], "'1' or '2' (the test split has no answers)")
    contexts = tuple(before + option for option in options)
    return Question(contexts=contexts, endings=(f" {after.strip()}",) * 2, answer=answer)


def _boolq(record: _Record) -> Question:
    """The publisher's files have an answer, those of SuperGLUE a label."""
    key = "answer" if "answer" in record.fields else "label"
    answer = record.one_of(key, [(False, 0), (True, 1)], "true or false, 1 or 0 (the test split has no answers)")
    prompt = f"{record.text('passage')}\nQuestion: {record.text('question')}?\nAnswer:"
    return _endings(prompt, ["no", "yes"], answer)


def _endings(context: str, choices: list[str], answer: int) -> Question:
    """Return a question whose choices follow the same text, after a space."""
    endings = tuple(f" {choice}" for choice in choices)
    return Question(contexts=(context,) * len(choices), endings=endings, answer=answer)


_READERS: dict[str, Callable[[_Record], Question]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "boolq": _boolq,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
}
assert set(_READERS) == set(FILE_TASKS)
