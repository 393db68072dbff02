"""Scores of multiple-choice questions, as lm-eval computes them: the choice with the largest log-likelihood counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.config import ConfigError
from lowbit_lab.evaluate.task_files import Question

NORMALIZED = ("arc_challenge", "arc_easy", "hellaswag")
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
        """Return the mean of the items."""
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
                found[choice] = _log_likelihood(row[: len(inputs)], choice)
        if progress is not None:
            progress(start + len(group))
    return {name: metric for task in tasks for name, metric in task.metrics(found).items()}


def count_inputs(tasks: Sequence[LocalTask]) -> int:
    """Return how many inputs the model reads for these tasks."""
    return len({choice.inputs for task in tasks for choices in task.choices for choice in choices})


def _log_likelihood(logits: Tensor, choice: Choice) -> float:
    """Add up the log-probabilities of the targets, which come last: `logits` have no padding at the end."""
    targets = torch.tensor(choice.targets, device=logits.device)
    log_probabilities = logits[-len(targets) :].float().log_softmax(-1)
    return float(log_probabilities.gather(1, targets[:, None]).sum())


def mean_score(scores: Mapping[str, float]) -> float:
    """Return the mean over the tasks of the mean of each task's metrics, from scores by "task metric"."""
    return statistics.fmean(map(statistics.fmean, _by_task(scores).values())) if scores else 0.0


def _by_task(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each task, from values by "task metric"."""
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
