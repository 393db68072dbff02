"""A whole run on one rank: training, evaluation, checkpoints and output files."""

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist

from lowbit import escape, files
from lowbit.wire.messages import gather_json
from lowbit.wire.pytorch import check_torch
from lowbit_run.job.launch import PULSE
from lowbit_run.job.process_group import joined, open_store, world
from lowbit_run.job.stop import StoppedError, StopRequest, end_rank, stop_requests
from lowbit_run.report.command import machine
from lowbit_run.report.training import write_report
from lowbit_run.train.adapt import Adaptation
from lowbit_run.train.boundaries import in_full
from lowbit_run.train.checkpoints import state
from lowbit_run.train.checkpoints.manifest import Manifest
from lowbit_run.train.checkpoints.resume import resume
from lowbit_run.train.checkpoints.save import Checkpoints, raise_everywhere
from lowbit_run.train.config import ANCHOR_TOKENS, TrainConfig
from lowbit_run.train.device import local_rank, threads_per_rank
from lowbit_run.train.folder import FILES, IN_USE, RunFolder
from lowbit_run.train.identity import layout_of, versions
from lowbit_run.train.members import evaluation_bytes
from lowbit_run.train.metrics import EVALUATION, StepMetrics, Summary, from_json, summarize
from lowbit_run.train.observe import Observers
from lowbit_run.train.prepare import prepare
from lowbit_run.train.progress import phase
from lowbit_run.train.save_model import SavedModel
from lowbit_run.train.tracing import Tracing
from lowbit_run.train.trainer import Trainer
from lowbit_run.train.words import Words

log = escape.logger(__name__)

_FIRST_STEP = "computing the first step, which takes longer than the others: it compiles kernels"


def train(config: TrainConfig, *, on_step: Callable[[StepMetrics], bool | None] | None = None) -> Summary:
    """Train, evaluate and save; call it on every rank of the environment (RANK, WORLD_SIZE, MASTER_*).

    Without such an environment this process trains alone. An existing process group is used; otherwise one is made for
    the run. If another rank fails while this one is blocked for good, this process ends (`lowbit_run.job.peers`).

    Args:
        config: the same on every rank.
        on_step: called after every step, on every rank, with metrics over all ranks. If it returns true, which it must
            do on all ranks or none, training ends after this step as after the last one.

    Raises:
        ConfigError: (before anything starts) the configuration cannot work.
        AgreementError: ranks have different configurations, texts or versions.
        PeerError: another rank ended the run; the message names it.
        DivergedError: loss or gradients are NaN or infinite.
        StoppedError: SIGTERM or Ctrl-C asked a rank to end, so all ranks saved a checkpoint and ended. Only where
            the main thread trains and the program has no handler of its own; a second signal ends the process at once.
        CheckpointError: there is no checkpoint to resume from, or another run uses the folder. TransientError: a
            checkpoint cannot be written.
    """
    rank, ranks = world()
    run = config.run
    open_store()
    with phase("reading the text and checking the settings", rank, show=run.progress):
        prepared = prepare(config, ranks=ranks)
    share = threads_per_rank(ranks)
    torch.set_num_threads(run.threads or (share if ranks > 1 else min(share, torch.get_num_threads())))
    patience = run.rejoin_seconds if run.supervise else None
    with ExitStack() as left, joined(run.timeout_seconds, backend=prepared.backend, patience=patience):
        # Before, a signal ends the process at once: there is no step to wait for. After the last step it is only noted
        # until the ranks have left each other.
        stop = left.enter_context(stop_requests(run.grace_seconds, _note_stop, end_rank))
        check_torch()
        with phase("loading the model, on all ranks", rank, show=run.progress):
            trainer = Trainer(prepared, stop)
        begin = "restoring the newest checkpoint" if run.resume else "opening the run folder"
        with phase(f"measuring links, compiling formats and {begin}", rank, show=run.progress):
            started = Run(trainer)
        return started.finish(on_step)


def _note_stop(request: StopRequest) -> None:
    if PULSE not in os.environ and local_rank() == 0:  # otherwise the launcher or that rank says so
        log.warning("%s: the run stops after this step; a second signal ends it at once", request.name)


