"""Everything that can be wrong with a run, found before a process group or process exists."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowbit.codecs import Codec
from lowbit.train.activations import Policies, check_schedule, saved_policies
from lowbit.train.boundaries import Codecs, check_codecs, make_codecs, stock_dtype
from lowbit.train.checkpoints.manifest import MANIFEST, OLDER, DamagedError, read_manifest, shares_in, steps_in
from lowbit.train.checkpoints.save import FOLDER, NO_CHECKPOINT, About, Checkpoints
from lowbit.train.config import TrainConfig
from lowbit.train.data import Data, load_data
from lowbit.train.device import choose_autocast, choose_backend, choose_device
from lowbit.train.export import MODEL_FILES
from lowbit.train.folder import MARK, RunFolder
from lowbit.train.gradients import storage_codec
from lowbit.train.identity import (
    changes_between,
    check_allowed,
    layout_of,
    refuse,
    run_identity,
    versions,
)
from lowbit.train.layout import Layout, make_layout
from lowbit.train.model import count_layers, hidden_size, longest_sequence, vocabulary
from lowbit.train.replicas import all_reduce_codec, ranks_of_pipeline
from lowbit.train.section import ConfigError

FILES = ("metrics.jsonl", "metrics.part", "summary.json", "config.json")
IN_USE = "run.output {!r} is in use by {}; allowed: another folder, or to wait until it has ended"
_FOLDERS = (FOLDER, "tensorboard", "model")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A configuration with all that follows from it on this machine."""

    config: TrainConfig
    plan: Layout
    codecs: Codecs
    activations: Policies
    storage: Codec | None
    all_reduce: Codec
    data: Data
    vocab: int
    device: torch.device
    backend: str
    identity: dict[str, Any]

    @property
    def autocast(self) -> torch.dtype | None:
        """What matrix products are computed in; None: as the weights. Only asked for where a rank computes."""
        return choose_autocast(self.config.run.precision, self.device)

    @property
    def wire(self) -> torch.dtype:
        """What stages hand to their boundaries: bfloat16 where a stock stage shall send that."""
        return stock_dtype(self.config.pipeline)

    def about(self, attempt: str, *, ranks: int) -> About:
        """What the shares of checkpoints say of this run, where a rank computes.

        Args:
            attempt: the same on all ranks, and never again. ranks: of the whole run.
        """
        precision = "fp32" if self.autocast is None else "bf16"
        return About(
            ranks=ranks,
            attempt=attempt,
            layout=layout_of(self.config, self.plan),
            identity=self.identity | {"run.precision": precision},
            versions=versions(),
        )

    def checkpoints(self, rank: int) -> Checkpoints:
        """The checkpoints of a rank of this run."""
        return Checkpoints(Path(self.config.run.output), rank=rank, keep=self.config.run.keep)


def prepare(config: TrainConfig, *, ranks: int, rank: int = 0) -> Prepared:
    """Check a configuration for a number of ranks, and read its text.

    Raises:
        ConfigError: anything that would keep the run from starting, in one line.
    """
    of_pipeline = ranks_of_pipeline(ranks, config.pipeline.data_parallel)
    plan = make_layout(config.pipeline, ranks=of_pipeline, layers=count_layers(config.model))
    codecs = make_codecs(config.pipeline, plan.stages - 1)
    check_codecs(codecs, width=hidden_size(config.model), warmup_steps=config.codec_warmup_steps)
    activations = saved_policies(config.activations, plan.stages)
    check_schedule(activations, config.pipeline.schedule)
    device = choose_device(config.run.device, ranks)
    backend = choose_backend(config, device, ranks)
    storage, all_reduce = storage_codec(config.gradients), all_reduce_codec(config.gradients)
    output = Path(config.run.output)
    check_output(config)
    longest = longest_sequence(config.model)
    if longest is not None and config.data.sequence > longest:
        raise ConfigError(
            f"data.sequence is {config.data.sequence}; the model knows {longest} positions; allowed: at most as many"
        )
    data = load_data(config.data, cache=output / "cache")
    vocab = vocabulary(config.model, data.tokenizer.size)
    identity = run_identity(config, data=data, vocab=vocab)
    check_allowed(config.run.allow_change, identity)
    if config.run.resume and not _launched():
        _check_resume(config, identity)
    return Prepared(
        config=config,
        plan=plan,
        codecs=codecs,
        activations=activations,
        storage=storage,
        all_reduce=all_reduce,
        data=data,
        vocab=vocab,
        device=device,
        backend=backend,
        identity=identity,
    )


