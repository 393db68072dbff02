"""Zero-shot tasks of an evaluation, from lm-eval (the extra `lowbit[tasks]`)."""

from __future__ import annotations

import importlib
import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.config import ConfigError
from lowbit_lab.evaluate.settings import EvaluationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SEED = 1234  # of the solved examples: lm-eval's own default
_DRAWS = 100  # of the bootstrap, for errors of metrics that are not means


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


class Tasks:
    """The tasks of the settings, loaded before the model."""

    def __init__(self, settings: EvaluationConfig) -> None:
        self._settings, self._loaded = settings, load_tasks(settings)
        self._baselines: dict[int, dict[str, Metric]] = {}

    def score(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Metric]:
        """Ask a model, and return its scores by "task metric"."""
        return zero_shot(model, tokenizer, self._settings, self._loaded)

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


def load_tasks(settings: EvaluationConfig) -> dict[str, Any]:
    """Load tasks and their data; lm-eval is imported only if there are any.

    Args:
        settings: tasks, and the folder of YAML files with more of them (whose data may be local: `dataset_path: json`).
    """
    tasks, folder = settings.tasks, settings.task_folder
    if not tasks:
        return {}
    for needed in ("lm_eval", "accelerate"):
        importlib.import_module(needed)
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings concern options of lm-eval's command line
    manager = TaskManager(include_path=folder or None)
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known]:
        where = f" or {folder}" if folder else ""
        raise ConfigError(f"task is {unknown[0]!r}; allowed: a task of lm-eval{where}")
    try:
        loaded = manager.load(list(tasks))
    except (FileNotFoundError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"a task of {', '.join(tasks)} cannot be loaded: {reason}") from error
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=settings.shots)
        task.set_fewshot_seed(seed=_SEED)
    return loaded


def zero_shot(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EvaluationConfig, loaded: dict[str, Any]
) -> dict[str, Metric]:
    """Return scores of a loaded model by "task metric": "arc_easy acc", "arc_easy acc_norm".

    lm-eval makes the prompts, asks the model through its own Hugging Face wrapper, and computes scores. All real
    tensor-parallel ranks ask the same questions and get the same scores.

    Args:
        model: whole, with emulated ranks, or on real ones. tokenizer: the model's.
        settings: examples, batch size, and the most tokens of a question with answer. loaded: result of `load_tasks`.
    """
    from lm_eval import evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    if tokenizer.eos_token_id is None:  # lm-eval pads with it; padding is masked
        tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(0)})
    build: Any = HFLM
    wrapped = build(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=settings.batch, max_length=settings.length
    )
    run: Any = evaluate
    outcome = run(
        lm=wrapped, task_dict=loaded, limit=settings.limit or None, bootstrap_iters=_DRAWS, log_samples=True
    )  # fmt: skip
    return _metrics(outcome)


def _metrics(outcome: dict[str, Any]) -> dict[str, Metric]:
    """Return lm-eval's metrics for which higher is better, by "task metric", with standard errors and examples."""
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
