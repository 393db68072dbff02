"""Everything that can be wrong with a run, found before a process group or process exists."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.codecs import Codec
from lowbit.train.activations import Policies, saved_policies
from lowbit.train.boundaries import Codecs, check_codecs, make_codecs, stock_dtype
from lowbit.train.checkpoint import Checkpoints, run_facts
from lowbit.train.config import TrainConfig
from lowbit.train.data import Data, load_data
from lowbit.train.device import choose_autocast, choose_backend, choose_device
from lowbit.train.gradients import storage_codec
from lowbit.train.model import count_layers, hidden_size, longest_sequence, vocabulary
from lowbit.train.plan import Plan, make_plan
from lowbit.train.replicas import all_reduce_codec, ranks_of_pipeline
from lowbit.train.section import ConfigError

OUTPUTS = ("metrics.jsonl", "summary.json", "config.json", "checkpoints", "tensorboard", "model")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A configuration with all that follows from it on this machine."""

    config: TrainConfig
    plan: Plan
    codecs: Codecs
    activations: Policies
    storage: Codec | None
    all_reduce: Codec
    data: Data
    vocab: int
    device: torch.device
    backend: str

    @property
    def autocast(self) -> torch.dtype | None:
        """What matrix products are computed in; None: as the weights. Only asked for where a rank computes."""
        return choose_autocast(self.config.run.precision, self.device)

    @property
    def wire(self) -> torch.dtype:
        """What stages hand to their boundaries: bfloat16 where a stock stage shall send that."""
        return stock_dtype(self.config.pipeline)

    def checkpoints(self, rank: int) -> Checkpoints:
        """The checkpoints of a rank of this run."""
        config = self.config
        return Checkpoints(
            Path(config.run.output) / "checkpoints",
            rank=rank,
            keep=config.run.keep,
            facts=run_facts(config, ranks=self.plan.ranks, stages=self.plan.stages),
        )


def prepare(config: TrainConfig, *, ranks: int, rank: int = 0) -> Prepared:
    """Check a configuration for a number of ranks, and read its text.

    Raises:
        ConfigError: anything that would keep the run from starting, in one line.
    """
    of_pipeline = ranks_of_pipeline(ranks, config.pipeline.data_parallel)
    plan = make_plan(config.pipeline, ranks=of_pipeline, layers=count_layers(config.model))
    codecs = make_codecs(config.pipeline, plan.stages - 1)
    check_codecs(codecs, width=hidden_size(config.model), warmup_steps=config.codec_warmup_steps)
    activations = saved_policies(config.activations, plan.stages)
    device = choose_device(config.run.device, ranks)
    backend = choose_backend(config, device, ranks)
    storage = storage_codec(config.gradients)
    output = Path(config.run.output)
    _check_output(config, output)
    longest = longest_sequence(config.model)
    if longest is not None and config.data.sequence > longest:
        raise ConfigError(
            f"data.sequence is {config.data.sequence}; the model knows {longest} positions; allowed: at most as many"
        )
    data = load_data(config.data, cache=output / "cache")
    found = Prepared(
        config=config,
        plan=plan,
        codecs=codecs,
        activations=activations,
        storage=storage,
        all_reduce=all_reduce_codec(config.gradients),
        data=data,
        vocab=vocabulary(config.model, data.tokenizer.size),
        device=device,
        backend=backend,
    )
    if config.run.resume:
        _check_resume(found, rank)
    return found


def _check_output(config: TrainConfig, output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.output {str(output)!r} can not be written to: {error.strerror}"
        ) from error
    there = [name for name in OUTPUTS if (output / name).exists()]
    if there and not (config.run.resume or config.run.overwrite):
        raise ConfigError(
            f"run.output {str(output)!r} holds a run already ({', '.join(there)}); allowed: another folder, "
            "run.resume=true to go on from its newest checkpoint, or run.overwrite=true to throw it away"
        )


def _check_resume(found: Prepared, rank: int) -> None:
    """What a checkpoint on this machine tells without the other ranks."""
    folder = Path(found.config.run.output) / "checkpoints"
    written = sorted(folder.glob("step-*/rank-*"))
    if not written:
        return
    checkpoints = found.checkpoints(rank)
    if steps := checkpoints.steps():
        checkpoints.check(steps[-1])
    else:  # of fewer ranks than this run has
        other = Checkpoints(
            folder,
            rank=int(written[-1].name.removeprefix("rank-")),
            keep=2,
            facts=checkpoints.facts,
        )
        other.check(other.steps()[-1])
