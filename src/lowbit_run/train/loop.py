"""A whole run on one rank: training, evaluation, checkpoints and output files."""

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist

from lowbit import escape, files
from lowbit.wire.messages import Messages, gather_json, neighbours, round_trip, send_rate, take_rate
from lowbit.wire.pytorch import check_torch
from lowbit.wire.traffic import sent_so_far
from lowbit_run.job.launch import PULSE
from lowbit_run.job.process_group import joined, open_store, world
from lowbit_run.job.stop import StoppedError, StopRequest, end_rank, stop_requests
from lowbit_run.report.command import machine
from lowbit_run.report.training import write_report
from lowbit_run.train.auto import Auto, FormatChoice, described, why
from lowbit_run.train.boundaries import in_full
from lowbit_run.train.checkpoints import state
from lowbit_run.train.checkpoints.manifest import Manifest
from lowbit_run.train.checkpoints.resume import resume
from lowbit_run.train.checkpoints.save import Checkpoints, TransientError, raise_everywhere, together
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.device import local_rank, threads_per_rank
from lowbit_run.train.export import Export, export_dtype
from lowbit_run.train.folder import FILES, IN_USE, RunFolder
from lowbit_run.train.identity import CHOSEN, RATES, layout_of, versions
from lowbit_run.train.layout import Pair
from lowbit_run.train.links import Connections
from lowbit_run.train.merge import Merged
from lowbit_run.train.metrics import EVALUATION, TIED, Recorder, StepMetrics, Summary, from_json, summarize
from lowbit_run.train.model import save_adapter_config, save_companions, save_config
from lowbit_run.train.prepare import prepare
from lowbit_run.train.progress import Progress, phase
from lowbit_run.train.tracing import Tracing, traced_steps
from lowbit_run.train.trackers import Trackers
from lowbit_run.train.trainer import Trainer
from lowbit_run.train.words import Words

log = escape.logger(__name__)

