"""A whole run on one rank: training, evaluation, checkpoints and the files that it writes."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.ranks.messages import Messages
from lowbit.ranks.objects import gather_json
from lowbit.ranks.process_group import joined, world
from lowbit.train import export
from lowbit.train.boundaries import costly, in_full
from lowbit.train.checkpoints import state
from lowbit.train.checkpoints.resume import resume
from lowbit.train.checkpoints.save import Checkpoints, raise_everywhere, together
from lowbit.train.config import TrainConfig
from lowbit.train.device import local_rank, threads_per_rank
from lowbit.train.distance import needless, round_trips
from lowbit.train.folder import RunFolder
from lowbit.train.metrics import Recorder, StepMetrics
from lowbit.train.prepare import FILES, IN_USE, left_behind, prepare
from lowbit.train.progress import Progress, first_on_machine, machine_name
from lowbit.train.summary import Summary, summarize
from lowbit.train.trainer import Trainer

log = logging.getLogger(__name__)


def train(config: TrainConfig, *, on_step: Callable[[StepMetrics], None] | None = None) -> Summary:
    """Train, evaluate and save; call it on every rank of the environment (RANK, WORLD_SIZE, MASTER_*).

    Without such an environment this process trains alone. A process group that exists is used, otherwise one is made
    for the run. If another rank fails while this one is blocked for good, this process ends (`lowbit.ranks.peers`).

    Args:
        config: the same on every rank.
        on_step: called after every step, on every rank, with metrics over all ranks.

    Raises:
        ConfigError: (before anything starts) a configuration that cannot work, in one line.
        AgreementError: ranks with different configurations, texts or versions.
        PeerError: another rank ended the run; the message names it.
        DivergedError: NaN or infinity in loss or gradients.
        CheckpointError: there is none to resume from, or another run uses the folder; TransientError: none can be
            written.
    """
    _, ranks = world()
    prepared = prepare(config, ranks=ranks)
    run = config.run
    if run.threads or ranks > 1:
        torch.set_num_threads(run.threads or threads_per_rank(ranks))
    patience = run.rejoin_seconds if run.supervise else None
    with joined(run.timeout_seconds, backend=prepared.backend, patience=patience):
        return Run(Trainer(prepared)).finish(on_step)


class Run:
    """A run from the step that it begins with; to be made on every rank. Its folder stays locked until it ends.

    Raises:
        CheckpointError: there is no checkpoint to resume from, or another run uses the folder.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.config = trainer, trainer.config
        run = self.config.run
        self.output = Path(run.output)
        self.folder = RunFolder(self.output)
        self.recorder: Recorder | None = None  # on rank 0
        self.progress: Progress | None = None  # on the first rank of each machine
        self.checkpoints = Checkpoints(self.output, rank=trainer.rank, keep=run.keep)
        self._warn_of_cost()
        self.round_trip = self._measure_distance()
        stated = gather_json([secrets.token_hex(8), machine_name()], trainer.side)
        attempt, self._shows = stated[0][0], first_on_machine(trainer.rank, [machine for _, machine in stated])
        self.manifest = trainer.prepared.manifest(attempt, rank=trainer.rank, ranks=trainer.ranks)
        try:
            self.start = self._begin()
        except BaseException:
            self.folder.unlock()
            raise

    def finish(self, on_step: Callable[[StepMetrics], None] | None = None) -> Summary:
        """Run the remaining steps and the final evaluation, and save the model."""
        run, trainer = self.config.run, self.trainer
        history: list[StepMetrics] = []
        try:
            self.recorder, self.progress = self._open_recorder(), self._open_progress()
            done = self.start
            while done < run.steps:
                history.append(trainer.step(done))
                done = history[-1].step
                for watcher in self._watchers:
                    watcher.record(history[-1])
                if on_step is not None:
                    on_step(history[-1])
                if done == self.config.codec_warmup_steps:
                    for place, codec in trainer.chosen().items():
                        if self.progress is not None:
                            self.progress.say(f"{place}: {codec}")
                if run.checkpoint_every and (done % run.checkpoint_every == 0 or done == run.steps):
                    snapshot = state.collect(trainer.pipeline, trainer.optimizer)
                    self.checkpoints.save(done, snapshot, self.manifest, trainer.side)
                if run.eval_every and done % run.eval_every == 0 and done < run.steps:
                    self._evaluate(done)
            return self._conclude(history)
        finally:
            if trainer.elastic is not None:
                trainer.elastic.close()
            for watcher in self._watchers:
                watcher.close()
            self.folder.unlock()

    @property
    def _watchers(self) -> list[Recorder | Progress]:
        """What this rank writes and shows each step with."""
        return [watcher for watcher in (self.recorder, self.progress) if watcher is not None]

    def _begin(self) -> int:
        """Restore the newest checkpoint, or clear the output folder; returns the step to start with."""
        run, trainer = self.config.run, self.trainer
        # Rank 0 alone: several machines may share the folder.
        holder = self.folder.lock() if trainer.rank == 0 else ""
        raise_everywhere(IN_USE.format(str(self.output), holder) if holder else "", trainer.side)
        done = 0
        if run.resume:
            done, changes = resume(
                self.checkpoints, trainer.pipeline, trainer.optimizer, self.manifest,
                replica=trainer.replicas.index, run=run, group=trainer.side,
            )  # fmt: skip
            self.manifest = replace(self.manifest, changes=changes)
        if run.overwrite and local_rank() == 0:
            self.folder.clear()
        if trainer.elastic is not None:
            trainer.elastic.resume(done)
        dist.barrier(group=trainer.side)
        if not run.resume:
            raise_everywhere(left_behind(self.output), trainer.side)
        if trainer.rank == 0:
            self.folder.note(*FILES)
            written = replace(self.config, pipeline=in_full(self.config.pipeline)).to_json()
            (self.output / "config.json").write_text(written + "\n", encoding="utf-8")
        return done

    def _evaluate(self, step: int) -> dict[str, float]:
        losses = self.trainer.evaluate()
        for watcher in self._watchers if losses else ():
            watcher.record_evaluation(step, losses)
        return losses

    def _conclude(self, history: list[StepMetrics]) -> Summary:
        trainer = self.trainer
        losses = self._evaluate(self.config.run.steps)
        model = self.output / "model" if self.config.run.save_model else None
        if model is not None:
            first = trainer.replicas.index == 0
            weights = export.gather_weights(trainer.modules, self._messages("saving")) if first else {}
            together(partial(self._save_model, weights), trainer.side)
        summary = summarize(
            self.config, trainer.layout, history, losses, chosen=trainer.chosen(), model=model,
            changes=self.manifest.changes, round_trip=self.round_trip,
        )  # fmt: skip
        if trainer.rank == 0:
            text = json.dumps(asdict(summary), indent=2)
            (self.output / "summary.json").write_text(text + "\n", encoding="utf-8")
        dist.barrier(group=trainer.side)
        return summary

    def _save_model(self, weights: dict[str, Tensor]) -> None:
        """Write the trained model on rank 0, which may take longer than the time limit."""
        if self.trainer.rank == 0:
            staging = self.folder.staging("model")
            export.save_model(staging, weights, self.trainer.model_config, self.trainer.prepared.data.tokenizer)
            self.folder.adopt(staging, "model")

    def _open_recorder(self) -> Recorder | None:
        if self.trainer.rank != 0:
            return None
        run, board = self.config.run, self.output / "tensorboard"
        if run.tensorboard and not board.exists():
            self.folder.note("tensorboard/")
        before = set(board.glob("*"))
        recorder = Recorder(self.output, start=self.start, tensorboard=run.tensorboard)
        if curves := sorted(f"tensorboard/{path.name}" for path in set(board.glob("*")) - before):
            self.folder.note(*curves)
        return recorder

    def _open_progress(self) -> Progress | None:
        run = self.config.run
        if not (run.progress and self._shows):
            return None
        return Progress(run.steps, warmup=self.config.codec_warmup_steps)

    def _messages(self, topic: str) -> Messages:
        """Messages between the ranks of this pipeline."""
        run = self.config.run
        return Messages(self.trainer.replicas.side, topic, timeout=run.timeout_seconds, checksums=run.checksums)

    def _warn_of_cost(self) -> None:
        if self.trainer.rank == 0:  # not in `prepare`, which a launcher runs beside its ranks
            shape = (self.config.rows, self.config.data.sequence, self.trainer.width)
            for line in costly(self.trainer.prepared.codecs, shape):
                log.warning("%s", line)
            if self.config.activations.plan and self.trainer.prepared.autocast is None:
                log.warning("activations.plan counts bytes of matrix products in bfloat16; float32's are saved here")

    def _measure_distance(self) -> float | None:
        """The longest round trip between neighbours of a pipeline, in seconds; warns of a costly layout."""
        layout = self.trainer.layout
        if layout.ranks == 1:
            return None
        own = list(round_trips(self._messages("distance")).items())
        trips: list[dict[tuple[int, int], float]] = [{} for _ in range(self.trainer.replicas.count)]
        for rank, measured in enumerate(gather_json(own, self.trainer.side)):
            pipeline, place = divmod(rank, layout.ranks)
            for other, seconds in measured:
                trips[pipeline][min(place, other), max(place, other)] = seconds
        warnings = [needless(layout, self.config.pipeline.schedule, each) for each in trips]
        if self.trainer.rank == 0 and (warning := next(filter(None, warnings), None)):
            log.warning("%s", warning)
        return max(max(each.values()) for each in trips)
