"""Training on one rank of a pipeline, from an environment that a launcher has set to a summary of the run."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowbit
from lowbit.activations import counted
from lowbit.collectives import agree
from lowbit.ranks.checksum import secret_facts
from lowbit.ranks.groups import new_group
from lowbit.ranks.messages import Messages
from lowbit.ranks.objects import gather_json
from lowbit.ranks.process_group import joined, world
from lowbit.ranks.sums import Sums
from lowbit.train import export, optim, state
from lowbit.train.activations import compress
from lowbit.train.boundaries import costly, in_full
from lowbit.train.checkpoint import same_everywhere, together
from lowbit.train.config import TrainConfig
from lowbit.train.data import Order
from lowbit.train.device import local_rank, local_ranks
from lowbit.train.distance import needless, round_trips
from lowbit.train.evaluate import Evaluation
from lowbit.train.folder import RunFolder
from lowbit.train.gradients import Gradients
from lowbit.train.metrics import Recorder, StepMetrics, Work, step_metrics
from lowbit.train.model import StageModule, build_model
from lowbit.train.prepare import FILES, IN_USE, Prepared, left_behind, prepare
from lowbit.train.replicas import Replicas
from lowbit.train.resume import take_up
from lowbit.train.stages import Pipeline
from lowbit.train.summary import Summary, summarize
from lowbit.train.tied import TiedWeights

log = logging.getLogger(__name__)

_LOCAL = {  # settings that may differ between machines
    "data.text", "data.dataset", "data.held_out", "data.tokenizer", "model.pretrained",
    "run.output", "run.threads", "run.progress", "run.tensorboard",
}  # fmt: skip


class DivergedError(RuntimeError):
    """The loss or the gradients are no numbers any more; nothing of that has reached the weights."""

    on_all_ranks = True


def train(config: TrainConfig, *, on_step: Callable[[StepMetrics], None] | None = None) -> Summary:
    """Train, evaluate and save; to be called on every rank that the environment tells of (RANK, WORLD_SIZE, MASTER_*).

    Without such an environment this process trains alone. A process group that exists is used, otherwise one is made
    for the run. If another rank fails while this one is blocked for good, this process ends (`lowbit.ranks.peers`).

    Args:
        config: the same on every rank.
        on_step: called after every step, on every rank, with metrics over all ranks.

    Raises:
        ConfigError: (before anything starts) what cannot work, in one line.
        AgreementError: ranks with different configurations, texts or versions.
        PeerError: another rank ended the run; the message names it.
        DivergedError: NaN or infinity in loss or gradients.
        CheckpointError: there is none to resume from, or another run uses the folder; TransientError: none can be
            written.
    """
    rank, ranks = world()
    prepared = prepare(config, ranks=ranks, rank=rank)
    if config.run.threads or ranks > 1:
        torch.set_num_threads(config.run.threads or threads_per_rank(ranks))
    run = config.run
    patience = run.rejoin_seconds if run.supervise else None
    with joined(run.timeout_seconds, backend=prepared.backend, patience=patience):
        return Trainer(prepared).run(on_step)


def threads_per_rank(ranks: int) -> int:
    """This machine's share of cores for each of its ranks."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks(ranks))


