"""Zero-shot tasks: from local files, with the prompts and scores of lm-eval, or by lm-eval itself (`lowbit[tasks]`)."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import logging
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit_lab.evaluate import loading
from lowbit_lab.evaluate.settings import FILE_TASKS, EvaluationConfig
from lowbit_run.config import ConfigError
from lowbit_run.train.answers import check_characters, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
        for group in map(
            file.metadata.row_group, range(file.metadata.num_row_groups)
        ):  # their columns may abort pyarrow
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
    answer = [False, True].index(fields["answer"] if "answer" in fields else fields["label"])
    prompt = f"{_text(fields, 'passage')}\nQuestion: {_text(fields, 'question')}?\nAnswer:"
    return Question.of(prompt, ["no", "yes"], answer)


def _piqa(fields: Mapping[str, Any]) -> Question:
    solutions = [_text(fields, key) for key in ("sol1", "sol2")]
    return Question.of(f"Question: {_text(fields, 'goal')}\nAnswer:", solutions, [0, 1].index(fields["label"]))


_READERS: dict[str, Callable[[Mapping[str, Any]], Question]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "boolq": _boolq,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "winogrande": _winogrande,
}
assert set(_READERS) == set(FILE_TASKS)


NORMALIZED = ("arc_challenge", "arc_easy", "hellaswag", "piqa")
"""Tasks that lm-eval also scores by acc_norm: log-likelihoods over the number of characters of the choice."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A score of a task.

    Attributes:
        value: the score. items: the score of each question, if `value` is their mean.
        error: the standard error of the mean, from the standard deviation of the items with n - 1; None for one item.
    """

    value: float
    error: float | None = None
    items: tuple[float, ...] = ()

    @classmethod
    def mean(cls, items: Sequence[float]) -> Metric:
        error = statistics.stdev(items) / math.sqrt(len(items)) if len(items) > 1 else None
        return cls(value=statistics.fmean(items), error=error, items=tuple(items))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Tokens of a choice: the model reads `inputs`, and predicts at their end `targets`, the tokens of the ending."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """A task from a file: its questions, and the tokens of the choices of each."""

    name: str
    questions: Sequence[Question]
    choices: Sequence[Sequence[Choice]]

    @classmethod
    def encode(cls, name: str, questions: Sequence[Question], tokenizer: Any, length: int) -> LocalTask:
        """Encode the choices as lm-eval does; texts longer than `length` tokens lose their beginning."""
        choices = []
        for number, question in enumerate(questions, 1):
            where, pairs = f"task {name} question {number}", zip(question.contexts, question.endings, strict=True)
            choices.append([_choice(tokenizer, context, ending, length, where) for context, ending in pairs])
        return cls(name=name, questions=questions, choices=choices)

    def metrics(self, log_likelihoods: Mapping[Choice, float]) -> dict[str, Metric]:
        """Return acc, and acc_norm if lm-eval reports it for this task, by "task metric"."""
        right: list[float] = []
        right_normalized: list[float] = []
        for question, choices in zip(self.questions, self.choices, strict=True):
            sums = [log_likelihoods[choice] for choice in choices]
            sizes = [len(ending) - 1 for ending in question.endings]  # without the space in front
            over = [each / size if size else -math.inf for each, size in zip(sums, sizes, strict=True)]
            # The first of the largest counts.
            right.append(float(sums.index(max(sums)) == question.answer))
            right_normalized.append(float(over.index(max(over)) == question.answer))
        metrics = {f"{self.name} acc": Metric.mean(right)}
        return metrics | ({f"{self.name} acc_norm": Metric.mean(right_normalized)} if self.name in NORMALIZED else {})


def _choice(tokenizer: Any, context: str, ending: str, length: int, where: str) -> Choice:
    """Encode a choice; spaces at the end of the context count to the ending, so that tokens are split as usual."""
    spaces = len(context) - len(context.rstrip())
    start = len(tokenizer.encode(context[: len(context) - spaces]))
    tokens = tokenizer.encode(context + ending)
    targets = tokens[start:]
    if not 0 < len(targets) <= length:
        raise ConfigError(f"{where} has a choice of {len(targets)} tokens; allowed: 1 to {length} (length)")
    return Choice(inputs=tuple(tokens[-length - 1 : -1]), targets=tuple(targets))


@torch.no_grad()
def score(
    model: Any,
    tasks: Sequence[LocalTask],
    *,
    batch: int,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> dict[str, Metric]:
    """Ask the model all questions, and return its scores by "task metric".

    Choices with the same inputs, such as BoolQ's yes and no, are read once. The longest come first, `batch` at a time.
    Log-likelihoods are computed in float32 whatever the model's dtype is.

    Args:
        model: takes token ids, int64 (batch, length), and returns an object with `logits` (batch, length, vocabulary).
        progress: called with the number of inputs done.
    """
    by_inputs: dict[tuple[int, ...], dict[Choice, None]] = {}
    for choice in (choice for task in tasks for choices in task.choices for choice in choices):
        by_inputs.setdefault(choice.inputs, {})[choice] = None
    order = sorted(by_inputs, key=lambda inputs: (-len(inputs), inputs))
    found: dict[Choice, float] = {}
    for start in range(0, len(order), batch):
        group = order[start : start + batch]
        padded = torch.zeros(len(group), len(group[0]), dtype=torch.int64)
        for row, inputs in zip(padded, group, strict=True):
            row[: len(inputs)] = torch.tensor(inputs)
        logits: Tensor = model(padded.to(device), use_cache=False).logits
        for row, inputs in zip(logits, group, strict=True):
            for choice in by_inputs[inputs]:
                targets = torch.tensor(choice.targets, device=row.device)
                last = row[len(inputs) - len(targets) : len(inputs)].float().log_softmax(-1)
                found[choice] = float(last.gather(1, targets[:, None]).sum())
        if progress is not None:
            progress(start + len(group))
    return {name: metric for task in tasks for name, metric in task.metrics(found).items()}


def count_inputs(tasks: Sequence[LocalTask]) -> int:
    """Return how many inputs the model reads for these tasks."""
    return len({choice.inputs for task in tasks for choices in task.choices for choice in choices})


def mean_score(scores: Mapping[str, float]) -> float:
    """Return the mean over the tasks of the mean of each task's metrics, from scores by "task metric"."""
    return statistics.fmean(map(statistics.fmean, _by_task(scores).values())) if scores else 0.0


