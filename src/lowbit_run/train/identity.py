"""The identity of a run: everything that its losses depend on, by configuration key; and its changes on a resume."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import lowbit
from lowbit.codecs import parse
from lowbit.escape import printable, suggestion
from lowbit_run.config import ConfigError
from lowbit_run.train import dates
from lowbit_run.train.activations import written_out
from lowbit_run.train.answers import Answers
from lowbit_run.train.boundaries import format_of, in_full
from lowbit_run.train.config import FULL_PRECISION, TrainConfig
from lowbit_run.train.data import Data, Windows
from lowbit_run.train.layout import PipelineLayout
from lowbit_run.train.model import architecture, targets_of
from lowbit_run.train.pretrained import ByteTokenizer, Tokenizer, definition
from lowbit_run.train.tied import tied_codec

FIXED = (
    "model.family", "model.dim", "model.layers", "model.heads", "model.kv_heads", "model.ffn", "model.vocab",
    "model.tied", "lora.rank", "lora.targets", "optimizer.states",
)  # fmt: skip
"""Keys that no resume may change: the weights or optimizer states of a checkpoint are valid only with these."""

_LOCAL = {  # settings that may differ between machines
    "data.text", "data.dataset", "data.held_out", "data.tokenizer", "model.pretrained", "activations.plan",
    "activations.checkpoint", "run.output", "run.threads", "run.progress", "run.tensorboard", "run.report",
    "run.grace_seconds", "run.trackers",
}  # fmt: skip

CHOSEN = "pipeline.chosen"
"""Key of the formats that the run itself chose, in the identity of its checkpoints; a resume does not compare it."""
RATES = "pipeline.rates"
"""Key of the rates that it chose for its goals, likewise."""

_ONCE = {"model.weights": "fp32"}
"""What settings were before checkpoints recorded them, where that is not their default of today."""

_FORMATS = ("pipeline.forward", "pipeline.backward", "pipeline.tied_rows", "gradients.storage", "gradients.all_reduce")
_LONGEST = 500  # characters of a value in a message
_WARM_UP = "pipeline.warmup_steps"
_BLOCKS, _BLOCK_BYTES = 16, 1 << 16  # samples of a file of pretrained weights, which tell it from others


class Change(NamedTuple):
    """A key whose value differs from the checkpoint's."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        texts = (printable(str(value)) for value in (self.before, self.after))  # maybe of a foreign file
        before, after = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in texts)
        return f"{printable(self.key)} was {before} and is {after} now"


def run_identity(config: TrainConfig, *, data: Data, vocab: int) -> dict[str, Any]:
    """Return everything that losses depend on, except the layout of ranks, by configuration key, as JSON values.

    None means that the key has no effect in this run, such as `gradients.all_reduce` with a single pipeline. Ranks
    replace `run.precision`, which depends on their device.
    """
    model, lora, pipeline, storage = config.model, config.lora, config.pipeline, config.gradients.storage
    formats, elastic = in_full(pipeline), bool(config.elastic.lighthouse)
    identity = {f"model.{key}": value for key, value in architecture(model, vocab=vocab).items()}
    identity |= {f"lora.{key}": value if lora.rank or key == "rank" else None for key, value in vars(lora).items()}
    identity |= {
        "model.weights": model.weights or ("auto" if lora.rank else None),
        "model.double_quantization": model.double_quantization if model.weights == "nf4" else None,
        "model.dropout": model.dropout,
        "model.pretrained": pretrained_digest(model.pretrained),
        "lora.targets": list(targets_of(config)) if lora.rank else None,
        "data.format": config.data.format,
        dates.KEY: data.date or None,
        "data.packing": config.data.packing if config.data.format == "jsonl" else None,
        "data.text": _digest(data.train, *([] if config.data.held_out else [data.held_out])),
        "data.held_out": _digest(data.held_out) if config.data.held_out else "",
        "data.held_out_share": config.data.held_out_share,
        "data.tokenizer": tokenizer_digest(data.tokenizer),
        "data.sequence": config.data.sequence,
        "data.batch": config.data.batch,
        "pipeline.microbatches": pipeline.microbatches,
        "pipeline.forward": _once(formats.forward),
        "pipeline.backward": _once(formats.backward),
        _WARM_UP: config.codec_warmup_steps,
        "pipeline.anchor": pipeline.anchor,
        "gradients.storage": storage if storage == FULL_PRECISION else repr(parse(storage)),
        "elastic.name": config.elastic.name if elastic else None,
        "run.seed": config.run.seed,
        "run.steps": config.run.steps,
        "run.precision": config.run.precision,
    }
    tied, several = identity["model.tied"] is not False and not lora.rank, pipeline.data_parallel > 1 or elastic
    identity["pipeline.tied_rows"] = repr(tied_codec(pipeline)) if tied else None
    identity["gradients.all_reduce"] = repr(parse(config.gradients.all_reduce)) if several else None
    activations, layers = written_out(config.activations)
    for name, section in {"activations": activations, "optimizer": config.optimizer}.items():
        identity |= {f"{name}.{key}": value for key, value in vars(section).items()}
    del identity["activations.plan"]  # the bits represent it
    del identity["activations.checkpoint"]  # gradients are the same
    identity["activations.layers"] = layers
    if config.run.method == "agoq" and not config.activations.plan:  # bits follow from the layout, which may change
        identity["activations.bits"] = identity["activations.norm"] = "by stage"
    return json.loads(json.dumps(identity))