class Run:
    """A run from its first or resumed step on; every rank makes one. Its folder stays locked until it ends.

    The trainer takes the steps. After each, in this order, observers record it, formats and connections adapt, a
    checkpoint is saved, and held-out text is evaluated.

    Raises:
        CheckpointError: there is no checkpoint to resume from, or another run uses the folder.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.members, self.config = trainer, trainer.members, trainer.members.config
        self.folder = RunFolder(Path(self.config.run.output))
        if self.members.rank == 0:  # not in `prepare`, which all ranks run
            self._log_notes()
        self.observers = Observers(self.members, self.folder)
        self.adaptation = Adaptation(trainer, self.observers)
        gathered = gather_json([secrets.token_hex(8), machine()], self.members.side)
        self.saves = Saves(trainer, self.folder, gathered[0][0], self.adaptation.chosen)
        self.words, self.written, self._words_bytes = Words(trainer), dict[str, str](), 0
        if self.words.missing and self.members.rank == 0:
            log.warning("%s", self.words.missing)
        try:
            self.saves.begin(self.adaptation.take_over)
            self.observers.write_about(**self.adaptation.describe([facts for _, facts in gathered]))
        except BaseException:
            self.folder.unlock()
            raise

    def finish(self, on_step: Callable[[StepMetrics], bool | None] | None = None) -> Summary:
        """Run the remaining steps and the final evaluation, and save the model."""
        run, trainer, start = self.config.run, self.trainer, self.saves.start
        auto = self.adaptation.auto
        try:
            self.observers.open(start)
            self.saves.stop_if_asked(start)
            if self.members.rank == 0 and self.members.prepared.anchor and not start:
                self._log_anchor()  # a run that resumes says which ones are fitted to fewer tokens
            before = {} if start else self._look_at_untrained()
            tracing = Tracing(self.members, trainer.pipeline, self.folder, start) if run.trace else None
            if auto is not None and auto.choice is not None:  # from the checkpoint
                self.observers.note_formats(auto.choice)
            done, steps_here = start, 0
            while done < run.steps:
                with (
                    nullcontext() if tracing is None else tracing.step(done + 1) as trace,
                    nullcontext() if steps_here else phase(_FIRST_STEP, self.members.rank, show=run.progress),
                ):
                    trainer.sums.wants_checkpoint = self.saves.due_by_clock()
                    metrics = trainer.step(done, trace)
                done, steps_here = metrics.step, steps_here + 1
                self.observers.record(metrics)
                last = bool(on_step is not None and on_step(metrics)) or done >= run.steps
                self.end_step(metrics, last=last)
                if last:
                    break
            return self._conclude(done, steps_here, before)
        finally:
            try:
                if trainer.elastic is not None:
                    trainer.elastic.close()
                self.observers.close()
                if self.members.rank == 0 and run.report and self.folder.marked:
                    write_report(self.folder.path)
            finally:  # or this process, such as a notebook, could not use the folder again
                self.folder.unlock()

    def end_step(self, metrics: StepMetrics, *, last: bool) -> None:
        """Do what is due after a step: choose formats, save a checkpoint, evaluate."""
        run, sums, done = self.config.run, self.trainer.sums, metrics.step
        self.adaptation.end_step(metrics, last=last)
        # To ask all ranks for signals takes a round trip: only if one came, or something long gave it time to.
        long = sums.stop_asked
        if run.checkpoint_every and (done % run.checkpoint_every == 0 or last or sums.checkpoint_due):
            self.saves.save(done)
            long = True
        if run.eval_every and done % run.eval_every == 0 and not last and not sums.stop_asked:
            self._evaluate(done)
            long = True
        if long and not last:  # the last step's run finishes within the grace time
            self.saves.stop_if_asked(done)

    def _log_notes(self) -> None:
        prepared, model = self.members.prepared, self.trainer.model.config
        for note in prepared.data.notes:
            log.warning("%s", note)
        if self.config.activations.plan and prepared.autocast is None:
            log.warning("activations.plan counts bytes of matrix products in bfloat16; float32's are saved here")
        if prepared.identity["model.tied"] is True and not model.tie_word_embeddings:
            log.warning(
                "model.pretrained is %r, which ties embedding and output matrix, but has two different ones: both "
                "are trained, and saved as two", self.config.model.pretrained,
            )  # fmt: skip

    def _log_anchor(self) -> None:
        config = self.config
        tokens, few = config.warmup_tokens, f"; with fewer than {ANCHOR_TOKENS:,}, they help less"
        log.warning(
            "pipeline.anchor: the warm-up has %d of %d steps, and token anchors are fitted to its %s tokens%s",
            config.codec_warmup_steps, config.run.steps, f"{tokens:,}", few * (tokens < ANCHOR_TOKENS),
        )  # fmt: skip

    def _evaluate(self, step: int, *, with_codecs: bool = True) -> dict[str, float]:
        sent = evaluation_bytes()
        losses = self.trainer.evaluate(with_codecs=with_codecs)
        if losses:
            nbytes = round(self.trainer.sums.total(evaluation_bytes() - sent))
            self.observers.record_evaluation(step, losses, nbytes)
        return losses

    def _look_at_untrained(self) -> dict[str, float]:
        """Let the model write before the first step, and return its held-out scores: of samples only."""
        self._write("before training")
        scores: dict[str, float] = {}
        if self.config.data.format == "jsonl":
            self.observers.say(self.members.prepared.data.described())
            scores = self._evaluate(0, with_codecs=False)
        self.saves.stop_if_asked(0)
        return scores

    def _write(self, when: str) -> None:
        """Let the model write after the prompt of the run, and show and note the words."""
        sent = evaluation_bytes()
        with phase(f"writing a few words {when}", self.members.rank, show=self.config.run.progress):
            written = self.words.write()
        self._words_bytes += evaluation_bytes() - sent
        if written:
            self.written |= {"prompt": written["prompt"], when: written["words"]}
            self.observers.say(f"{when}, after {written['prompt']} the model writes {written['words']}")

    def _conclude(self, done: int, steps_here: int, before: dict[str, float]) -> Summary:
        """Save the model after this call's steps, and summarize the whole run; returns the same on every rank."""
        trainer, members, observers, show = self.trainer, self.members, self.observers, self.config.run.progress
        with phase("evaluating held-out text", members.rank, show=show):
            losses = self._evaluate(done)
        self._write("after training")
        model = self.folder.path / "model" if self.config.run.save_model else None
        if model is not None:
            with phase("saving the model on rank 0", members.rank, show=show):
                SavedModel(members, trainer.model, self.folder).write()
        checked = self.adaptation.checked_bytes + self._words_bytes
        sent = members.sent_outside_steps() | ({EVALUATION: checked} if checked else {})
        gathered = gather_json([trainer.memory(), sent], members.side)
        summary: dict[str, Any] = {}
        if observers.recorder is not None:  # it also has the steps of earlier attempts
            evaluations = observers.recorder.evaluations
            summary = asdict(
                summarize(
                    self.config, members.layout, observers.recorder.history, losses, chosen=trainer.rates.chosen(),
                    model=model, here=steps_here, changes=self.saves.manifest.changes,
                    round_trip=self.adaptation.probes.round_trip,
                    before=before or evaluations.get(0, {}), words=self.written,
                    formats=[asdict(choice) for choice in observers.choices],
                    outside=[*({EVALUATION: line.get("bytes_sent", 0)} for line in evaluations.values()),
                            *(sent for _, sent in gathered)],
                )
            )  # fmt: skip
            files.write(self.folder.path / "summary.json", json.dumps(summary, indent=2) + "\n")
            observers.write_about(memory=[memory for memory, _ in gathered])
        return from_json(gather_json(summary, members.side)[0])