def _by_task(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    by_task: dict[str, list[Any]] = {}
    for name, value in values.items():
        by_task.setdefault(name.partition(" ")[0], []).append(value)
    return by_task


def kept(metrics: Mapping[str, Metric], baseline: Mapping[str, Metric]) -> tuple[float, float | None] | None:
    """Return the mean score over that of the baseline on the same questions, and its standard error.

    The standard error is computed from pairs of scores: both models err on mostly the same questions, so it is smaller
    than the errors of the two scores suggest. By the delta method, it is the standard error of the mean of a - r b over
    the questions, divided by the baseline's score, where r is the share and a and b the scores of a question. Tasks are
    independent, the metrics of a task are not. It is None without scores of questions. Returns None if the baseline
    has no score.
    """
    exact = mean_score({name: metric.value for name, metric in baseline.items()})
    if not exact:
        return None
    share = mean_score({name: metric.value for name, metric in metrics.items()}) / exact
    if any(len(m.items) < 2 or len(m.items) != len(baseline[name].items) for name, m in metrics.items()):
        return share, None
    differences = {
        name: [a - share * b for a, b in zip(metric.items, baseline[name].items, strict=True)]
        for name, metric in metrics.items()
    }
    squares, by_task = 0.0, _by_task(differences)
    for listed in by_task.values():
        means = [statistics.fmean(each) for each in zip(*listed, strict=True)]
        squares += statistics.variance(means) / len(means)
    return share, math.sqrt(squares) / len(by_task) / exact


_DRAWS = 100  # of the bootstrap, for errors of metrics that are not means


class Tasks:
    """The tasks of the settings, read and checked before a model is loaded."""

    def __init__(self, settings: EvaluationConfig, tokenizer: Any) -> None:
        self._settings = settings
        self._questions = {
            name: read_questions(name, file, settings.limit) for name, file in settings.task_files.items()
        }
        self._loaded = load_tasks(settings)
        self._local = [
            LocalTask.encode(name, questions, tokenizer.hugging_face(), settings.length)
            for name, questions in self._questions.items()
        ]
        self._baselines: dict[int, dict[str, Metric]] = {}

    def facts(self) -> str:
        """Name all tasks, with digests of the questions instead of the paths of files."""
        digests = {name: hashlib.sha256(repr(asked).encode()).hexdigest() for name, asked in self._questions.items()}
        local = [f"{name}={digest[:16]}" for name, digest in digests.items()]
        return ", ".join([*local, *self._settings.harness_tasks])

    def score(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device, title: str
    ) -> dict[str, Metric]:
        """Ask a model, with a progress bar, and return its scores by "task metric"."""
        scored: dict[str, Metric] = {}
        if self._local:
            with loading.progress_bar(f"{title}, questions", count_inputs(self._local)) as progress:
                scored |= score(model, self._local, batch=self._settings.batch, device=device, progress=progress)
        if self._loaded:
            scored |= zero_shot(model, tokenizer, self._settings, self._loaded)
        return scored

    def row(self, scored: dict[str, Metric], tp: int, *, baseline: bool, coded: bool) -> dict[str, Any]:
        """Return fields of a row: scores with standard errors, and shares of the baseline's on equally many ranks.

        Args:
            baseline: whether these are its scores; it comes first. coded: whether anything was; else no shares.
        """
        if baseline:
            self._baselines[tp] = scored
        exact = self._baselines[tp]
        each = {name: kept({name: metric}, {name: exact[name]}) for name, metric in scored.items()}
        whole = kept(scored, exact)
        scores = {name: metric.value for name, metric in scored.items()}
        return {
            "scores": scores,
            "score": mean_score(scores),
            "scores_error": {name: metric.error for name, metric in scored.items()},
            "score_kept": {name: share[0] for name, share in each.items() if share and coded},
            "score_kept_error": {name: share[1] for name, share in each.items() if share and coded},
            "scores_kept_error": whole[1] if whole and coded else None,
        }


def load_tasks(settings: EvaluationConfig) -> dict[str, Any]:
    """Load tasks of lm-eval, also of the folder's YAML files (whose data may be local: `dataset_path: json`)."""
    tasks, folder = settings.harness_tasks, settings.task_folder
    if not tasks:
        return {}
    for needed in ("lm_eval", "accelerate"):
        importlib.import_module(needed)
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings concern options of lm-eval's command line
    manager = TaskManager(include_path=folder or None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        where = f" or {folder}" if folder else ""
        raise ConfigError(f"task is {unknown[0]!r}; allowed: a task of lm-eval{where}")
    try:
        loaded = manager.load(list(tasks))
    except (FileNotFoundError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"a task of {', '.join(tasks)} cannot be loaded: {reason}") from error
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    return loaded


def zero_shot(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EvaluationConfig, loaded: dict[str, Any]
) -> dict[str, Metric]:
    """Return lm-eval's scores of a model by "task metric"; real ranks ask the same and get the same scores."""
    from lm_eval import evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    if tokenizer.eos_token_id is None:  # lm-eval pads with it; padding is masked
        tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(0)})
    lengths = {"batch_size": settings.batch, "max_length": settings.length}
    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", **lengths)
    options = {"limit": settings.limit or None, "bootstrap_iters": _DRAWS, "log_samples": True}
    outcome: Any = evaluate(lm=lm, task_dict=loaded, **options)
    metrics: dict[str, Metric] = {}
    for task, values in outcome["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            better = outcome["higher_is_better"].get(task, {}).get(metric)
            if not isinstance(value, int | float) or not filtered or not better:
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            samples = [each for each in outcome["samples"].get(task, ()) if each.get("filter", "none") == filtered]
            items = [each.get(metric) for each in samples]
            numbers = items and all(isinstance(item, int | float) for item in items)
            suffix = "" if filtered == "none" else f" {filtered}"
            metrics[f"{task} {metric}{suffix}"] = Metric(
                value=value, error=error if isinstance(error, float) else None,
                items=tuple(map(float, items)) if numbers else (),
            )  # fmt: skip
    return metrics
