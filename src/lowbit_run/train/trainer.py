"""Training on one rank: its stages of the model, its share of the data, and its optimizer."""

import math
import resource
import time
from collections import Counter
from dataclasses import astuple, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowbit
from lowbit.activations import counted
from lowbit.collectives import agree
from lowbit.wire.checksum import secret_facts
from lowbit.wire.messages import SUMS, Sums, gather_json
from lowbit.wire.pytorch import new_group
from lowbit.wire.traffic import Trace, sent_so_far, span
from lowbit_run.job.stop import StopRequest
from lowbit_run.train import optim
from lowbit_run.train.activations import compress
from lowbit_run.train.checkpoints.save import together
from lowbit_run.train.config import is_day
from lowbit_run.train.cut import Share
from lowbit_run.train.data import Order
from lowbit_run.train.dates import recorded
from lowbit_run.train.elastic import Elastic, seed_of
from lowbit_run.train.evaluate import HeldOutEvaluation, evaluated
from lowbit_run.train.gradients import Gradients, ReplicaGroups
from lowbit_run.train.identity import compared
from lowbit_run.train.links import OUTSIDE, Links, link_name
from lowbit_run.train.metrics import COORDINATION, EVALUATION, TIED, StepMetrics, Work, step_metrics
from lowbit_run.train.model import StageModule
from lowbit_run.train.prepare import Prepared, on_date
from lowbit_run.train.progress import machine_name
from lowbit_run.train.rates import Rates
from lowbit_run.train.stages import Pipeline
from lowbit_run.train.tied import TiedWeights
from lowbit_run.train.weights import build_share

_OUTSIDE_STEPS = {  # parts of the traffic outside of steps, by purpose of messages; all others are coordination
    "saving": "saving the model", "probe": "link probes", "distance": "link probes", "checkpoints": "checkpoints",
    "replicas": "weights for replicas",
}  # fmt: skip


_CHECKPOINT = 1 << 30  # for a checkpoint that is due, in the sum of signals of all ranks, which is always smaller


class DivergedError(RuntimeError):
    """The loss or the gradients are not finite; the weights are those before the step."""

    on_all_ranks = True


