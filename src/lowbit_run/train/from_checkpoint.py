"""Make a model of a checkpoint in one process: the whole one layer by layer, or adapters. Nothing is sent for it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.escape import printable
from lowbit_run.config import ConfigError
from lowbit_run.train.checkpoints.manifest import (
    FOLDER,
    TENSORS,
    DamagedShareError,
    newest_step,
    read_manifest,
    shares_in,
    step_name,
    steps_in,
)  # fmt: skip
from lowbit_run.train.checkpoints.save import DTYPES, header_of, verify_share, write_file
from lowbit_run.train.config import TrainConfig, from_mapping
from lowbit_run.train.cut import Share, class_for, layer_count
from lowbit_run.train.export import Export, export_dtype
from lowbit_run.train.identity import pretrained_digest, tokenizer_digest
from lowbit_run.train.model import StageModule, hugging_face_config, save_adapter_config, save_companions, save_config
from lowbit_run.train.pretrained import read_json, tokenizer_for
from lowbit_run.train.weights import share_loader

_CPU = torch.device("cpu")
_HEAD = "model/lm_head.weight"


def export(checkpoint: Path, output: Path | None = None) -> Path:
    """Write the model, or the adapters, of a checkpoint as `lowbit train` does at the end; return the folder.

    Args:
        checkpoint: the folder of a step, or of a run: its newest step. output: an empty folder, or one that does not
            exist; if omitted, one of the step's name in the folder of the run.

    Raises:
        ConfigError: there is no checkpoint, it is damaged or incomplete, or the folder of its model has changed.
        OSError: for example, the disk is full.
    """
    step = _step(checkpoint)
    run, target = step.parent.parent, output or step.parent.parent / step.name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"output is {str(target)!r}, which exists; allowed: an empty folder, or a new one")
    weights, config = _Weights(step), _settings(run)
    trained = weights.first.identity
    if trained.get("model.pretrained") != pretrained_digest(config.model.pretrained):
        raise ConfigError(
            f"model.pretrained of {run / 'config.json'} is {config.model.pretrained!r}, which is not the model that "
            f"checkpoint {step} was trained from; allowed: the same files"
        )
    tokenizer = tokenizer_for(config.data.tokenizer, config.model.pretrained)
    # A resume that changed them may have ended before its first checkpoint.
    now = {"lora.rank": config.lora.rank, "data.tokenizer": tokenizer_digest(tokenizer)}
    now |= {"lora.alpha": config.lora.alpha} if config.lora.rank else {}
    for key, value in now.items():
        if key in trained and trained[key] != value:
            raise ConfigError(
                f"{key} of {run / 'config.json'} is {value!r}, and was {printable(str(trained[key]))!r} for checkpoint "
                f"{step}; allowed: the same"
            )
    part = target.with_name(f".{target.name}.lowbit-part")
    shutil.rmtree(part, ignore_errors=True)  # of an attempt that was ended
    part.mkdir(parents=True)
    try:
        (_write_adapters if config.lora.rank else _write_model)(part, config, weights)
        tokenizer.hugging_face().save_pretrained(part)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rmdir()
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _step(folder: Path) -> Path:
    """Return the folder of a step."""
    for steps in (folder / FOLDER, folder):  # of a run, or of its checkpoints
        if (newest := newest_step(steps)) is not None:
            return steps / step_name(newest)
    if folder.resolve() in steps_in(folder.resolve().parent).values():
        return folder.resolve()
    raise ConfigError(
        f"checkpoint is {str(folder)!r}, and there is none; allowed: the folder of a run, or of a step in {FOLDER}"
    )


def _settings(run: Path) -> TrainConfig:
    path = run / "config.json"
    try:
        return from_mapping(read_json(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}, the settings of the run, cannot be used: {why}") from error


class _Weights:
    """The trained parameters of a step, by their names in the whole model, read from its shares one at a time."""

    def __init__(self, step: Path) -> None:
        from safetensors import safe_open

        shares, problems = _newest(step), list[str]()
        for rank, share in list(shares.items()):
            try:
                verify_share(share)
            except DamagedShareError as error:
                problems.append(f"{share.name} {error}")
                del shares[rank]
        manifests = {rank: read_manifest(share) for rank, share in shares.items()}
        places = next(iter(manifests.values())).layout["pipeline.ranks"] if manifests else 1
        if missing := sorted(set(range(places)) - {rank % places for rank in manifests}):
            problems += [
                f"rank-{rank} is not here" for rank in missing if not any(f"rank-{rank} " in p for p in problems)
            ]
            raise ConfigError(
                f"checkpoint {step}: {'; '.join(problems)}; allowed: one with the shares of all ranks of a pipeline, "
                "such as after copying the checkpoints of the other machines into the same folder"
            )
        self.step, self.first = step, next(iter(manifests.values()))
        self.aliases = {name for manifest in manifests.values() for name in manifest.aliases}
        files = {rank: safe_open(share / TENSORS, "pt") for rank, share in shares.items()}
        self._files = {name: files[rank] for rank, manifest in manifests.items() for name in manifest.tensors}

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters in the whole model."""
        return [name.removeprefix("model/") for name in self._files if name.startswith("model/")]

    @property
    def tied(self) -> bool:
        """Whether there is no output matrix apart from the embedding."""
        return _HEAD not in self._files or _HEAD.removeprefix("model/") in self.aliases

    def __getitem__(self, name: str) -> Tensor:
        if f"model/{name}" not in self._files:
            raise ConfigError(f"checkpoint {self.step} has no parameter {name}; allowed: a checkpoint of this model")
        return self._files[f"model/{name}"].get_tensor(f"model/{name}")


