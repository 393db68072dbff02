"""Zero-shot tasks, asked and scored by EleutherAI's lm-eval (the extra `lowbit[tasks]`)."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from lowbit.train import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_SEED = 1234  # of the solved examples: lm-eval's own default


def zero_shot(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tasks: tuple[str, ...],
    folder: str = "",
    limit: int = 0,
    shots: int = 0,
    batch: int = 4,
    length: int | None = None,
) -> dict[str, float]:
    """Scores of a loaded model, by "task metric": "arc_easy acc", "arc_easy acc_norm".

    lm-eval's own code loads the data, makes the prompts, asks the model through its own Hugging Face wrapper and
    scores. On real tensor-parallel ranks all of them ask the same and get the same.

    Args:
        model: whole, played on ranks, or on real ones; tokenizer: its own.
        tasks: names; folder: of YAML files with more tasks, whose data may be local (`dataset_path: json`).
        limit: examples of each, 0: all; shots: solved examples in front of each; batch: questions at a time.
        length: most tokens of a question and answer; None: the model's positions.

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
    manager = TaskManager(include_path=folder or None)
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known]:
        where = f" or {folder}" if folder else ""
        raise ConfigError(f"task is {unknown[0]!r}; allowed: what lm-eval knows{where}")
    if tokenizer.eos_token_id is None:  # lm-eval pads with it; what it pads is masked
        tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(0)})
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch, max_length=length)
    try:
        loaded = manager.load(list(tasks))
    except (FileNotFoundError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"a task of {', '.join(tasks)} cannot be loaded: {reason}") from error
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=_SEED)
    found: Any = evaluate(lm=wrapped, task_dict=loaded, limit=limit or None, bootstrap_iters=0, log_samples=False)
    return scores_of(found["results"], found["higher_is_better"])


def scores_of(results: dict[str, dict[str, Any]], higher_is_better: dict[str, dict[str, bool]]) -> dict[str, float]:
    """Scores among lm-eval's results by "task metric": what is the better the higher, without standard errors."""
    found: dict[str, float] = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            better = higher_is_better.get(task, {}).get(metric)
            if isinstance(value, int | float) and filtered and better:
                suffix = "" if filtered == "none" else f" {filtered}"
                found[f"{task} {metric}{suffix}"] = value
    return found
