"""Zero-shot tasks of an evaluation, from local files and of lm-eval, next to the baseline's scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowbit_lab.evaluate import choices, harness, loading, task_files
from lowbit_lab.evaluate.choices import LocalTask, Metric
from lowbit_lab.evaluate.settings import EvaluationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Tasks:
    """The tasks of the settings, read and checked before a model is loaded."""

    def __init__(self, settings: EvaluationConfig) -> None:
        self._settings = settings
        self._questions = {
            name: task_files.read_questions(name, file, settings.limit) for name, file in settings.task_files.items()
        }
        self._loaded = harness.load_tasks(settings)
        self._local: list[LocalTask] = []
        self._baselines: dict[int, dict[str, Metric]] = {}

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Encode the questions; ConfigError if one does not fit."""
        self._local = [
            LocalTask.encode(name, questions, tokenizer, self._settings.length)
            for name, questions in self._questions.items()
        ]

    def facts(self) -> str:
        """Name all tasks, and the contents of files in place of their paths."""
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
            scored |= harness.zero_shot(model, tokenizer, self._settings, self._loaded)
        return scored

    def row(self, scored: dict[str, Metric], tp: int, *, baseline: bool, coded: bool) -> dict[str, Any]:
        """Return fields of a row: scores with standard errors, and shares of the baseline's on as many ranks.

        Args:
            baseline: these are its scores; it comes first. coded: whether anything was; else nothing was kept either.
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
