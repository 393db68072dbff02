"""Zero-shot tasks of an evaluation, from local files or from lm-eval (the extra `lowbit[tasks]`)."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from lowbit.config import ConfigError
from lowbit_lab.evaluate import choices, loading, task_files
from lowbit_lab.evaluate.choices import LocalTask, Metric
from lowbit_lab.evaluate.settings import EvaluationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DRAWS = 100  # of the bootstrap, for errors of metrics that are not means


class Tasks:
    """The tasks of the settings, read and checked before a model is loaded."""

    def __init__(self, settings: EvaluationConfig) -> None:
        self._settings = settings
        self._questions = {
            name: task_files.read_questions(name, file, settings.limit) for name, file in settings.task_files.items()
        }
        self._loaded = load_tasks(settings)
        self._local: list[LocalTask] = []
        self._baselines: dict[int, dict[str, Metric]] = {}

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Encode the questions; ConfigError if one does not fit."""
        self._local = [
            LocalTask.encode(name, questions, tokenizer, self._settings.length)
            for name, questions in self._questions.items()
        ]

    def facts(self) -> str:
        """Name all tasks, with the contents of files instead of their paths."""
        files = (f"{name}={task_files.fingerprint(questions)}" for name, questions in self._questions.items())
        return ", ".join((*files, *self._settings.harness_tasks))

    def score(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device, title: str
    ) -> dict[str, Metric]:
        """Ask a model, with a progress bar, and return its scores by "task metric"."""
        scored: dict[str, Metric] = {}
        if self._local:
            with loading.progress_bar(f"{title}, questions", choices.count_inputs(self._local)) as progress:
                scored |= choices.score(
                    model, self._local, batch=self._settings.batch, device=device, progress=progress
                )  # fmt: skip
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
        each = {name: choices.kept({name: metric}, {name: exact[name]}) for name, metric in scored.items()}
        whole = choices.kept(scored, exact)
        scores = {name: metric.value for name, metric in scored.items()}
        return {
            "scores": scores,
            "score": choices.mean_score(scores),
            "scores_error": {name: metric.error for name, metric in scored.items()},
            "score_kept": {name: share[0] for name, share in each.items() if share and coded},
            "score_kept_error": {name: share[1] for name, share in each.items() if share and coded},
            "scores_kept_error": whole[1] if whole and coded else None,
        }


def load_tasks(settings: EvaluationConfig) -> dict[str, Any]:
    """Load tasks and their data; lm-eval is imported only if there are any.

    Args:
        settings: tasks, and the folder of YAML files with more of them (whose data may be local: `dataset_path: json`).
    """
    tasks, folder = settings.harness_tasks, settings.task_folder
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
        task.set_config(key="num_fewshot", value=0)
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