def compared(config: TrainConfig) -> dict[str, str]:
    """Return the settings that must be equal on all machines, by key, with a digest of pretrained weights.

    Raises:
        OSError: `model.pretrained` cannot be read.
    """
    named = {f"{section}.{key}": str(v) for section, values in vars(config).items() for key, v in vars(values).items()}
    weights = {"model.pretrained": pretrained_digest(config.model.pretrained)}  # the folder may differ
    return {name: value for name, value in named.items() if name not in _LOCAL} | weights


def layout_of(config: TrainConfig, layout: PipelineLayout) -> dict[str, Any]:
    """Return the model's layout over ranks and stages, for manifests; a resume may change all of it."""
    pipeline = config.pipeline
    return {
        "pipeline.ranks": layout.ranks,
        "pipeline.data_parallel": pipeline.data_parallel,
        "pipeline.stages_per_rank": layout.stages_per_rank,
        "pipeline.schedule": pipeline.schedule,
        "layers": list(layout.layer_counts),
        "rows": config.rows,
    }


def versions() -> dict[str, str]:
    """Return the versions of lowbit and PyTorch. Another version may resume a run, but may round differently."""
    return {"lowbit": lowbit.__version__, "torch": torch.__version__}


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any], *, step: int) -> list[Change]:
    """Return the keys whose values differ in meaning, for a run that resumes after `step` steps.

    Keys without effect in one of the runs do not count, nor does a warm-up that is over by then. A key that the
    checkpoint did not record, since its version had no such option, had its default.
    """
    changes = []
    for key, value in after.items():
        was = before[key] if key in before else _unrecorded(key)
        if was is None or value is None:
            continue
        if key == dates.KEY and key not in before and before.get("data.text") == after["data.text"]:
            continue  # older versions did not record the date
        if key == _WARM_UP and isinstance(was, int) and max(was, value) <= step:
            continue
        if was != value and not (key in _FORMATS and _same_formats(was, value)):
            changes.append(Change(key, was, value))
    return changes


def _unrecorded(key: str) -> Any:
    section, _, name = key.partition(".")
    default = getattr(getattr(TrainConfig(), section, None), name, "")
    # An empty text stands for what a run derives, such as a digest of its data.
    derived = default == "" or key in ("data.text", "data.held_out")
    return _ONCE.get(key, "not recorded" if derived else json.loads(json.dumps(default)))


def check_allowed(keys: Iterable[str], compared_keys: Iterable[str]) -> None:
    """Check `run.allow_change`. Raises ConfigError: a resume does not compare the key, or may not change it."""
    valid = list(compared_keys)
    for key in keys:
        if key in FIXED:
            raise ConfigError(
                f"run.allow_change has {key}, which cannot change: the weights of a checkpoint belong to it; "
                "allowed: a new run"
            )
        if key not in valid:
            raise ConfigError(
                f"run.allow_change has {key!r}, which a resume does not compare; {suggestion(key, valid)}"
            )


def refuse(where: str, changes: Sequence[Change], allowed: Iterable[str]) -> str:
    """Return the error message for changes that are not allowed; empty if all are."""
    refused = [change for change in changes if change.key in FIXED or change.key not in set(allowed)]
    if not refused:
        return ""
    if never := [change.key for change in refused if change.key in FIXED]:
        last = f"{', '.join(never)} cannot change: the weights belong to it; allowed: the same, or a new run"
    else:
        options = " ".join(f"--allow-change {change.key}" for change in refused)
        last = f"allowed: the same, or {options} (run.allow_change)"
    lines = [f"{where} is of a run that differs from this one:", *(f"{change};" for change in refused), last]
    return "\n  ".join(lines)


def pretrained_digest(folder: str) -> str:
    """Return a digest of a pretrained model's configuration and of samples of its weight files."""
    if not folder:
        return ""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    files = (*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin"))
    for path in sorted(path for path in files if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _digest(*parts: Windows | Answers) -> str:
    digest = hashlib.sha256()
    for array in (array for part in parts for array in part.arrays):
        digest.update(np.ascontiguousarray(array).data)
    sizes = [part.samples if isinstance(part, Answers) else sum(map(len, part.arrays)) for part in parts]
    unit = "samples" if isinstance(parts[0], Answers) else "tokens"
    return f"{sum(sizes)} {unit} with digest {digest.hexdigest()[:16]}"


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer's definition."""
    if isinstance(tokenizer, ByteTokenizer):
        return "bytes"
    return hashlib.sha256(definition(tokenizer.hugging_face()).encode()).hexdigest()[:16]


def _once(formats: tuple[str, ...]) -> list[str]:
    """Return a single format if all are the same: the number of boundaries belongs to the layout."""
    return list(formats[:1] if len(set(formats)) == 1 else formats)


def _same_formats(was: Any, value: Any) -> bool:
    """Whether two names of formats, or two lists of names, mean the same formats."""
    texts = (was, value) if isinstance(value, list) else ([was], [value])
    try:
        before, after = ([text if text == FULL_PRECISION else format_of(text) for text in names] for names in texts)
    except (TypeError, ValueError, RecursionError):  # a format that this version no longer has
        return False
    return before == after