_FIRST_STEP = "computing the first step, which takes longer than the others: it compiles kernels"
_TRIAL_SECONDS = 1.0  # of the probe of a link with another number of connections


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

    Raises:
        CheckpointError: there is no checkpoint to resume from, or another run uses the folder.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.config = trainer, trainer.config
        run = self.config.run
        self.output = Path(run.output)
        self.folder = RunFolder(self.output)
        self.recorder: Recorder | None = None  # on rank 0 only
        self.progress: Progress | None = None  # on the first rank of each machine only
        self.checkpoints = Checkpoints(self.output, rank=trainer.rank, keep=run.keep)
        if trainer.rank == 0:  # not in `prepare`, which all ranks run
            for note in trainer.prepared.data.notes:
                log.warning("%s", note)
            if self.config.activations.plan and trainer.prepared.autocast is None:
                log.warning("activations.plan counts bytes of matrix products in bfloat16; float32's are saved here")
            if trainer.prepared.identity["model.tied"] is True and not trainer.model_config.tie_word_embeddings:
                log.warning(
                    "model.pretrained is %r, which ties embedding and output matrix, but has two different ones: both "
                    "are trained, and saved as two", self.config.model.pretrained,
                )  # fmt: skip
        self._conversations: dict[str, Messages] = {}
        self.trips = self._measure_distance()
        self.connections = Connections(trainer, self._slowest_rate, self._say)
        self.mbit = trainer.links.rates  # changed in place, for metrics and the progress display
        self._update_rates()
        self._look()
        gathered = gather_json([secrets.token_hex(8), machine()], trainer.side)
        attempt = gathered[0][0]  # every checkpoint of this process group carries rank 0's token
        self.about = trainer.describe_machines([each for _, each in gathered], self.round_trip)
        self.about |= self.connections.facts
        prepared = trainer.prepared
        precision = "fp32" if prepared.autocast is None else "bf16"
        self.manifest = Manifest(  # with what all of this rank's checkpoints share
            rank=trainer.rank, ranks=trainer.ranks, attempt=attempt,
            layout=layout_of(self.config, trainer.layout),  # pyright: ignore[reportArgumentType]  # pydantic makes it
            identity=prepared.identity | {"run.precision": precision}, versions=versions(),
        )  # fmt: skip
        self.auto = Auto(trainer) if self.config.pipeline.is_auto and trainer.layout.ranks > 1 else None
        self.checked_bytes = 0  # sent by this rank for checks of the goal, and for words
        self.words, self.written = Words(trainer), dict[str, str]()
        if self.words.missing and trainer.rank == 0:
            log.warning("%s", self.words.missing)
        self.choices: list[FormatChoice] = []
        try:
            self.start = self.saved = self._begin()  # `saved`: the step of the newest checkpoint
            self.saved_at = time.monotonic()
        except BaseException:
            self.folder.unlock()
            raise

    def finish(self, on_step: Callable[[StepMetrics], bool | None] | None = None) -> Summary:
        """Run the remaining steps and the final evaluation, and save the model."""
        run, trainer = self.config.run, self.trainer
        try:
            self.recorder = self._open_recorder()
            machine_rank = trainer.links.machine_of[trainer.rank]
            if run.progress and machine_rank == trainer.rank:
                warmup = self.config.codec_warmup_steps
                self.progress = Progress(run.steps, warmup=warmup, machine=machine_rank, rates=self.mbit)
            self._stop_if_asked(self.start)
            before = {} if self.start else self._look_at_untrained()
            tracing = self._open_tracing() if run.trace else None
            if self.auto is not None and self.auto.choice is not None:  # from the checkpoint
                self._note_formats(self.auto.choice)
            done, steps_here = self.start, 0
            while done < run.steps:
                with (
                    nullcontext() if tracing is None else tracing.step(done + 1),
                    nullcontext() if steps_here else phase(_FIRST_STEP, trainer.rank, show=run.progress),
                ):
                    trainer.wants_checkpoint = 0 < 60 * run.checkpoint_minutes <= time.monotonic() - self.saved_at
                    metrics = trainer.step(done)
                done, steps_here = metrics.step, steps_here + 1
                for watcher in self._watchers:
                    watcher.record(metrics)
                last = bool(on_step is not None and on_step(metrics)) or done >= run.steps
                self.end_step(metrics, last=last)
                if last:
                    break
            return self._conclude(done, steps_here, before)
        finally:
            try:
                if trainer.elastic is not None:
                    trainer.elastic.close()
                for watcher in self._watchers:
                    watcher.close()
                if trainer.rank == 0 and run.report and self.folder.marked:
                    write_report(self.output)
            finally:  # or this process, such as a notebook, could not use the folder again
                self.folder.unlock()

    def end_step(self, metrics: StepMetrics, *, last: bool) -> None:
        """Do what is due after a step: choose formats, save a checkpoint, evaluate."""
        run, trainer, done = self.config.run, self.trainer, metrics.step
        if self.connections.due(done):
            if self._look(done):
                self.about |= self.connections.facts
                if trainer.rank == 0:
                    self._write_about()
            trainer.pipeline.look_ahead(True)
        if self.auto is not None and not last and self.auto.due(metrics):
            self._choose_formats(self.auto, metrics)
        if done == self.config.codec_warmup_steps:
            self._show_chosen()
        if trainer.rates.due(done):
            self._check(done)
        if self.connections.due(done + 1):  # no receive may be posted when the number of connections changes
            trainer.pipeline.look_ahead(False)
        long = trainer.stop_asked
        if run.checkpoint_every and (done % run.checkpoint_every == 0 or last or trainer.checkpoint_due):
            self._save(done)
            long = True
        if run.eval_every and done % run.eval_every == 0 and not last and not trainer.stop_asked:
            self._evaluate(done)
            long = True
        if long and not last:  # the last step's run finishes within the grace time
            self._stop_if_asked(done)

    def _save(self, done: int) -> None:
        trainer = self.trainer
        tensors, codecs = state.collect(trainer.pipeline, trainer.optimizer)
        manifest = replace(self.manifest, codecs=codecs, aliases=state.aliases_of(trainer.pipeline))
        if self.auto is not None and self.auto.choice is not None:
            manifest = replace(manifest, identity=manifest.identity | {CHOSEN: asdict(self.auto.choice)})
        if rates := trainer.rates.record():
            manifest = replace(manifest, identity=manifest.identity | {RATES: rates})
        self.checkpoints.save(done, tensors, manifest, trainer.side)
        self.saved, self.saved_at = done, time.monotonic()

    def _stop_if_asked(self, done: int) -> None:
        """Stop after `done` steps on all ranks if a signal asked any of them to, with a checkpoint if there are any."""
        signals: list[int] = gather_json(self.trainer.stop.number, self.trainer.side)
        if not any(signals) or done >= self.config.run.steps:
            return
        asked = [f"rank {rank} got {Signals(number).name}" for rank, number in enumerate(signals) if number]
        text = f"stopped after step {done}" if done else "stopped before the first step"
        if self.config.run.checkpoint_every and done > self.start and self.saved != done:
            with phase(f"saving a checkpoint of step {done}", self.trainer.rank, show=self.config.run.progress):
                self._save(done)
        if done and self.saved == done:
            text += ", which is saved"
        elif done > self.start:
            text += ", which is not saved: run.checkpoint_every is 0"
        others = f"{', '.join(asked)}; " if len(asked) < len(signals) else ""
        raise StoppedError(others + text, next(filter(None, signals)))

    @property
    def _watchers(self) -> list[Recorder | Progress]:
        return [watcher for watcher in (self.recorder, self.progress) if watcher is not None]

    def _begin(self) -> int:
        """Restore the newest checkpoint, or clear the output folder; return the steps done."""
        run, trainer = self.config.run, self.trainer
        # Only rank 0 locks the folder, which several machines may share.
        holder = self.folder.lock() if trainer.rank == 0 else ""
        raise_everywhere(IN_USE.format(str(self.output), holder) if holder else "", trainer.side)
        done = 0
        if run.resume:
            done, changes = resume(
                self.checkpoints, trainer.pipeline, trainer.optimizer, self.manifest,
                replica=trainer.replicas.index, run=run, group=trainer.side,
                take_over=self._take_over,
            )  # fmt: skip
            self.manifest = replace(self.manifest, changes=changes)
        if run.overwrite and local_rank() == 0:
            self.folder.clear()
        if trainer.elastic is not None:
            trainer.elastic.resume(done)
        dist.barrier(group=trainer.side)
        if trainer.rank == 0:
            self.folder.note(*FILES)
            data = replace(self.config.data, date=self.trainer.prepared.data.date or self.config.data.date)
            written = replace(self.config, pipeline=in_full(self.config.pipeline), data=data).to_json()
            files.write(self.output / "config.json", written + "\n")
            self._write_about()
        return done

    def _take_over(self, done: int, recorded: Mapping[str, Any]) -> str:
        """Take over what the run chose before a checkpoint after `done` steps; return what is missing."""
        if self.auto is not None and CHOSEN in recorded:
            self.auto.restore(recorded[CHOSEN])
        return self.trainer.rates.restore(done, recorded.get(RATES, ()))

    def _evaluate(self, step: int, *, with_codecs: bool = True) -> dict[str, float]:
        sent = _evaluation_bytes()
        losses = self.trainer.evaluate(with_codecs=with_codecs)
        if losses:
            nbytes = round(self.trainer.total(_evaluation_bytes() - sent))
            for watcher in self._watchers:
                watcher.record_evaluation(step, losses, nbytes)
        return losses

    def _look_at_untrained(self) -> dict[str, float]:
        """Let the model write before the first step, and return its held-out scores: of samples only."""
        self._write("before training")
        scores: dict[str, float] = {}
        if self.config.data.format == "jsonl":
            if self.progress is not None:
                self.progress.say(self.trainer.prepared.data.described())
            scores = self._evaluate(0, with_codecs=False)
        self._stop_if_asked(0)
        return scores

    def _write(self, when: str) -> None:
        """Let the model write after the prompt of the run, and show and note the words."""
        sent = _evaluation_bytes()
        with phase(f"writing a few words {when}", self.trainer.rank, show=self.config.run.progress):
            found = self.words.write()
        self.checked_bytes += _evaluation_bytes() - sent
        if found:
            self.written |= {"prompt": found["prompt"], when: found["words"]}
            if self.progress is not None:
                self.progress.say(f"{when}, after {found['prompt']} the model writes {found['words']}")

    def _conclude(self, done: int, steps_here: int, before: dict[str, float]) -> Summary:
        """Save the model after this call's steps, and summarize the whole run; returns the same on every rank."""
        trainer, show = self.trainer, self.config.run.progress
        with phase("evaluating held-out text", trainer.rank, show=show):
            losses = self._evaluate(done)
        self._write("after training")
        model = self.output / "model" if self.config.run.save_model else None
        if model is not None:
            with phase("saving the model on rank 0", trainer.rank, show=show):
                self._save_model()
        chosen = trainer.rates.chosen()
        sent = trainer.sent_outside_steps() | ({EVALUATION: self.checked_bytes} if self.checked_bytes else {})
        gathered = gather_json([trainer.memory(), sent], trainer.side)
        summary: dict[str, Any] = {}
        if self.recorder is not None:  # it also has the steps of earlier attempts
            evaluations = self.recorder.evaluations
            summary = asdict(
                summarize(
                    self.config, trainer.layout, self.recorder.history, losses, chosen=chosen, model=model,
                    here=steps_here, changes=self.manifest.changes, round_trip=self.round_trip,
                    before=before or evaluations.get(0, {}), words=self.written,
                    formats=[asdict(choice) for choice in self.choices],
                    outside=[*({EVALUATION: line.get("bytes_sent", 0)} for line in evaluations.values()),
                            *(sent for _, sent in gathered)],
                )
            )  # fmt: skip
            files.write(self.output / "summary.json", json.dumps(summary, indent=2) + "\n")
            self.about["memory"] = [memory for memory, _ in gathered]
            self._write_about()
        return from_json(gather_json(summary, trainer.side)[0])

    def _write_about(self) -> None:
        files.write(self.output / "ranks.json", json.dumps(self.about, indent=1) + "\n")

    def _save_model(self) -> None:
        """Write the trained model, or its adapters, and on request the model with these merged in."""
        trainer, adapters = self.trainer, bool(self.config.lora.rank)
        dtype = export_dtype(self.config)

        def make_export() -> tuple[Export, Callable[[Path], None]]:
            messages = self._messages("saving") if trainer.layout.ranks > 1 else None
            export = Export(trainer.modules.values(), messages, dtype, adapters=adapters)
            if adapters:
                return export, partial(save_adapter_config, config=self.config)
            return export, partial(save_config, config=trainer.model_config, dtype=dtype or torch.float32)

        def make_merged() -> tuple[Export, Callable[[Path], None]]:
            whole = Merged(self.config, self.output / "model" / "adapter_model.safetensors")
            export = Export(whole, None, whole.dtype, adapters=False, finish=whole.merge_)
            return export, partial(save_config, config=whole.config, dtype=whole.dtype)

        self._export("model", make_export)
        if self.config.run.save_merged:
            self._export("merged", make_merged, alone=True)

    def _export(
        self, name: str, make: Callable[[], tuple[Export, Callable[[Path], None]]], *, alone: bool = False
    ) -> None:
        """Write a model into the folder `name` on rank 0, while the ranks of the first pipeline send it.

        Args:
            make: returns what writes the weights, and what writes their configuration into a folder. alone: rank 0
                has all that it needs.

        Raises:
            TransientError: the disk is too small. The checkpoints are as they were.
        """
        trainer, part = self.trainer, self.output / f".{name}.lowbit-part"
        made = [make()] if trainer.replicas.index == 0 and not alone else []

        def on_rank_0(work: Callable[[], None]) -> None:
            """Do what may take longer than the time limit, and raise its problem on all ranks."""

            def attempt() -> str:
                try:
                    work()
                    return ""
                except Exception as error:
                    if not isinstance(error, OSError) and "(os error " not in str(error):  # the package tokenizers'
                        raise
                    why = getattr(error, "strerror", None) or error
                    return f"rank 0 cannot write the model, {part}: {why}; checkpoints stay"

            if problem := together(attempt if trainer.rank == 0 else str, trainer.side)[0]:
                raise TransientError(problem)

        def reserve() -> None:
            shutil.rmtree(part, ignore_errors=True)  # of an attempt that was ended
            part.mkdir()
            if alone:
                made.append(make())
            made[0][0].reserve(part)
            if alone:
                made[0][0].write()

        try:
            on_rank_0(reserve)
            if made and not alone:
                made[0][0].write()
            on_rank_0(lambda: self._place_model(part, name, made[0][1]))
        finally:
            for export, _ in made:
                export.close()
            if trainer.rank == 0:
                shutil.rmtree(part, ignore_errors=True)

    def _place_model(self, part: Path, name: str, describe: Callable[[Path], None]) -> None:
        """Write what belongs to the weights in `part`, and move all of it to where the model is found."""
        describe(part)
        self.trainer.prepared.data.tokenizer.hugging_face().save_pretrained(part)
        save_companions(part, self.config, self.trainer.generation_config)
        names = [path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()]
        self.folder.note(*(f"{name}/{each}" for each in names))
        for each in names:
            (self.output / name / each).parent.mkdir(parents=True, exist_ok=True)
            (part / each).replace(self.output / name / each)

    def _open_recorder(self) -> Recorder | None:
        if self.trainer.rank != 0:
            return None
        run, board = self.config.run, self.output / "tensorboard"
        if run.tensorboard and not board.exists():
            self.folder.note("tensorboard/")
        before = set(board.glob("*"))
        settings = {
            f"{name}.{key}": str(v) for name, part in vars(self.config).items() for key, v in vars(part).items()
        }
        trackers = Trackers(run.trackers, self.output, settings)
        recorder = Recorder(self.output, start=self.start, tensorboard=run.tensorboard, trackers=trackers)
        if curves := sorted(f"tensorboard/{path.name}" for path in set(board.glob("*")) - before):
            self.folder.note(*curves)
        return recorder

    def _open_tracing(self) -> Tracing:
        run, warmup = self.config.run, self.config.codec_warmup_steps
        steps = traced_steps(run.steps, start=self.start, warmup=warmup, count=run.trace_steps)
        messages = Messages(self.trainer.side, "trace", timeout=run.timeout_seconds, checksums=run.checksums)
        return Tracing(self.trainer, messages, self.folder, steps)

    def _messages(self, topic: str) -> Messages:
        """Return a topic's messages in this pipeline, opened once: a group has a limited number of conversations."""
        run = self.config.run
        if topic not in self._conversations:
            self._conversations[topic] = Messages(
                self.trainer.replicas.side, topic, timeout=run.timeout_seconds, checksums=run.checksums
            )
        return self._conversations[topic]

    @property
    def round_trip(self) -> float | None:
        """Longest round trip between neighbours of a pipeline, in seconds; None on one rank."""
        return max((seconds for each in self.trips for seconds in each.values()), default=None)

    def _measure_distance(self) -> list[dict[Pair, float]]:
        """Measure round trips between neighbours of each pipeline, in seconds."""
        layout = self.trainer.layout
        if layout.ranks == 1:
            return []
        messages = self._messages("distance")
        own = [
            (other, round_trip(messages, other).seconds)
            for pair in neighbours(messages.ranks) for other in pair if messages.rank in pair and other != messages.rank
        ]  # fmt: skip
        trips: list[dict[Pair, float]] = [{} for _ in range(self.trainer.replicas.count)]
        for rank, measured in enumerate(gather_json(own, self.trainer.side)):
            pipeline, place = divmod(rank, layout.ranks)
            for other, seconds in measured:
                trips[pipeline][min(place, other), max(place, other)] = seconds
        return trips

    def _measure_links(self, seconds: float = 0.0) -> dict[Pair, float]:
        """Measure Mbit/s between neighbours on different machines for at least `seconds`, by (sender, receiver)."""
        links, ranks = self.trainer.links, self.trainer.layout.ranks
        if not links.pairs:
            return {}
        first = self.trainer.replicas.index * ranks
        trips = self.trips[self.trainer.replicas.index] if self.trips else {}
        messages, machine_of = self._messages("probe"), links.machine_of[first : first + ranks]
        own = []
        for pair in neighbours(ranks):
            if messages.rank in pair and machine_of[pair[0]] != machine_of[pair[1]]:
                for sender, receiver in (pair, pair[::-1]):
                    if messages.rank == receiver:
                        take_rate(messages, sender)
                    else:
                        rate = send_rate(messages, receiver, trip=trips[min(pair), max(pair)], seconds=seconds)
                        own.append((first + sender, first + receiver, rate))
        return {(source, target): rate for each in gather_json(own, self.trainer.side) for source, target, rate in each}

    def _update_rates(self) -> None:
        self.rates = self._measure_links()
        self.mbit.update(self.trainer.links.by_link(self.rates))

    def _look(self, done: int = 0) -> bool:
        """Look at the connections after `done` steps; returns whether they changed, and with them the rates."""
        rates = self.rates
        if acted := self.connections.look(done):
            self.mbit.update(self.trainer.links.by_link(self.rates))
        else:
            self.rates = rates  # not those of what was tried and left
        return acted

    def _slowest_rate(self) -> float:
        """Measure the links again, and return the lowest rate in Mbit/s; 0 if no pipeline crosses one."""
        self.rates = self._measure_links(seconds=_TRIAL_SECONDS)
        return min(self.rates.values(), default=0.0)

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.say(text)
        elif self.trainer.rank == 0:
            log.warning("%s", text)

    def _choose_formats(self, auto: Auto, metrics: StepMetrics) -> None:
        """Choose the formats; unless it is the first choice, measure the links before, and choose if that is due."""
        before = auto.choice
        if before is not None:
            begin = time.perf_counter()
            self._update_rates()
            if not auto.looked(self.mbit, time.perf_counter() - begin):
                return
            self.trips = self._measure_distance()
        choice = auto.choose(metrics.step, self.trips, self.rates, dict(self.mbit))
        if self.trainer.rank == 0:
            log.info("%s", choice)
        if before is None or before.formats != choice.formats:
            self._note_formats(choice, metrics)

    def _check(self, done: int) -> None:
        """Compare the cost of the formats with the goal, and show the result."""
        sent = _evaluation_bytes()
        check = self.trainer.rates.check(done)
        self.checked_bytes += _evaluation_bytes() - sent
        if self.trainer.rank == 0 and not check.reached:
            log.warning("%s", check)
        elif self.progress is not None:
            self.progress.say(str(check))
        if check.bits:
            self._show_chosen()

    def _show_chosen(self) -> None:
        for place, codec in self.trainer.rates.chosen().items():
            if self.progress is not None:
                self.progress.say(f"{place}: {codec}")

    def _note_formats(self, choice: FormatChoice, metrics: StepMetrics | None = None) -> None:
        """Show a choice of formats after a step, or of a checkpoint, and record it for the report."""
        self.choices.append(choice)
        if self.progress is not None:
            reason = why(choice, metrics)
            self.progress.say(f"formats from step {choice.step + 1} on: {described(choice.formats)}: {reason}")
        self.about["formats"] = [asdict(choice) for choice in self.choices]
        if self.trainer.rank == 0:
            self._write_about()


def _evaluation_bytes() -> int:
    """Count bytes that this rank sent; between two calls without a step, the difference is an evaluation's."""
    sent = sent_so_far()
    return sent[EVALUATION] + sent[TIED]