def _newest(step: Path) -> dict[int, Path]:
    """Return the shares of the attempt of which most are here, by rank."""
    attempts: dict[str, dict[int, Path]] = {}
    for rank, share in shares_in(step).items():
        try:
            attempts.setdefault(read_manifest(share).attempt, {})[rank] = share
        except DamagedShareError:
            attempts.setdefault("", {})[rank] = share  # which `verify_share` describes
    return max(attempts.values(), key=len, default={})


def _write_adapters(folder: Path, config: TrainConfig, weights: _Weights) -> None:
    named = {f"base_model.model.{name.replace('.default.', '.')}": weights[name].contiguous() for name in weights.names}
    types = {dtype: name for name, dtype in DTYPES.items()}
    header, places, _ = header_of({n: (types[x.dtype], tuple(x.shape)) for n, x in named.items()}, {"format": "pt"})
    data = (named[name].reshape(-1).view(torch.uint8).numpy().data for name in places)
    write_file(folder / "adapter_model.safetensors", [header, *data])
    save_adapter_config(folder, config)
    exact: Any = hugging_face_config(config.model, vocab=0, sequence=0)
    save_companions(folder, config, _generation(exact))


def _write_model(folder: Path, config: TrainConfig, weights: _Weights) -> None:
    vocab = int(weights.first.identity["model.vocab"])
    exact: Any = hugging_face_config(config.model, vocab=vocab, sequence=config.data.sequence)
    exact.tie_word_embeddings = weights.tied
    dtype = export_dtype(config)
    export = Export(_Layers(config, exact, weights), None, dtype, adapters=False)
    try:
        export.reserve(folder)
        export.write()
    finally:
        export.close()
    save_config(folder, exact, dtype or torch.float32)
    save_companions(folder, config, _generation(exact))


def _generation(exact: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(exact)


@dataclass(frozen=True)
class _Layers:
    """The modules of a model, one for each layer, and one for what is before and after them; gone through twice."""

    config: TrainConfig
    exact: Any
    weights: _Weights

    def __iter__(self) -> Iterator[StageModule]:
        for layers in (range(0), *(range(layer, layer + 1) for layer in range(layer_count(self.exact)))):
            ends = not layers
            model = self._filled(Share(layers=frozenset(layers), first=ends, last=ends))
            yield StageModule(model, layers=layers, first=ends, last=ends)

    def _filled(self, share: Share) -> Any:
        with torch.device("meta"):
            model = class_for(self.exact, share)(self.exact)
        if dict(model.named_buffers()).keys() & model.state_dict().keys():  # not trained, such as biases of routers
            folder = self.config.model.pretrained
            model = share_loader(folder, self.exact, dtype=torch.float32, quantized=None, device=_CPU)(share)
        copies = {parameter: nn.Parameter(self.weights[name]) for name, parameter in model.named_parameters()}
        for module in model.modules():
            module._parameters.update({name: copies[p] for name, p in module._parameters.items() if p is not None})
        return model