class Trainer:
    """Trains on one rank and writes no files; every rank makes one.

    Attributes:
        pipeline_kind: class of `pipeline`; measurements replace it. rates: chosen in the last step of the warm-up.
        stop: the signal that asked this rank to end. stop_asked: whether one had asked any rank when the last step
            ended; the same on all ranks.
        wants_checkpoint: set by rank 0 when one is due by its clock. checkpoint_due: whether it had been when the last
            step ended; the same on all ranks.

    Raises:
        AgreementError: ranks have different configurations, texts or versions.
    """

    pipeline_kind: type[Pipeline] = Pipeline
    wants_checkpoint = checkpoint_due = False

    def __init__(self, prepared: Prepared, stop: StopRequest | None = None) -> None:
        self.stop, self.stop_asked = stop or StopRequest(), False
        self._sent_before = sent_so_far()
        self.prepared, self.config, self.layout = prepared, prepared.config, prepared.layout
        run, data, device = self.config.run, self.config.data, prepared.device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL and kernels use the current device
        self._agree()
        self.side = new_group(timeout=run.timeout_seconds)  # for all messages except the training traffic
        self._take_one_date()
        prepared = self.prepared
        self.replicas = ReplicaGroups(self.config, self.layout.ranks, prepared.all_reduce, self.side)
        self.modules, is_tied = self._build_modules()
        self.tied = TiedWeights(prepared, self.modules, self.replicas, tied=is_tied and not self.config.lora.rank)
        trained = [(p, m) for m in self.modules.values() for p in m.parameters() if p.requires_grad]
        owned = [(p, m) for p, m in trained if p is not self.tied.follower]
        self.parameters = [p for p, _ in owned]
        others = [p for p, _ in trained if p is self.tied.follower]
        self.gradients = Gradients(self.parameters, prepared.storage, others=others)
        self.pipeline = self.pipeline_kind(prepared, self.modules, self.gradients.storage, self.replicas.pipeline)
        self.pipeline.followed = self.tied.state
        self.rates, self.evaluation = Rates(self), HeldOutEvaluation(self.pipeline, self.replicas.side)
        names, lighthouse = gather_json(machine_name(), self.side), self.config.elastic.lighthouse
        self.links = Links(self.layout, self.replicas.count, names, elastic=bool(lighthouse))
        count = 3 + len(fields(Work)) + self.links.count
        self._sums = Sums(self.side, count, timeout=run.timeout_seconds, checksums=run.checksums)
        self.trace: Trace | None = None
        self.work = Work()  # of this rank in the last step
        self._lost = Work()  # of this rank in steps that were repeated
        second = self.tied.copies[1:]  # another copy on this rank, which norms do not count
        self.counted = [p for p, _ in owned if not any(p is copy for copy in second)]
        named = [(m.aliases.get(name := m.names[p], name), p) for p, m in owned]
        self.optimizer = optim.make_optimizer(named, self.config.optimizer)
        self.order = Order(samples=len(prepared.data.train), batch=data.batch, seed=seed_of(self.config))
        # Peak of saved activations, equal in every step: on the rank with most, and on this one.
        self._saved_bytes: int | None = None
        self.saved_bytes: int | None = None
        self.elastic: Elastic | None = None
        if lighthouse:
            self.elastic = Elastic(prepared, self.pipeline, self.optimizer, self.side)
        torch.manual_seed(run.seed + 1 + self.rank)  # for dropout, each rank has its own

    def step(self, done: int) -> StepMetrics:
        """Take an optimizer step after `done` others; return metrics over all ranks, by this rank's clock.

        With replicas that come and go, the step follows the steps that they have done, and is repeated until all
        present ones have its gradients.

        Raises:
            DivergedError: loss or gradients are NaN or infinite.
        """
        while True:
            with span(self.trace, "step", step=done + 1), self.rates.choosing(done + 1):
                metrics = self._optimize(done)
            if metrics is not None:
                return metrics

    def _optimize(self, done: int) -> StepMetrics | None:
        begin = time.perf_counter()
        if self.elastic is not None:
            done = self.elastic.begin()
        rate = optim.learning_rate(self.config.optimizer, step=done, steps=self.config.run.steps)
        optim.set_learning_rate(self.optimizer, rate)
        global_ids, train = self.order.ids(done), self.prepared.data.train
        ids = self.replicas.share(global_ids)
        inputs, targets = train.batch(ids)
        with span(self.trace, "wait", message="rows of the tied embedding"):
            self.tied.begin_step(inputs, exact=done < self.config.codec_warmup_steps)
        with span(self.trace, "pipeline"):
            positions, learned = train.positions(ids), train.learned(global_ids)
            loss, work = self._pass(inputs, targets, ids, positions=positions, learned=learned)
        self.work = work
        self.gradients.finish(self.config.pipeline.microbatches)
        self._exchange_gradients(work)
        if self.elastic is not None and not self.elastic.commit():
            self.gradients.drop()
            self._lost.add_traffic(work)
            return None
        work.add_traffic(self._lost)
        self._lost = Work()
        with span(self.trace, "wait", message="the sums of all ranks"):
            loss, norm, work, shares = self._sum_over_ranks(loss, work)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(f"step {done + 1}: the loss is {loss}, the norm of the gradients {norm}")
        with span(self.trace, "optimizer"):
            self.gradients.clip(norm=norm, limit=self.config.optimizer.clip)
            self.gradients.step(self.optimizer)
        links, waiting = self.links.named(shares)
        replicas = self.replicas.count if self.elastic is None else self.elastic.replicas
        return step_metrics(
            step=done + 1, loss=loss, lr=rate, grad_norm=norm, tokens=inputs.numel() * replicas,
            seconds=time.perf_counter() - begin, ranks=self.ranks, work=work, bytes_activations=self._saved_bytes,
            links=links, waiting=waiting, rates=dict(self.links.rates),
        )  # fmt: skip

    def evaluate(self, *, with_codecs: bool = True) -> dict[str, float]:
        """Compute held-out loss and exact match without and with codecs; empty without held-out text.

        Returns:
            {"held_out_loss": ..., "exact_match": ...} and the same with "_codecs" if there are several stages; exact
            match for samples only.
        """
        held_out, batch, batches = self.prepared.data.held_out, self.config.data.batch, self.config.run.eval_batches
        if not len(held_out):
            return {}
        scores: dict[str, tuple[float, float]] = {}
        with self.tied.exact(held_out.batch(evaluated(held_out, batch=batch, batches=batches))[0]):
            scores[""] = self.evaluation.scores(held_out, batch=batch, batches=batches)
            if self.layout.stages > 1 and with_codecs:
                codecs = self.pipeline.codecs.forward
                scores["_codecs"] = self.evaluation.scores(held_out, batch=batch, batches=batches, codecs=codecs)
        exact = {f"exact_match{suffix}": exact for suffix, (_, exact) in scores.items()}
        losses = {f"held_out_loss{suffix}": loss for suffix, (loss, _) in scores.items()}
        return losses | (exact if self.config.data.format == "jsonl" else {})

    def _pass(self, *batch: Tensor, **samples: Any) -> tuple[float, Work]:
        """Run forward and backward; if activations are compressed, the first call counts their bytes."""
        if not any(self.prepared.activations) or self._saved_bytes is not None:
            return self.pipeline.step(*batch, **samples)
        with counted(nn.ModuleList(self.modules.values())) as saved:
            loss, work = self.pipeline.step(*batch, **samples)
        most = torch.tensor(saved.total)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.side)
        self.saved_bytes, self._saved_bytes = saved.total, int(most)
        return loss, work

    def _exchange_gradients(self, work: Work) -> None:
        with span(self.trace, "all-reduce"):
            if self.tied.apart:  # averages include only the last stage's copy
                self._sum_tied(work)
            if self.replicas.count > 1:
                self.replicas.average_all(self.gradients)
                self.replicas.note_traffic(work)
            if self.elastic is not None:
                self.gradients.average(self.elastic.average)
                self.elastic.note_traffic(work)
            if not self.tied.apart:  # copies on one rank are in different buckets, but must stay equal
                self._sum_tied(work)

    def _sum_tied(self, work: Work) -> None:
        with self.gradients.in_full(self.tied.copies):
            self.tied.sum_gradients()
        work.add_traffic(self.tied.sent)

    def _sum_over_ranks(self, loss: float, work: Work) -> tuple[float, float, Work, list[float]]:
        """Sum loss, norm of the gradients and work over all ranks, also by link and machine (`Links.named`)."""
        squares = optim.squared_norm(self.gradients.of(self.counted))
        own = self.links.values(self.rank, self._by_receiver(work), work.wait_seconds)
        work.other_bytes += sum(self._sums.sent_to.values())
        asked = self.stop.number + _CHECKPOINT * (self.rank == 0 and self.wants_checkpoint)
        sums = torch.tensor([asked, loss, squares, *astuple(work), *own], dtype=torch.float64)
        asked, loss, squares, *rest = self._sums.of(sums).tolist()
        self.checkpoint_due, self.stop_asked = asked >= _CHECKPOINT, asked % _CHECKPOINT > 0
        costs, shares = rest[: (count := len(fields(Work)))], rest[count:]
        replicas = self.replicas.count  # their gradients are equal by now
        return loss / replicas, math.sqrt(squares / replicas), Work(*costs), shares

    def _by_receiver(self, work: Work) -> Counter[int]:
        """Count the bytes that this rank sends in a step to each other, including the sums that follow."""
        sent, own = Counter[int](self._sums.sent_to), self.replicas.members(self.replicas.index)
        for (_, stage), nbytes in self.pipeline.sent.items():
            sent[own[self.layout.rank_of(stage)]] += nbytes
        shares = [(self.replicas.others if self.elastic is None else [OUTSIDE], work.gradient_bytes)]
        shares += [([rank for rank in own if rank != self.rank], work.other_bytes)]  # announcements
        shares += [([] if self.tied.peer is None else [self.tied.peer], work.tied_bytes)]
        for receivers, nbytes in shares:
            sent.update({rank: round(nbytes / len(receivers)) for rank in receivers})
        return sent

    def total(self, value: float) -> float:
        """Sum a number over all ranks; every rank calls this."""
        values = torch.zeros(3 + len(fields(Work)) + self.links.count, dtype=torch.float64)
        values[0] = value
        return float(self._sums.of(values)[0])

    def sent_outside_steps(self) -> dict[str, int]:
        """Count bytes that this rank has sent outside of steps and evaluations, by part, since the trainer was made."""
        parts = Counter[str]()
        for purpose, nbytes in (sent_so_far() - self._sent_before).items():
            if purpose not in (EVALUATION, SUMS, TIED):
                parts[_OUTSIDE_STEPS.get(purpose, COORDINATION)] += nbytes
        return dict(parts)

    def describe_machines(self, machines: list[dict[str, Any]], round_trip: float | None) -> dict[str, Any]:
        """Describe the machines of a run: `lowbit_run.report.machine` of each rank, Mbit/s by link, and seconds."""
        machine_of, rates, autocast = self.links.machine_of, self.links.rates, self.prepared.autocast
        return {
            "machines": [
                {"machine": first, "ranks": [r for r, own in enumerate(machine_of) if own == first], **machines[first]}
                for first in self.links.machines
            ],
            "links": [{"link": link_name(*pair), "mbit": rates.get(link_name(*pair))} for pair in self.links.pairs],
            "round_trip_seconds": round_trip,
            "backend": self.prepared.backend,
            "device": self.prepared.device.type,
            "precision": "fp32" if autocast is None else str(autocast).removeprefix("torch."),
        }

    def memory(self) -> dict[str, Any]:
        """Measure the bytes that this rank's stages take after the last step."""
        lowbit_stages = self.pipeline.lowbit_stages
        stages = [
            {
                "stage": index,
                "layers": len(self.layout.layers_of(index)),
                "weights": sum(p.nbytes for p in module.parameters()),
                "codec_states": lowbit_stages[index].state_bytes() if index in lowbit_stages else 0,
                "messages": lowbit_stages[index].traffic.peak_bytes if index in lowbit_stages else 0,
            }
            for index, module in self.modules.items()
        ]
        states = (value for state in self.optimizer.state.values() for value in state.values())
        memory: dict[str, Any] = {
            "rank": self.rank,
            "stages": stages,
            "optimizer": sum(x.nbytes for value in states for x in optim.parts_of(value).values()),
            "saved_activations": self.saved_bytes,
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if self.prepared.device.type == "cuda":
            memory["gpu"] = torch.cuda.max_memory_allocated(self.prepared.device)
        return memory

    def _agree(self) -> None:
        """Compare configuration, text and versions of all ranks before the first byte."""
        bits = ("bits", "norm", "mlp", "linear", "group", "layers")  # from the configuration or a plan file
        facts = {
            **self._text(), "lowbit": lowbit.__version__, "torch": torch.__version__,
            "backend": self.prepared.backend, **secret_facts(), **compared(self.config),
            "saved activations": str({key: self.prepared.identity[f"activations.{key}"] for key in bits}),
        }  # fmt: skip
        agree(None, facts, self.config.run.timeout_seconds, topic="training run")

    def _text(self) -> dict[str, str]:
        """Return a digest of the text, by a name that it shares with texts of the same date only."""
        data = self.prepared.data
        return {f"text with the date {data.date}" if data.date else "text": data.fingerprint()}

    def _take_one_date(self) -> None:
        """Let all ranks have the date of the checkpoints, or rank 0's: clocks differ, and so do time zones.

        A rank without a checkpoint on its disk, or on the other side of midnight, reads its text again.
        """
        stated = gather_json([self.prepared.data.date, recorded(self.config.run)[1]], self.side)
        dates = [date if is_day(date) else "" for date, _ in stated]
        if len(set(dates)) == 1:
            return
        chosen = next((date for date, (_, kept) in zip(dates, stated, strict=True) if date and kept), dates[0])

        def read_again() -> None:
            if self.prepared.data.date not in ("", chosen):
                self.prepared = on_date(self.prepared, chosen)

        together(read_again, self.side)
        agree(None, {"text": self.prepared.data.fingerprint()}, self.config.run.timeout_seconds, topic="text")

    def _build_modules(self) -> tuple[dict[int, StageModule], bool]:
        """Build this rank's stages; also return whether the model's embedding is tied."""
        config, prepared, layout = self.config, self.prepared, self.layout
        stages = layout.stages_of(self.replicas.place)
        layers = frozenset(layer for stage in stages for layer in layout.layers_of(stage))
        share = Share(layers=layers, first=0 in stages, last=layout.stages - 1 in stages)
        model = build_share(
            config, share, vocab=prepared.vocab, device=prepared.device, autocast=prepared.autocast
        )  # fmt: skip
        self.model_config, self.generation_config = model.config, model.generation_config
        modules = {
            stage: StageModule(
                model, layers=layout.layers_of(stage), first=stage == 0, last=stage == layout.stages - 1,
                autocast=prepared.autocast,
            )
            for stage in stages
        }  # fmt: skip
        for stage, module in modules.items():
            compress(module, prepared.activations[stage], prepared.device)
        return modules, bool(getattr(model.config, "tie_word_embeddings", False))
