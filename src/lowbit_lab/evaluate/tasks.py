"""Zero-shot tasks: from local files, with the prompts and scores of lm-eval, or by lm-eval itself (`lowbit[tasks]`)."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit_lab.evaluate import loading
from lowbit_lab.evaluate.questions import Question, read_questions
from lowbit_lab.evaluate.settings import EvaluationConfig
from lowbit_run.config import ConfigError
from lowbit_run.job.process_group import world
from lowbit_run.train.pretrained import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NORMALIZED = ("arc_challenge", "arc_easy", "hellaswag", "piqa")
"""Tasks that lm-eval also scores by acc_norm: log-likelihoods over the number of characters of the choice."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A score of a task.

    Attributes:
        value: the score. items: the score of each question, if `value` is their mean.
        error: the standard error of the mean, from the standard deviation of the items with n - 1; None for one
            item, or if one is NaN.
    """

    value: float
    error: float | None = None
    items: tuple[float, ...] = ()

    @classmethod
    def mean(cls, items: Sequence[float]) -> Metric:
        finite = len(items) > 1 and all(map(math.isfinite, items))
        error = statistics.stdev(items) / math.sqrt(len(items)) if finite else None
        return cls(value=statistics.fmean(items), error=error, items=tuple(items))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Tokens of a choice: the model reads `inputs`, and predicts at their end `targets`, the tokens of the ending.

    Attributes:
        cut: the text was too long, and `inputs` lacks its beginning.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    cut: bool = False


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

    @property
    def chance(self) -> float:
        """Expected accuracy of random answers."""
        return statistics.fmean(1 / len(choices) for choices in self.choices)

    @property
    def cut(self) -> int:
        """Number of questions that lack the beginning of their text."""
        return sum(any(choice.cut for choice in choices) for choices in self.choices)

    def values(self, log_likelihoods: Mapping[Choice, float]) -> list[list[float]]:
        """Return the log-likelihoods of each question's choices."""
        return [[log_likelihoods[choice] for choice in choices] for choices in self.choices]

    def metrics(self, values: Sequence[Sequence[float]]) -> dict[str, Metric]:
        """Return acc, and acc_norm if lm-eval reports it for this task, by "task metric", from log-likelihoods."""
        right: list[float] = []
        right_normalized: list[float] = []
        for question, sums in zip(self.questions, values, strict=True):
            sizes = [len(ending) - 1 for ending in question.endings]  # without the space in front
            over = [each / size if size else -math.inf for each, size in zip(sums, sizes, strict=True)]
            answered = all(map(math.isfinite, sums))  # broken logits answer nothing
            right.append(float(answered and _chosen(sums) == question.answer))
            right_normalized.append(float(answered and _chosen(over) == question.answer))
        metrics = {f"{self.name} acc": Metric.mean(right)}
        return metrics | ({f"{self.name} acc_norm": Metric.mean(right_normalized)} if self.name in NORMALIZED else {})


def _chosen(values: Sequence[float]) -> int:
    return values.index(max(values))  # the first of the largest


def _choice(tokenizer: Any, context: str, ending: str, length: int, where: str) -> Choice:
    """Encode a choice; spaces at the end of the context count to the ending, so that tokens are split as usual."""
    spaces = len(context) - len(context.rstrip())
    start = len(encode_prompt(tokenizer, context[: len(context) - spaces]))  # without what some put behind a text
    tokens = encode_prompt(tokenizer, context + ending)
    targets = tokens[start:]
    if not 0 < len(targets) <= length:
        raise ConfigError(f"{where} has a choice of {len(targets)} tokens; allowed: 1 to {length} (length)")
    return Choice(inputs=tuple(tokens[-length - 1 : -1]), targets=tuple(targets), cut=len(tokens) > length + 1)