class Saves:
    """Restores a run from its newest checkpoint, and saves others; every rank makes one.

    Args:
        attempt: token of rank 0, which every checkpoint of this process group carries.
        chosen: returns what the run itself has chosen, by key of the identity, for a checkpoint.

    Attributes:
        start: steps done when this attempt began. manifest: what all checkpoints of this rank share.
    """

    def __init__(
        self, trainer: Trainer, folder: RunFolder, attempt: str, chosen: Callable[[], Mapping[str, Any]]
    ) -> None:
        members, run = trainer.members, trainer.members.config.run
        self._trainer, self._folder, self._chosen = trainer, folder, chosen
        self._checkpoints = Checkpoints(folder.path, rank=members.rank, keep=run.keep)
        precision = "fp32" if members.prepared.autocast is None else "bf16"
        self.manifest = Manifest(
            rank=members.rank, ranks=members.ranks, attempt=attempt,
            layout=layout_of(members.config, members.layout),  # pyright: ignore[reportArgumentType]  # pydantic makes it
            identity=members.prepared.identity | {"run.precision": precision}, versions=versions(),
        )  # fmt: skip
        self.start = self._newest = 0  # step of the newest checkpoint
        self._saved_at = time.monotonic()

    def begin(self, take_over: Callable[[int, Mapping[str, Any]], str]) -> None:
        """Restore the newest checkpoint, or clear the output folder; `take_over`: as for `resume`."""
        trainer, members, folder = self._trainer, self._trainer.members, self._folder
        config, run = members.config, members.config.run
        # Only rank 0 locks the folder, which several machines may share.
        holder = folder.lock() if members.rank == 0 else ""
        raise_everywhere(IN_USE.format(str(folder.path), holder) if holder else "", members.side)
        if run.resume:
            self.start, changes = resume(
                self._checkpoints, trainer.pipeline, trainer.model.optimizer, self.manifest,
                replica=members.replicas.index, run=run, group=members.side, take_over=take_over,
            )  # fmt: skip
            self.manifest = replace(self.manifest, changes=changes)
        if run.overwrite and local_rank() == 0:
            folder.clear()
        if trainer.elastic is not None:
            trainer.elastic.resume(self.start)
        dist.barrier(group=members.side)
        if members.rank == 0:
            folder.note(*FILES)
            data = replace(config.data, date=members.prepared.data.date or config.data.date)
            written = replace(config, pipeline=in_full(config.pipeline), data=data).to_json()
            files.write(folder.path / "config.json", written + "\n")
            if self.start < run.steps:  # it describes an earlier end of this run
                (folder.path / "summary.json").unlink(missing_ok=True)
        self._newest, self._saved_at = self.start, time.monotonic()

    def due_by_clock(self) -> bool:
        """Whether a checkpoint is due by this rank's clock; rank 0's decides."""
        return 0 < 60 * self._trainer.members.config.run.checkpoint_minutes <= time.monotonic() - self._saved_at

    def save(self, done: int) -> None:
        """Save a checkpoint after `done` steps; every rank calls it."""
        pipeline = self._trainer.pipeline
        tensors, codecs = state.collect(pipeline, self._trainer.model.optimizer)
        manifest = replace(
            self.manifest, codecs=codecs, aliases=state.aliases_of(pipeline),
            identity=self.manifest.identity | dict(self._chosen()),
        )  # fmt: skip
        self._checkpoints.save(done, tensors, manifest, self._trainer.members.side)
        self._newest, self._saved_at = done, time.monotonic()

    def stop_if_asked(self, done: int) -> None:
        """Stop after `done` steps on all ranks if a signal asked any of them to, with a checkpoint if there are any."""
        members, run = self._trainer.members, self._trainer.members.config.run
        signals: list[int] = gather_json(self._trainer.sums.stop.number, members.side)
        if not any(signals) or done >= run.steps:
            return
        asked = [f"rank {rank} got {Signals(number).name}" for rank, number in enumerate(signals) if number]
        text = f"stopped after step {done}" if done else "stopped before the first step"
        if run.checkpoint_every and done > self.start and self._newest != done:
            with phase(f"saving a checkpoint of step {done}", members.rank, show=run.progress):
                self.save(done)
        if done and self._newest == done:
            text += ", which is saved"
        elif done > self.start:
            text += ", which is not saved: run.checkpoint_every is 0"
        others = f"{', '.join(asked)}; " if len(asked) < len(signals) else ""
        raise StoppedError(others + text, next(filter(None, signals)))
