"""What makes a run this run and no other, by configuration key; and what differs when one goes on from a checkpoint."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import lowbit
from lowbit.codecs import parse
from lowbit.config import ConfigError
from lowbit.train.activations import written_out
from lowbit.train.boundaries import in_full
from lowbit.train.config import FULL_PRECISION, TrainConfig
from lowbit.train.data import Data
from lowbit.train.manifest import printable
from lowbit.train.model import architecture
from lowbit.train.plan import Plan

FIXED = (
    "model.family", "model.dim", "model.layers", "model.heads", "model.kv_heads", "model.ffn", "model.vocab",
    "model.tied",
)  # fmt: skip
"""Keys that no resume may change: the weights of a checkpoint belong to these."""

_FORMATS = ("pipeline.forward", "pipeline.backward", "gradients.storage", "gradients.all_reduce")
NOT_RECORDED = "not recorded"
"""Stands for a value that a checkpoint tells nothing of."""

_LONGEST = 500  # characters of a value in a message
_WARM_UP = "pipeline.warmup_steps"
_BLOCKS, _BLOCK_BYTES = 16, 1 << 16  # of a file of pretrained weights, to tell it from another


class Change(NamedTuple):
    """A key that has another value than in the checkpoint."""

    key: str
    before: Any
    after: Any

    def at(self, step: int) -> dict[str, Any]:
        """As manifests and `summary.json` record it."""
        return {"step": step, **self._asdict()}

    def __str__(self) -> str:
        before, after = (_short(str(value)) for value in (self.before, self.after))
        return f"{printable(self.key)} was {before} and is {after} now"


def run_identity(config: TrainConfig, *, data: Data, vocab: int) -> dict[str, Any]:
    """All that losses depend on but the layout of the ranks; what JSON can hold, by configuration key.

    None is what means nothing in this run, such as the format between pipelines where there is one pipeline.
    `run.precision`, which depends on the device that a rank computes on, is left to the ranks.
    """
    model, pipeline = config.model, config.pipeline
    lowbit_stages = pipeline.boundary == "lowbit"
    formats = in_full(pipeline)
    storage, several = config.gradients.storage, pipeline.data_parallel > 1
    identity = {f"model.{key}": value for key, value in architecture(model, vocab=vocab).items()}
    identity |= {
        "model.dropout": model.dropout,
        "model.pretrained": pretrained_digest(model.pretrained),
        "data.text": _digest(data.train.tokens, *([] if config.data.held_out else [data.held_out.tokens])),
        "data.held_out": _digest(data.held_out.tokens) if config.data.held_out else "",
        "data.held_out_share": config.data.held_out_share,
        "data.tokenizer": _tokenizer(config, data),
        "data.sequence": config.data.sequence,
        "data.batch": config.data.batch,
        "pipeline.boundary": pipeline.boundary,
        "pipeline.microbatches": pipeline.microbatches,
        "pipeline.forward": _same(formats.forward) if lowbit_stages else None,
        "pipeline.backward": _same(formats.backward) if lowbit_stages else None,
        _WARM_UP: config.codec_warmup_steps if lowbit_stages else None,
        "gradients.storage": storage if storage == FULL_PRECISION else repr(parse(storage)),
        "gradients.all_reduce": repr(parse(config.gradients.all_reduce)) if several else None,
        "run.seed": config.run.seed,
        "run.steps": config.run.steps,
        "run.precision": config.run.precision,
    }
    for name, section in {"activations": written_out(config.activations), "optimizer": config.optimizer}.items():
        identity |= {f"{name}.{key}": value for key, value in dataclasses.asdict(section).items()}
    del identity["activations.plan"]  # known by the bits
    return json.loads(json.dumps(identity))


def layout_of(config: TrainConfig, plan: Plan) -> dict[str, Any]:
    """Where the parts of the model are; a resume may change all of it."""
    pipeline = config.pipeline
    return {
        "pipeline.ranks": plan.ranks,
        "pipeline.data_parallel": pipeline.data_parallel,
        "pipeline.stages_per_rank": plan.stages_per_rank,
        "pipeline.schedule": pipeline.schedule,
        "layers": list(plan.layer_counts),
        "rows": config.rows,
    }


def versions() -> dict[str, str]:
    """Of what computes; another one is no other run, but may round otherwise."""
    return {"lowbit": lowbit.__version__, "torch": torch.__version__}


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any], *, step: int) -> list[Change]:
    """Keys whose values mean something else, for a run that goes on after `step` steps.

    What means nothing in either is the same, and so is a warm-up that is over by then.
    """
    changes = []
    for key, value in after.items():
        was = before.get(key, NOT_RECORDED)
        if was is None or value is None:
            continue
        if key == _WARM_UP and isinstance(was, int) and max(was, value) <= step:
            continue
        if not _same_value(key, was, value):
            changes.append(Change(key, was, value))
    return changes


def check_allowed(keys: Iterable[str], known: Iterable[str]) -> None:
    """Check `run.allow_change`.

    Raises:
        ConfigError: a key that is none of a run's identity, or that no resume may change.
    """
    known = list(known)
    for key in keys:
        if key in FIXED:
            raise ConfigError(
                f"run.allow_change has {key}, which cannot change: the weights of a checkpoint belong to it; "
                "allowed: a new run"
            )
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"run.allow_change has {key!r}, which a resume does not compare; {advice}")


def refuse(where: str, changes: Sequence[Change], allowed: Iterable[str]) -> str:
    """What to say where a run differs in more than it was allowed to; empty if it does not."""
    refused = [change for change in changes if change.key in FIXED or change.key not in set(allowed)]
    if not refused:
        return ""
    lines = [f"{where} is of a run that differs from this one:"]
    lines += [f"  {change};" for change in refused]
    if never := [change.key for change in refused if change.key in FIXED]:
        lines.append(f"  {', '.join(never)} cannot change: the weights belong to it; allowed: the same, or a new run")
    else:
        options = " ".join(f"--allow-change {change.key}" for change in refused)
        lines.append(f"  allowed: the same, or {options} (run.allow_change)")
    return "\n".join(lines)


def pretrained_digest(folder: str) -> str:
    """By which a pretrained model is known wherever it lies: its configuration, and samples of its weights' files."""
    if not folder:
        return ""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _short(text: str) -> str:
    """What fits into a message, of a value that may be a foreign file's."""
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _digest(*parts: np.ndarray) -> str:
    digest = hashlib.sha256()
    for tokens in parts:
        digest.update(np.ascontiguousarray(tokens).data)
    return f"{sum(map(len, parts))} tokens with digest {digest.hexdigest()[:16]}"


def _tokenizer(config: TrainConfig, data: Data) -> str:
    if config.data.tokenizer == "bytes":
        return "bytes"
    tokenizer = data.tokenizer.hugging_face()
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # Not its `repr`, which has the path of the folder.
    text = fast.to_str() if fast is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _same(formats: tuple[str, ...]) -> list[str]:
    """One format for all boundaries, if it is the same at all of them: their number belongs to the layout."""
    return list(formats[:1] if len(set(formats)) == 1 else formats)


def _same_value(key: str, was: Any, value: Any) -> bool:
    if was == value or key not in _FORMATS:
        return was == value
    texts = (was, value) if isinstance(value, list) else ([was], [value])
    try:
        return [*map(_parsed, texts[0])] == [*map(_parsed, texts[1])]
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):  # a format that this version does not have any more
        return False


def _parsed(text: str) -> Any:
    return text if text == FULL_PRECISION else parse(text)