def differences(exact: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> dict[str, Metric]:
    """Compare the log-likelihoods of the choices of questions with exact ones.

    Returns:
        `same_answers` (share of questions whose likeliest choice is the same, if all are finite), `divergence`
        (Kullback-Leibler divergence from the exact softmax over a question's log-likelihoods, in nats) and `change`
        (mean over a question's choices of the absolute difference, in nats).
    """
    items: dict[str, list[float]] = {"same_answers": [], "divergence": [], "change": []}
    for p, q in zip(exact, other, strict=True):
        log_p, log_q = (torch.tensor(values, dtype=torch.float64).log_softmax(0) for values in (p, q))
        answers = all(map(math.isfinite, (*p, *q)))  # broken logits answer nothing
        items["same_answers"].append(float(answers and _chosen(p) == _chosen(q)))
        items["divergence"].append(float((log_p.exp() * (log_p - log_q)).sum()))
        items["change"].append(statistics.fmean(abs(a - b) for a, b in zip(p, q, strict=True)))
    return {name: Metric.mean(values) for name, values in items.items()}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Texts that are read at once: their common beginning, and the rest of each with the choices that end it."""

    prefix: tuple[int, ...]
    rests: Mapping[tuple[int, ...], Sequence[Choice]]

    @classmethod
    def of(cls, choices: Sequence[Choice], *, share: bool) -> list[_Row]:
        """Return a row for the choices of a question, or one for each input if these do not begin alike."""
        by_inputs: dict[tuple[int, ...], list[Choice]] = {}
        for choice in choices:
            by_inputs.setdefault(choice.inputs, []).append(choice)
        if not share:
            return [cls(prefix=(), rests={inputs: listed}) for inputs, listed in by_inputs.items()]
        same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*by_inputs, strict=False))
        if prefix := tuple(column[0] for column in same):
            return [cls(prefix=prefix, rests={i[len(prefix) :]: listed for i, listed in by_inputs.items()})]
        return [cls(prefix=inputs, rests={(): listed}) for inputs, listed in by_inputs.items()]

    @property
    def size(self) -> int:
        return len(self.prefix) + sum(map(len, self.rests))


class _Batch:
    """Rows as tensors. Prefixes end in the same column, so that what is predicted lies close together.

    Attributes:
        tokens, positions: int64 (rows, columns). owner: 0 for a prefix, 1, 2, ... for the rests, -1 for padding.
        places: row and columns of the predictions of each choice.
    """

    def __init__(self, rows: Sequence[_Row]) -> None:
        start = max(len(row.prefix) for row in rows)
        width = start + max(row.size - len(row.prefix) for row in rows)
        self.tokens, self.positions = torch.zeros(2, len(rows), width, dtype=torch.int64)
        self.owner = torch.full((len(rows), width), -1)
        self.places: list[tuple[int, Choice, list[int]]] = []
        for i, row in enumerate(rows):
            before = range(start - len(row.prefix), start)
            self._put(i, before, row.prefix, 0, owner=0)
            column = start
            for owner, (rest, choices) in enumerate(row.rests.items(), 1):
                columns = range(column, column := column + len(rest))
                self._put(i, columns, rest, len(row.prefix), owner=owner)
                for choice in choices:
                    self.places.append((i, choice, [*before, *columns][-len(choice.targets) :]))

    def _put(self, row: int, columns: range, tokens: tuple[int, ...], position: int, *, owner: int) -> None:
        where = slice(columns.start, columns.stop)
        self.tokens[row, where] = torch.tensor(tokens, dtype=torch.int64)
        self.positions[row, where] = torch.arange(position, position + len(tokens))
        self.owner[row, where] = owner

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return what is added to the logits of attention, (rows, 1, columns, columns): a rest sees its prefix only."""
        read, reader = self.owner[:, None], self.owner[:, :, None]
        seen = ((read == reader) | (read == 0)).tril()
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


@torch.no_grad()
def log_likelihoods(
    model: Any,
    questions: Iterable[Sequence[Choice]],
    *,
    tokens: int,
    share: bool,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> dict[Choice, float]:
    """Ask a model, and return the log-likelihoods of the endings of all choices, in nats.

    Logits are computed where an ending is predicted, and log-likelihoods from these in float32 whatever the model's
    dtype is.

    Args:
        model: of Transformers, a causal language model.
        questions: the choices of each.
        tokens: most tokens to read at a time, with padding, unless a single row has more.
        share: read what the choices of a question have in common once, if `shares_contexts(model)`.
        progress: called with the number of choices done.
    """
    rows = [row for choices in questions for row in _Row.of(choices, share=share)]
    rows.sort(key=lambda row: (-row.size, row.prefix))
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    found: dict[Choice, float] = {}
    done = 0
    while rows:
        most = 1
        while most < len(rows) and _padded(rows[: most + 1]) <= tokens:
            most += 1
        batch, rows = _Batch(rows[:most]), rows[most:]
        columns = sorted({column for _, _, listed in batch.places for column in listed})
        options: dict[str, Any] = {"logits_to_keep": torch.tensor(columns, device=device)} if selects else {}
        if share:
            options["attention_mask"] = batch.mask(model.dtype).to(device)
            options["position_ids"] = batch.positions.to(device)
        logits: Tensor = model(batch.tokens.to(device), use_cache=False, **options).logits
        index = {column: i for i, column in enumerate(columns if selects else range(logits.shape[1]))}
        for row, choice, listed in batch.places:
            last = logits[row, [index[column] for column in listed]].float().log_softmax(-1)
            targets = torch.tensor(choice.targets, device=last.device)
            found[choice] = float(last.gather(1, targets[:, None]).sum())
        done += len(batch.places)
        if progress is not None:
            progress(done)
    return found


def _padded(rows: Sequence[_Row]) -> int:
    """Return how many tokens a batch of rows has, with padding."""
    before = max(len(row.prefix) for row in rows)
    return len(rows) * (before + max(row.size - len(row.prefix) for row in rows))


_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def shares_contexts(model: Any, length: int, device: torch.device | str = "cpu") -> bool:
    """Return whether a model computes the same if the choices of a question share one reading of their context.

    It does if positions and masks of attention are all that relates tokens to each other. Models with recurrent or
    convolutional layers, or with ALiBi, do not. Windows of attention must hold a text of `length` tokens. What the
    config does not state is tried on a few tokens.
    """
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    accepted = inspect.signature(model.forward).parameters
    if (
        any(window is not None and window < length for window in windows)
        or not {"attention_mask", "position_ids"} <= {*accepted}
        or not {*(getattr(config, "layer_types", None) or ())} <= _ATTENTION
        or getattr(model, "_is_stateful", False)  # as Transformers marks models with recurrent layers
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(config.vocab_size, (3, 8), generator=generator).tolist()
    prefix = draws[0]
    choices = [Choice(inputs=(*prefix, *rest[:-1]), targets=tuple(rest)) for rest in draws[1:]]
    alone = log_likelihoods(model, [choices], tokens=64, share=False, device=device)
    try:
        shared = log_likelihoods(model, [choices], tokens=64, share=True, device=device)
    except (IndexError, RuntimeError, TypeError, ValueError):  # no mask of its own for each pair of tokens
        return False
    # Of a model that predicts all tokens alike, log-likelihoods are close whatever it reads.
    uniform = len(choices[0].targets) * -math.log(config.vocab_size)
    allowed = torch.finfo(model.dtype).eps ** 0.5 * max(abs(alone[choice] - uniform) for choice in choices)
    return all(abs(shared[choice] - alone[choice]) <= allowed for choice in choices)


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


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What a model answered.

    Attributes:
        metrics: by "task metric". values: log-likelihoods of each question's choices, by task; of files only.
    """

    metrics: dict[str, Metric]
    values: dict[str, list[list[float]]]


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
        for task in self._local:
            if task.cut and world()[0] == 0:
                log.warning(
                    "task %s: %d of %d questions have more than %d tokens (length): the beginning of their text is "
                    "not read", task.name, task.cut, len(task.questions), settings.length,
                )  # fmt: skip
        self._share: bool | None = None
        self._baselines: dict[int, Scored] = {}

    def facts(self) -> str:
        """Name all tasks, with digests of the questions instead of the paths of files."""
        digests = {name: hashlib.sha256(repr(asked).encode()).hexdigest() for name, asked in self._questions.items()}
        local = [f"{name}={digest[:16]}" for name, digest in digests.items()]
        return ", ".join([*local, *self._settings.harness_tasks])

    def prepare(self, model: PreTrainedModel, device: torch.device) -> None:
        """Find out, before sums are coded, whether the choices of a question can share their context."""
        if self._local:
            self._share = shares_contexts(model, self._settings.length, device)
            if not self._share and world()[0] == 0:
                log.info("%s reads the context of a question once for each choice", type(model).__name__)

    def score(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device, title: str
    ) -> Scored:
        """Ask a model that `prepare` has seen, with a progress bar."""
        values: dict[str, list[list[float]]] = {}
        if self._local:
            assert self._share is not None, "prepare comes first"
            asked = [choices for task in self._local for choices in task.choices]
            with loading.progress_bar(f"{title}, choices", sum(map(len, asked))) as progress:
                found = log_likelihoods(
                    model, asked, tokens=self._settings.batch * self._settings.length, share=self._share,
                    device=device, progress=progress,
                )  # fmt: skip
            values = {task.name: task.values(found) for task in self._local}
        metrics = {name: m for task in self._local for name, m in task.metrics(values[task.name]).items()}
        if self._loaded:
            metrics |= zero_shot(model, tokenizer, self._settings, self._loaded)
        return Scored(metrics=metrics, values=values)

    def row(self, scored: Scored, tp: int, *, baseline: bool, coded: bool) -> dict[str, Any]:
        """Return fields of a row: scores with standard errors, and comparisons with the baseline on as many ranks.

        Args:
            baseline: whether these are its scores; it comes first. coded: whether anything was; else no comparisons.
        """
        if baseline:
            self._baselines[tp] = scored
        exact, metrics = self._baselines[tp], scored.metrics
        each = {name: kept({name: metric}, {name: exact.metrics[name]}) for name, metric in metrics.items()}
        whole = kept(metrics, exact.metrics)
        scores = {name: metric.value for name, metric in metrics.items()}
        compared = {name: differences(exact.values[name], values) for name, values in scored.values.items() if coded}
        fields: dict[str, Any] = {}
        for name in ("same_answers", "divergence", "change"):
            fields[name] = {task: found[name].value for task, found in compared.items()}
            fields[f"{name}_error"] = {task: found[name].error for task, found in compared.items()}
        return {
            "scores": scores,
            "score": mean_score(scores),
            "scores_error": {name: metric.error for name, metric in metrics.items()},
            "score_kept": {name: share[0] for name, share in each.items() if share and coded},
            "score_kept_error": {name: share[1] for name, share in each.items() if share and coded},
            "scores_kept_error": whole[1] if whole and coded else None,
            "chance": {task.name: task.chance for task in self._local},
            "cut": {task.name: task.cut for task in self._local},
            **fields,
            "questions": {
                task.name: [
                    {"answer": question.answer, "log_likelihoods": values}
                    | {name: metric.items[i] for name, metric in compared.get(task.name, {}).items()}
                    for i, (question, values) in enumerate(zip(task.questions, scored.values[task.name], strict=True))
                ]
                for task in self._local
            },
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
