"""Checkpoints that are whole or absent, and from which a run goes on bit for bit.

    checkpoints/step-00000100/rank-0/   what rank 0 needs: a torch.distributed.checkpoint and run.json
                              rank-1/   ... on the disk of rank 1's machine, which may be another
    checkpoints/latest                  the name of the newest step that all ranks have finished

Each rank writes its own share, since several machines need not have a disk in common, into a hidden folder that is
flushed to disk and then renamed. A crash at any moment leaves older checkpoints as they were. On resume the ranks take
the newest step of which every one of them has its share.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lowbit.codecs import parse
from lowbit.train.boundaries import in_full
from lowbit.train.config import FULL_PRECISION, TrainConfig
from lowbit.train.section import ConfigError

_RUN = "run.json"


class Checkpoints:
    """The checkpoints of one rank.

    Args:
        folder: of all checkpoints of the run; rank: whose share; keep: how many stay.
        facts: what a run must have in common with the one that wrote a checkpoint (`run_facts`).
    """

    def __init__(self, folder: Path, *, rank: int, keep: int, facts: Mapping[str, Any]) -> None:
        self.folder, self.rank, self.keep, self.facts = folder, rank, keep, dict(facts)

    def steps(self) -> list[int]:
        """Steps of which this rank has its whole share, in ascending order."""
        found = (path.parent.name for path in self.folder.glob(f"step-*/rank-{self.rank}"))
        return sorted(int(name.removeprefix("step-")) for name in found)

    def latest(self, group: dist.ProcessGroup | None = None) -> int | None:
        """The newest step that all ranks have, to be called by each of them; None if there is none."""
        everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.steps(), group=group)
        common = set.intersection(*map(set, everyone))
        if not common and any(everyone):
            told = "; ".join(f"rank {r}: {steps or 'none'}" for r, steps in enumerate(everyone))
            raise ConfigError(f"no checkpoint in {self.folder} that all ranks have; {told}")
        return max(common, default=None)

    def save(
        self, step: int, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        """Write this rank's share of a step, wait for the others, and drop what is older than the last `keep`.

        Args:
            step: steps done so far. tensors: everything to be found again, by name.
        """
        target = self._share(step)
        part = target.with_name(f".{target.name}")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it saves one process: this is meant
            save(dict(tensors), checkpoint_id=part, no_dist=True)
        _write(part / _RUN, json.dumps(self.facts | {"step": step}, indent=2))
        _sync_folder(part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        _sync_folder(target.parent)
        dist.barrier(group=group)
        _write(self.folder / "latest", target.parent.name)
        for old in self.steps()[: -self.keep]:
            self._drop(old)

    def load(self, step: int) -> dict[str, Tensor]:
        """Everything that `save` was given.

        Raises:
            ConfigError: the checkpoint is of a run that differs in a fact that may not change.
        """
        self.check(step)
        reader = FileSystemReader(self._share(step))
        tensors: dict[str, Tensor] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    def check(self, step: int) -> None:
        """Raise a ConfigError if this run may not go on from that step."""
        share = self._share(step)
        written = json.loads((share / _RUN).read_text(encoding="utf-8"))
        for key, value in self.facts.items():
            was = written.get(key)
            try:
                same = _meant(was) == _meant(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"checkpoint {share} was written with {key} = {was}, which can not be read any more: {error}"
                ) from error
            if not same:
                raise ConfigError(
                    f"checkpoint {share} was written with {key} = {was}, this run has {value}; "
                    "allowed: the same (start from the saved model with model.pretrained to change it)"
                )

    def _share(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}" / f"rank-{self.rank}"

    def _drop(self, step: int) -> None:
        """Remove this rank's share; the last rank's removal takes the folder along."""
        share = self._share(step)
        hidden = share.with_name(f".{share.name}")
        share.rename(hidden)  # never half a share under its own name
        shutil.rmtree(hidden)
        with contextlib.suppress(OSError):  # another rank's share is still there
            share.parent.rmdir()


def run_facts(config: TrainConfig, *, ranks: int, stages: int) -> dict[str, Any]:
    """What may not change between the run that wrote a checkpoint and the one that goes on from it."""
    lowbit = config.pipeline.boundary == "lowbit"
    storage = config.gradients.storage
    replicas = config.pipeline.data_parallel
    formats = in_full(config.pipeline)
    between = {"gradients.all_reduce": config.gradients.all_reduce} if replicas > 1 else {}
    return {
        "ranks": f"{replicas} x {ranks}" if replicas > 1 else ranks,
        **between,
        "pipeline stages": stages,
        "pipeline.schedule": config.pipeline.schedule,
        "pipeline.microbatches": config.pipeline.microbatches,
        "pipeline.boundary": config.pipeline.boundary,
        "pipeline.forward": list(formats.forward) if lowbit else [],
        "pipeline.backward": list(formats.backward) if lowbit else [],
        # Older checkpoints do not tell, because there was nothing but full precision.
        "gradients.storage": None if storage == FULL_PRECISION else storage,
        "data.batch": config.data.batch,
        "data.sequence": config.data.sequence,
        "run.seed": config.run.seed,
    }


def _meant(fact: Any) -> Any:
    """A list of formats as codecs: older checkpoints have names, for what these mean now. Any other fact as it is."""
    return [parse(text) for text in fact] if isinstance(fact, list) else fact


def pack(value: Any) -> Tensor:
    """Anything `torch.save` takes, as a uint8 tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """What `pack` was given, on the CPU: tensors, numbers, strings and containers of them."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


def _write(path: Path, text: str) -> None:
    """Replace a file so that it is never seen half written, and survives a crash of the machine."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_step(folder: Path) -> int | None:
    """The newest step that all ranks have finished; None without one."""
    latest = folder / "latest"
    return int(latest.read_text().removeprefix("step-")) if latest.exists() else None
