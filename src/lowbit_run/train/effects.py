"""Options that another option leaves without effect: a run refuses them, instead of dropping them silently."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.escape import shown
from lowbit_run.config import ConfigError

if TYPE_CHECKING:
    from lowbit_run.train.config import TrainConfig

_Rule = tuple[str, Callable[["TrainConfig"], Any], str, str]

_RULES: tuple[_Rule, ...] = (
    *(
        (f"model.{key}", lambda c: c.model.pretrained, "model.pretrained", "one of the two: the folder sets the sizes")
        for key in ("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab", "tied")
    ),
    ("model.kv_heads", lambda c: c.model.family == "gpt2", "model.family", "with another family"),
    *(
        (f"lora.{key}", lambda c: not c.lora.rank, "lora.rank", "with lora.rank of at least 1")
        for key in ("alpha", "dropout", "targets")
    ),
    ("data.packing", lambda c: c.data.format != "jsonl", "data.format", "with jsonl"),
    *(
        (f"data.{key}", lambda c: not c.data.dataset, "data.dataset", "with data.dataset")
        for key in ("dataset_config", "dataset_split", "column")
    ),
    ("data.dataset_config", lambda c: Path(c.data.dataset).is_dir(), "data.dataset", "with a name on the Hub"),
    ("data.held_out_share", lambda c: c.data.held_out, "data.held_out", "one of the two"),
    (
        "pipeline.warmup_steps", lambda c: c.codec_warmup_steps >= c.run.steps and c.pipeline.forward != ("fp32",),
        "run.steps", "fewer than run.steps, or pipeline.forward fp32 for a run at full precision",
    ),
    *(
        (f"activations.{key}", lambda c: not c.activations.coded, "activations.bits", "with bits below 16")
        for key in ("norm", "mlp", "linear", "attention", "group", "rounding")
    ),
    ("activations.checkpoint", lambda c: c.activations.plan, "activations.plan", "one of the two"),
    (
        "gradients.all_reduce", lambda c: c.pipeline.data_parallel == 1 and not c.elastic.lighthouse,
        "pipeline.data_parallel", "with several pipelines, or with elastic.lighthouse",
    ),
    *(
        (f"elastic.{key}", lambda c: not c.elastic.lighthouse, "elastic.lighthouse", "with elastic.lighthouse")
        for key in ("name", "at_least", "error_feedback")
    ),
    ("run.restarts", lambda c: not c.run.supervise, "run.supervise", "with run.supervise"),
    (
        "run.rejoin_seconds", lambda c: not (c.run.supervise or c.elastic.lighthouse),
        "run.supervise", "with run.supervise or elastic.lighthouse",
    ),
    ("run.trace_steps", lambda c: not c.run.trace, "run.trace", "with run.trace"),
    *(
        (f"run.{key}", lambda c: not c.run.checkpoint_every, "run.checkpoint_every", "with checkpoints")
        for key in ("keep", "checkpoint_minutes")
    ),
    ("run.save_dtype", lambda c: not c.run.save_model, "run.save_model", "with a model that is saved"),
    (
        "run.save_dtype", lambda c: c.lora.rank and not c.run.save_merged,
        "run.save_merged", "with run.save_merged: adapters alone are saved in fp32",
    ),
    *(
        (f"run.{key}", lambda c: not (c.data.held_out or c.data.held_out_share), "data.held_out_share", "more than 0")
        for key in ("eval_every", "eval_batches")
    ),
)  # fmt: skip
"""Key, whether another key leaves it without effect, that key, and what is allowed instead."""

_TYPED: tuple[_Rule, ...] = (
    *(
        (f"pipeline.{key}", lambda c: _alone(c), "pipeline.ranks", "with several ranks")
        for key in ("forward", "backward", "warmup_steps", "anchor", "tied_rows", "schedule", "layers")
    ),
    ("pipeline.tied_rows", lambda c: c.lora.rank, "lora.rank", "without adapters, which leave the embedding as it is"),
    (
        "pipeline.tied_rows", lambda c: not (c.model.pretrained or c.model.tied or c.model.family == "gpt2"),
        "model.tied", "with a tied embedding",
    ),
    ("pipeline.tied_rows", lambda c: not c.model.pretrained and c.model.tied is False, "model.tied", "with true"),
)  # fmt: skip
"""Rules for options on the command line only: a file may be used with one rank or several, and with other models."""


def check_effects(config: "TrainConfig", typed: Iterable[str]) -> None:
    """Refuse options without effect: those on the command line (`typed` keys), and others that are not the default."""
    typed, default = frozenset(typed), type(config)()
    for number, (key, unused, other, allowed) in enumerate((*_RULES, *_TYPED)):
        stated = key in typed or (number < len(_RULES) and _value(config, key) != _value(default, key))
        if stated and unused(config):
            raise ConfigError(
                f"{key} is {_shown(config, key)} and {other} is {_shown(config, other)}, where it has no effect; "
                f"allowed: {allowed}"
            )


def _alone(config: "TrainConfig") -> bool:
    """Whether one stage is the whole model; a resume compares formats with those of more ranks."""
    return config.ranks == config.pipeline.stages_per_rank == 1 and not config.run.resume and "RANK" not in os.environ


def _value(config: "TrainConfig", key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _shown(config: "TrainConfig", key: str) -> str:
    value = _value(config, key)
    value = list(value) if isinstance(value, tuple) else value
    return str(value).lower() if isinstance(value, bool) else shown(value)