class Trainer:
    """One rank's part of a run. All ranks make theirs together."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.config, self.plan = prepared, prepared.config, prepared.plan
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.output = Path(self.config.run.output)
        if prepared.device.type == "cuda":
            torch.cuda.set_device(prepared.device)  # where NCCL and kernels go that are not told
        self._agree()
        self.side = new_group(timeout=self.config.run.timeout_seconds)  # for everything but the training traffic
        self.replicas = Replicas(
            self.plan.ranks,
            self.config.pipeline.data_parallel,
            codec=prepared.all_reduce,
            timeout=self.config.run.timeout_seconds,
            side=self.side,
            checksums=self.config.run.checksums,
        )
        self.modules, tied = self._build_modules()
        self.tied = TiedWeights(self.modules, self.plan, self.replicas, tied=tied)
        device = prepared.device
        owned = [(p, m) for m in self.modules.values() for p in m.parameters()]
        self.parameters = [p for p, _ in owned]
        self.gradients = Gradients(self.parameters, prepared.storage, microbatches=self.config.pipeline.microbatches)
        self.pipeline = Pipeline(
            self.config, self.plan, self.modules, prepared.codecs, device, self.gradients.storage,
            self.replicas.pipeline,
        )  # fmt: skip
        width = next(iter(self.modules.values())).width
        self.evaluation = Evaluation(
            self.plan, self.modules, stages=self.pipeline.lowbit_stages, width=width, device=device,
            group=self.replicas.side, timeout=self.config.run.timeout_seconds, checksums=self.config.run.checksums,
        )  # fmt: skip
        costs = len(dataclasses.fields(Work))
        self._sums = Sums(
            self.side, 2 + costs, timeout=self.config.run.timeout_seconds, checksums=self.config.run.checksums
        )
        self.counted = [p for p, m in owned if not self.tied.counted_elsewhere(p, m)]
        self.optimizer = optim.make_optimizer(self.parameters, self.config.optimizer)
        run, data = self.config.run, self.config.data
        self.order = Order(samples=len(prepared.data.train), batch=data.batch, seed=run.seed)
        self.checkpoints = prepared.checkpoints(self.rank)
        if self.rank == 0:  # not in `prepare`, which a launcher runs beside its ranks
            for line in costly(prepared.codecs, (self.config.rows, data.sequence, width)):
                log.warning("%s", line)
        self.round_trip = self._measure_distance()
        self.about = prepared.about(gather_json(secrets.token_hex(8), self.side)[0], ranks=self.ranks)
        self._kept: int | None = None  # by autograd, at most, on any rank; the same in every step
        try:
            self.start = self._begin()
        except BaseException:
            RunFolder(self.output).unlock()
            raise

    def run(self, on_step: Callable[[StepMetrics], None] | None = None) -> Summary:
        """All steps that are left, the final evaluation, and the saved model."""
        run = self.config.run
        history: list[StepMetrics] = []
        recorder = None
        try:
            recorder = self._open_recorder()
            for step in range(self.start, run.steps):
                history.append(self.step(step))
                if recorder is not None:
                    recorder.record(history[-1])
                if on_step is not None:
                    on_step(history[-1])
                done = step + 1
                if done == self.config.codec_warmup_steps:
                    self._tell_choices(recorder)
                if run.checkpoint_every and (done % run.checkpoint_every == 0 or done == run.steps):
                    self.save_checkpoint(done)
                if run.eval_every and done % run.eval_every == 0 and done < run.steps:
                    self.evaluate(done, recorder)
            return self._finish(history, recorder)
        finally:
            if recorder is not None:
                recorder.close()
            RunFolder(self.output).unlock()

    def step(self, step: int) -> StepMetrics:
        """One optimizer step; metrics over all ranks, by this rank's clock."""
        begin = time.perf_counter()
        rate = optim.learning_rate(self.config.optimizer, step=step, steps=self.config.run.steps)
        optim.set_learning_rate(self.optimizer, rate)
        ids = self.replicas.share(self.order.ids(step))
        inputs, targets = self.prepared.data.train.batch(ids)
        loss, work = self._pass(inputs, targets, ids)
        self.gradients.finish()
        if self.replicas.count > 1:
            # Before tied weights are summed: their copies lie in different buckets, but must come out the same.
            self.gradients.average(self.replicas.average)
            self.replicas.note_traffic(work)
        with self.gradients.in_full(self.tied.copies):
            self.tied.sum_gradients()
        loss, norm, work = self._sum_over_ranks(loss, work)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(f"step {step}: the loss is {loss}, the norm of the gradients {norm}")
        self.gradients.clip(norm=norm, limit=self.config.optimizer.clip)
        self.gradients.step(self.optimizer)
        return step_metrics(
            step=step, loss=loss, lr=rate, grad_norm=norm, tokens=inputs.numel() * self.replicas.count,
            seconds=time.perf_counter() - begin, ranks=self.ranks, work=work, bytes_activations=self._kept,
        )  # fmt: skip

    def _pass(self, inputs: Tensor, targets: Tensor, ids: Tensor) -> tuple[float, Work]:
        """Forward and backward; where activations are compressed, the first one counts what is kept of them."""
        if not any(self.prepared.activations) or self._kept is not None:
            return self.pipeline.step(inputs, targets, ids)
        with counted(nn.ModuleList(self.modules.values())) as kept:
            loss, work = self.pipeline.step(inputs, targets, ids)
        most = torch.tensor(kept.total)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.side)
        self._kept = int(most)
        return loss, work

    def evaluate(self, step: int, recorder: Recorder | None = None) -> dict[str, float]:
        """Held-out loss without codecs and with them: {"held_out_loss": ..., "held_out_loss_codecs": ...}."""
        data, run = self.prepared.data.held_out, self.config.run
        if not len(data):
            return {}
        measure = partial(self.evaluation.loss, data, batch=self.config.data.batch, batches=run.eval_batches)
        losses = {"held_out_loss": measure()}
        if self.plan.stages > 1:
            losses["held_out_loss_codecs"] = measure(codecs=self.prepared.codecs.forward)
        if recorder is not None:
            recorder.record_evaluation(step, losses)
        return losses

    def chosen(self) -> dict[str, str]:
        """What the warm-up has settled, in full, by pipeline, boundary, direction and tensor; the same on all ranks."""
        codecs = self.prepared.codecs
        if all(codec.settled for codec in (*codecs.forward, *codecs.backward)):
            return {}
        several = f"pipeline {self.replicas.index} " if self.replicas.count > 1 else ""
        stages = self.pipeline.lowbit_stages.values()
        own = {f"{several}{at}": repr(codec) for s in stages for at, codec in s.chosen().items()}
        return dict(sorted(item for each in gather_json(own, self.side) for item in each.items()))

    def _tell_choices(self, recorder: Recorder | None) -> None:
        for at, codec in self.chosen().items():
            if recorder is not None:
                recorder.say(f"{at}: {codec}")

    def save_checkpoint(self, done: int) -> None:
        """Write what is needed to go on after `done` steps."""
        snapshot = state.collect(self.pipeline, self.optimizer)
        self.checkpoints.save(done, snapshot, self.about, self.side)

    def _agree(self) -> None:
        """Stop before the first byte if a rank has another configuration, text or version."""
        facts = {"text": self.prepared.data.fingerprint()}
        facts |= {"lowbit": lowbit.__version__, "torch": torch.__version__, **secret_facts()}
        facts["backend"] = self.prepared.backend
        for section, values in dataclasses.asdict(self.config).items():
            names = (f"{section}.{key}" for key in values)
            facts |= {n: str(v) for n, v in zip(names, values.values(), strict=True) if n not in _LOCAL}
        agree(None, facts, self.config.run.timeout_seconds, topic="training run")

    def _measure_distance(self) -> float | None:
        """The longest round trip between neighbours of a pipeline, in seconds; and a warning where it costs much."""
        if self.plan.ranks == 1:
            return None
        run = self.config.run
        messages = Messages(self.replicas.side, "distance", timeout=run.timeout_seconds, checksums=run.checksums)
        own = list(round_trips(messages).items())
        trips: list[dict[tuple[int, int], float]] = [{} for _ in range(self.replicas.count)]
        for rank, measured in enumerate(gather_json(own, self.side)):
            pipeline, place = divmod(rank, self.plan.ranks)
            for other, seconds in measured:
                trips[pipeline][min(place, other), max(place, other)] = seconds
        lines = [needless(self.plan, self.config.pipeline.schedule, each) for each in trips]
        if self.rank == 0 and (said := next(filter(None, lines), None)):
            log.warning("%s", said)
        return max(max(each.values()) for each in trips)

    def _build_modules(self) -> tuple[dict[int, StageModule], bool]:
        """This rank's stages, from a whole model that is let go of afterwards; and whether its embedding is tied."""
        config, wire = self.config, self.prepared.wire
        model = build_model(
            config.model,
            vocab=self.prepared.vocab,
            sequence=config.data.sequence,
            seed=config.run.seed,
        )
        self.model_config = model.config
        modules = {
            stage: StageModule(
                model,
                layers=self.plan.layers_of(stage),
                first=stage == 0,
                last=stage == self.plan.stages - 1,
                autocast=self.prepared.autocast,
                wire=wire,
            ).to(self.prepared.device)
            for stage in self.plan.stages_of(self.replicas.place)
        }
        for stage, module in modules.items():
            compress(module, self.prepared.activations[stage], self.prepared.device)
        return modules, bool(model.config.tie_word_embeddings)

    def _begin(self) -> int:
        """Take up the newest checkpoint, or clear the output folder; returns the step to start with."""
        run = self.config.run
        torch.manual_seed(run.seed + 1 + self.rank)  # dropout: each rank its own
        folder = RunFolder(self.output)
        # Rank 0 alone: machines may have the folder in common.
        holder = folder.lock() if self.rank == 0 else ""
        same_everywhere(IN_USE.format(str(self.output), holder) if holder else "", self.side)
        done = self._resume() if run.resume else 0
        if run.overwrite and local_rank() == 0:
            folder.clear()
        dist.barrier(group=self.side)
        if not run.resume:
            same_everywhere(left_behind(self.output), self.side)
        if self.rank == 0:
            folder.note(*FILES)
            pipeline = in_full(self.config.pipeline)
            told = dataclasses.replace(self.config, pipeline=pipeline).to_json()
            (self.output / "config.json").write_text(told + "\n", encoding="utf-8")
        return done

    def _resume(self) -> int:
        """Take up the newest checkpoint; 0 if there is none, and the run may begin then."""
        done, changes = take_up(
            self.checkpoints, self.pipeline, self.optimizer, self.about,
            replica=self.replicas.index, run=self.config.run, group=self.side,
        )  # fmt: skip
        self.about = dataclasses.replace(self.about, changes=changes)
        return done

    def _open_recorder(self) -> Recorder | None:
        if self.rank != 0:
            return None
        run, board = self.config.run, self.output / "tensorboard"
        if run.tensorboard and not board.exists():
            RunFolder(self.output).note("tensorboard/")
        before = set(board.glob("*"))
        recorder = Recorder(
            self.output,
            start=self.start,
            steps=run.steps,
            tensorboard=run.tensorboard,
            progress=run.progress,
        )
        if curves := sorted(f"tensorboard/{path.name}" for path in set(board.glob("*")) - before):
            RunFolder(self.output).note(*curves)
        return recorder

    def _sum_over_ranks(self, loss: float, work: Work) -> tuple[float, float, Work]:
        """Loss, norm of all gradients, and costs over all ranks."""
        squares = optim.squared_norm(self.gradients.of(self.counted))
        sums = [loss, squares, *dataclasses.astuple(work)]
        loss, squares, *costs = self._sums.of(torch.tensor(sums, dtype=torch.float64)).tolist()
        replicas = self.replicas.count  # whose gradients are equal by now
        return loss / replicas, math.sqrt(squares / replicas), Work(*costs)

    def _gather_weights(self) -> dict[str, Tensor]:
        run = self.config.run
        messages = Messages(self.replicas.side, "saving", timeout=run.timeout_seconds, checksums=run.checksums)
        return export.gather_weights(self.modules, messages)

    def _save_model(self, weights: dict[str, Tensor]) -> None:
        """Write the trained model, on rank 0; the others may have to wait for longer than the time limit."""
        if self.rank == 0:
            folder = RunFolder(self.output)
            staging = folder.staging("model")
            tokenizer = self.prepared.data.tokenizer
            export.save_model(staging, weights, self.model_config, tokenizer)
            folder.adopt(staging, "model")

    def _finish(self, history: list[StepMetrics], recorder: Recorder | None) -> Summary:
        run = self.config.run
        losses = self.evaluate(run.steps, recorder)
        folder = self.output / "model" if run.save_model else None
        if folder is not None:
            weights = self._gather_weights() if self.replicas.index == 0 else {}
            together(partial(self._save_model, weights), self.side)
        summary = summarize(
            self.config, self.plan, history, losses, chosen=self.chosen(), model=folder,
            changes=self.about.changes, round_trip=self.round_trip,
        )  # fmt: skip
        if self.rank == 0:
            text = json.dumps(dataclasses.asdict(summary), indent=2)
            (self.output / "summary.json").write_text(text + "\n", encoding="utf-8")
        dist.barrier(group=self.side)
        return summary