def check_output(config: TrainConfig) -> None:
    """Check that `run.output` can be written to, and that nothing is in the way that lowbit did not make.

    Raises:
        ConfigError: the folder cannot be used.
    """
    run, output = config.run, Path(config.run.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"run.output {str(output)!r} cannot be written to: {reason}") from error
    folder = RunFolder(output)
    if os.path.lexists(output / MARK) and not folder.marked:
        raise ConfigError(f"run.output {str(output)!r} has a {MARK} that is no regular file; allowed: another folder")
    if not _launched() and (holder := folder.in_use()):
        raise ConfigError(IN_USE.format(str(output), holder))
    if run.resume:
        _refuse_older(output / FOLDER)
    if foreign := _in_the_way(config, folder):
        known = "" if folder.marked else f" (there is no {MARK}: lowbit has not run here, or an older one)"
        raise ConfigError(
            f"run.output {str(output)!r} holds {', '.join(foreign)}, which lowbit has no record of making{known}; "
            "nothing was touched; allowed: another folder, or to move these away"
        )
    there = [name for name in (*FILES, *_FOLDERS) if (output / name).exists()]
    if folder.marked and there and not (run.resume or run.overwrite):
        raise ConfigError(
            f"run.output {str(output)!r} holds a run already ({', '.join(there)}); allowed: another folder, "
            "run.resume=true to go on from its newest checkpoint, or run.overwrite=true to throw it away"
        )
    if run.overwrite and (beyond := folder.out_of_reach()):
        raise ConfigError(
            f"run.output {str(output)!r} has {beyond[0]} of an older run behind a symbolic link, where run.overwrite "
            f"removes nothing ({len(beyond)} files); allowed: another folder, or to remove them by hand"
        )


def _launched() -> bool:
    """Whether this is a rank among others, which find out together what has to do with all of them."""
    return "RANK" in os.environ or dist.is_initialized()


def _in_the_way(config: TrainConfig, folder: RunFolder) -> list[str]:
    """Files that stand where lowbit wants to write or looks for its own, and that it did not make."""
    files = [*FILES]
    if config.run.save_model:
        found = (folder.path / "model").iterdir() if (folder.path / "model").is_dir() else ()
        files += [f"model/{path.name}" for path in found if MODEL_FILES.fullmatch(path.name)]
    files += [name for name in _FOLDERS if (folder.path / name).is_file()]
    if not config.run.resume:  # a resume may well begin with shares that were brought here
        files += [
            str(file.relative_to(folder.path))
            for step in steps_in(folder.path / FOLDER).values()
            for share in shares_in(step).values()
            for file in sorted(share.iterdir())
        ]
    return folder.foreign(files)


def left_behind(output: Path) -> str:
    """What to say where a run that begins with step 0 finds shares that a later resume would take for its own."""
    if not (shares := [s for s in _shares(output / FOLDER) if (s / MANIFEST).exists()]):
        return ""
    return (
        f"{shares[0]} is still there, and a later run.resume would go on from it; "
        "allowed: another folder, or to remove it"
    )


def _refuse_older(folder: Path) -> None:
    """Raise where all that a resume could begin with is of a format that is not read."""
    reasons = []
    for share in _shares(folder):
        try:
            read_manifest(share)
            return
        except DamagedError as error:
            reasons.append((share, str(error)))
    if reasons and all(reason == OLDER for _, reason in reasons):
        raise ConfigError(f"checkpoint {reasons[0][0]} {OLDER}; allowed: a new run in another folder")


def _shares(folder: Path) -> list[Path]:
    """Shares in a folder of checkpoints, of the newest step first."""
    return [s for step in reversed(steps_in(folder).values()) for s in shares_in(step).values()]


def _check_resume(config: TrainConfig, identity: dict[str, Any]) -> None:
    """What manifests here tell, where all ranks are on this machine. Elsewhere they find out together."""
    folder, run = Path(config.run.output) / FOLDER, config.run
    known = {key: value for key, value in identity.items() if key != "run.precision"}
    shares = _shares(folder)
    if not shares and run.resume is True:
        raise ConfigError(NO_CHECKPOINT.format(folder))
    for share in shares:
        try:
            found = read_manifest(share)
        except DamagedError:
            continue  # the ranks together see what else there is
        changes = changes_between(found.identity, known, step=found.step)
        if problem := refuse(f"checkpoint {share.parent}", changes, run.allow_change):
            raise ConfigError(problem)
        return
