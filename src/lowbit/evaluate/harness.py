"""Zero-shot tasks, asked and scored by EleutherAI's lm-eval (the extra `lowbit[tasks]`)."""

from __future__ import annotations

import importlib
import logging
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowbit.config import ConfigError
from lowbit.evaluate.settings import EvaluationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SEED = 1234  # of the solved examples: lm-eval's own default


def zero_shot(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EvaluationConfig
) -> dict[str, float]:
    """Return scores of a loaded model by "task metric": "arc_easy acc", "arc_easy acc_norm".

    lm-eval loads the data, makes the prompts, asks the model through its own Hugging Face wrapper and scores. On real
    tensor-parallel ranks all of them ask the same and get the same.

    Args:
        model: whole, with emulated ranks, or on real ones. tokenizer: its own.
        settings: tasks, the folder of YAML files with more of them (whose data may be local: `dataset_path: json`),
            examples, batch size, and the most tokens of a question and answer.

    Raises:
        ModuleNotFoundError: lm-eval is not installed.
        ConfigError: a task that it does not know, or cannot load.
    """
    for needed in ("lm_eval", "accelerate"):
        importlib.import_module(needed)
    from lm_eval import evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about options of its own command line
    tasks, folder = settings.tasks, settings.task_folder
    manager = TaskManager(include_path=folder or None)
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known]:
        where = f" or {folder}" if folder else ""
        raise ConfigError(f"task is {unknown[0]!r}; allowed: a task of lm-eval{where}")
    if tokenizer.eos_token_id is None:  # lm-eval pads with it; padding is masked
        tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(0)})
    build: Any = HFLM
    wrapped = build(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=settings.batch, max_length=settings.length
    )
    try:
        loaded = manager.load(list(tasks))
    except (FileNotFoundError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"a task of {', '.join(tasks)} cannot be loaded: {reason}") from error
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=settings.shots)
        task.set_fewshot_seed(seed=_SEED)
    run: Any = evaluate
    outcome = run(lm=wrapped, task_dict=loaded, limit=settings.limit or None, bootstrap_iters=0, log_samples=False)
    return _scores(outcome["results"], outcome["higher_is_better"])


def mean_score(scores: Mapping[str, float]) -> float:
    """Return the mean over the tasks of the mean of each task's metrics, from scores by "task metric"."""
    by_task: dict[str, list[float]] = {}
    for name, value in scores.items():
        by_task.setdefault(name.partition(" ")[0], []).append(value)
    return statistics.fmean(map(statistics.fmean, by_task.values())) if by_task else 0.0


def _scores(results: dict[str, dict[str, Any]], higher_is_better: dict[str, dict[str, bool]]) -> dict[str, float]:
    """Return lm-eval's metrics of which higher is better, by "task metric", without their standard errors."""
    scores: dict[str, float] = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            better = higher_is_better.get(task, {}).get(metric)
            if isinstance(value, int | float) and filtered and better:
                suffix = "" if filtered == "none" else f" {filtered}"
                scores[f"{task} {metric}{suffix}"] = value
    return scores
