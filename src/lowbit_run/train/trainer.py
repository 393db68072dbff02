"""The steps of a training on one rank."""

import math
import resource
import time
from collections import Counter
from dataclasses import astuple, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.activations import counted
from lowbit.wire.messages import Sums
from lowbit.wire.traffic import Trace, span
from lowbit_run.job.stop import StopRequest
from lowbit_run.train import optim
from lowbit_run.train.activations import compress
from lowbit_run.train.cut import Share
from lowbit_run.train.data import Order
from lowbit_run.train.elastic import Elastic, seed_of
from lowbit_run.train.evaluate import HeldOutEvaluation, evaluated
from lowbit_run.train.gradients import Gradients
from lowbit_run.train.links import OUTSIDE
from lowbit_run.train.members import Members
from lowbit_run.train.metrics import StepMetrics, Work, step_metrics
from lowbit_run.train.model import StageModule
from lowbit_run.train.prepare import Prepared
from lowbit_run.train.rates import Rates
from lowbit_run.train.stages import Pipeline
from lowbit_run.train.tied import TiedWeights
from lowbit_run.train.weights import build_share

_CHECKPOINT = 1 << 30  # for a checkpoint that is due, in the sum of signals of all ranks, which is always smaller


class DivergedError(RuntimeError):
    """The loss or the gradients are not finite; the weights are those before the step."""

    on_all_ranks = True


class StepSums:
    """What all ranks add up at the end of a step: its numbers, and signals to end or to save a checkpoint.

    Attributes:
        stop: the signal that asked this rank to end. stop_asked: whether one had asked any rank when the last step
            ended; the same on all ranks.
        wants_checkpoint: set by rank 0 when one is due by its clock. checkpoint_due: whether it had been when the last
            step ended; the same on all ranks.
        sent_to: bytes that this rank sends to each other rank for a sum.
    """

    wants_checkpoint = checkpoint_due = stop_asked = False

    def __init__(self, members: Members, stop: StopRequest) -> None:
        self.stop, self._is_first, run = stop, members.rank == 0, members.config.run
        self._rest = len(fields(Work)) + members.links.count  # numbers after the signals, loss and squares
        self._sums = Sums(members.side, 3 + self._rest, timeout=run.timeout_seconds, checksums=run.checksums)
        self.sent_to = self._sums.sent_to

    def of(
        self, loss: float, squares: float, work: Work, by_link: list[float]
    ) -> tuple[float, float, Work, list[float]]:
        """Return the same numbers, summed over all ranks; `by_link`: of `Links.values`."""
        asked = self.stop.number + _CHECKPOINT * (self._is_first and self.wants_checkpoint)
        sums = torch.tensor([asked, loss, squares, *astuple(work), *by_link], dtype=torch.float64)
        asked, loss, squares, *rest = self._sums.of(sums).tolist()
        self.checkpoint_due, self.stop_asked = asked >= _CHECKPOINT, asked % _CHECKPOINT > 0
        return loss, squares, Work(*rest[: (count := len(fields(Work)))]), rest[count:]

    def total(self, value: float) -> float:
        """Sum a number over all ranks, in a message as long as a step's; every rank calls this."""
        return float(self._sums.of(torch.tensor([value] + [0.0] * (2 + self._rest), dtype=torch.float64))[0])


class LocalModel:
    """The stages of one rank, their gradients and their optimizer; every rank makes one.

    Attributes:
        modules: by stage. config, generation_config: of the whole model, as Hugging Face has them.
        tied: keeps a tied embedding's copies equal. gradients: of all trained parameters but a copy that follows.
    """

    def __init__(self, members: Members) -> None:
        self.modules = self._build_modules(members)
        config, prepared = members.config, members.prepared
        is_tied = bool(getattr(self.config, "tie_word_embeddings", False)) and not config.lora.rank
        self.tied = TiedWeights(prepared, self.modules, members.replicas, tied=is_tied)
        trained = [(p, m) for m in self.modules.values() for p in m.parameters() if p.requires_grad]
        owned = [(p, m) for p, m in trained if p is not self.tied.follower]
        others = [p for p, _ in trained if p is self.tied.follower]
        self.gradients = Gradients([p for p, _ in owned], prepared.storage, others=others)
        second = self.tied.copies[1:]  # another copy on this rank, which norms do not count
        self._counted = [p for p, _ in owned if not any(p is copy for copy in second)]
        named = [(m.aliases.get(name := m.names[p], name), p) for p, m in owned]
        self.optimizer = optim.make_optimizer(named, config.optimizer)

    def squared_norm(self) -> float:
        """Sum the squares of all gradients, each once."""
        return optim.squared_norm(self.gradients.of(self._counted))

    def states_bytes(self) -> int:
        """Count the bytes of the optimizer's states."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(x.nbytes for value in states for x in optim.parts_of(value).values())

    def _build_modules(self, members: Members) -> dict[int, StageModule]:
        prepared, layout = members.prepared, members.layout
        stages = layout.stages_of(members.replicas.place)
        layers = frozenset(layer for stage in stages for layer in layout.layers_of(stage))
        share = Share(layers=layers, first=0 in stages, last=layout.stages - 1 in stages)
        model = build_share(
            members.config, share, vocab=prepared.vocab, device=prepared.device, autocast=prepared.autocast
        )  # fmt: skip
        self.config, self.generation_config = model.config, model.generation_config
        modules = {
            stage: StageModule(
                model, layers=layout.layers_of(stage), first=stage == 0, last=stage == layout.stages - 1,
                autocast=prepared.autocast,
            )
            for stage in stages
        }  # fmt: skip
        for stage, module in modules.items():
            compress(module, prepared.activations[stage], prepared.device)
        return modules


class Trainer:
    """Takes the steps of one rank and writes no files; every rank makes one.

    Attributes:
        pipeline: this rank's stages with their schedule; `pipeline_kind` is its class, which measurements replace.
        rates: chosen in the last step of the warm-up. order: of the samples.
        work: of this rank in the last step. saved_bytes: peak of saved activations, equal in every step: on this rank,
            and on the one with most; None if they are not counted.

    Raises:
        AgreementError: ranks have different configurations, texts or versions.
    """

    pipeline_kind: type[Pipeline] = Pipeline
    elastic: Elastic | None = None
    saved_bytes: tuple[int, int] | None = None

    def __init__(self, prepared: Prepared, stop: StopRequest | None = None) -> None:
        self.members = members = Members(prepared)
        prepared, config = members.prepared, members.config
        self.model = model = LocalModel(members)
        group = members.replicas.pipeline
        self.pipeline = self.pipeline_kind(prepared, model.modules, model.gradients.storage, group)
        self.pipeline.followed = model.tied.state
        self.evaluation = HeldOutEvaluation(self.pipeline, members.replicas.side)
        self.rates = Rates(members, self.pipeline, model.tied, self.evaluation)
        self.sums, self.work = StepSums(members, stop or StopRequest()), Work()
        self.order = Order(samples=len(prepared.data.train), batch=config.data.batch, seed=seed_of(config))
        if config.elastic.lighthouse:
            self.elastic = Elastic(prepared, self.pipeline, model.optimizer, members.side)
        torch.manual_seed(config.run.seed + 1 + members.rank)  # for dropout, each rank has its own

    def step(self, done: int, trace: Trace | None = None) -> StepMetrics:
        """Take an optimizer step after `done` others; return metrics over all ranks, by this rank's clock.

        With replicas that come and go, the step follows the steps that they have done, and is repeated until all
        present ones have its gradients.

        Raises:
            DivergedError: loss or gradients are NaN or infinite.
        """
        lost = Work()  # of this rank in attempts that were repeated
        while True:
            with span(trace, "step", step=done + 1), self.rates.choosing(done + 1):
                metrics = self._attempt(done, lost, trace)
            if metrics is not None:
                return metrics

    def _attempt(self, done: int, lost: Work, trace: Trace | None) -> StepMetrics | None:
        members, model, begin = self.members, self.model, time.perf_counter()
        config, replicas, links = members.config, members.replicas, members.links
        if self.elastic is not None:
            done = self.elastic.begin()
        rate = optim.learning_rate(config.optimizer, step=done, steps=config.run.steps)
        optim.set_learning_rate(model.optimizer, rate)
        global_ids, train = self.order.ids(done), members.prepared.data.train
        ids = replicas.share(global_ids)
        inputs, targets = train.batch(ids)
        with span(trace, "wait", message="rows of the tied embedding"):
            model.tied.begin_step(inputs, exact=done < config.codec_warmup_steps)
        with span(trace, "pipeline"):
            positions, learned = train.positions(ids), train.learned(global_ids)
            loss, work = self._pass(inputs, targets, ids, positions=positions, learned=learned)
        self.work = work
        model.gradients.finish(config.pipeline.microbatches)
        with span(trace, "all-reduce"):
            self._exchange_gradients(work)
        if self.elastic is not None and not self.elastic.commit():
            model.gradients.drop()
            lost.add_traffic(work)
            return None
        work.add_traffic(lost)
        with span(trace, "wait", message="the sums of all ranks"):
            squares = model.squared_norm()
            by_link = links.values(members.rank, self._by_receiver(work), work.wait_seconds)
            work.other_bytes += sum(self.sums.sent_to.values())
            loss, squares, work, shares = self.sums.of(loss, squares, work, by_link)
        loss, norm = loss / replicas.count, math.sqrt(squares / replicas.count)  # their gradients are equal by now
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(f"step {done + 1}: the loss is {loss}, the norm of the gradients {norm}")
        with span(trace, "optimizer"):
            model.gradients.clip(norm=norm, limit=config.optimizer.clip)
            model.gradients.step(model.optimizer)
        by_name, waiting = links.named(shares)
        pipelines = replicas.count if self.elastic is None else self.elastic.replicas
        return step_metrics(
            step=done + 1, loss=loss, lr=rate, grad_norm=norm, tokens=inputs.numel() * pipelines,
            seconds=time.perf_counter() - begin, ranks=members.ranks, work=work,
            bytes_activations=None if self.saved_bytes is None else self.saved_bytes[1],
            links=by_name, waiting=waiting, rates=dict(links.rates),
        )  # fmt: skip

    def evaluate(self, *, with_codecs: bool = True) -> dict[str, float]:
        """Compute held-out loss and exact match without and with codecs; empty without held-out text.

        Returns:
            {"held_out_loss": ..., "exact_match": ...} and the same with "_codecs" if there are several stages; exact
            match for samples only.
        """
        config, held_out = self.members.config, self.members.prepared.data.held_out
        batch, batches = config.data.batch, config.run.eval_batches
        if not len(held_out):
            return {}
        scores: dict[str, tuple[float, float]] = {}
        with self.model.tied.exact(held_out.batch(evaluated(held_out, batch=batch, batches=batches))[0]):
            scores[""] = self.evaluation.scores(held_out, batch=batch, batches=batches)
            if self.members.layout.stages > 1 and with_codecs:
                codecs = self.pipeline.codecs.forward
                scores["_codecs"] = self.evaluation.scores(held_out, batch=batch, batches=batches, codecs=codecs)
        exact = {f"exact_match{suffix}": exact for suffix, (_, exact) in scores.items()}
        losses = {f"held_out_loss{suffix}": loss for suffix, (loss, _) in scores.items()}
        return losses | (exact if config.data.format == "jsonl" else {})

    def memory(self) -> dict[str, Any]:
        """Measure the bytes that this rank's stages take after the last step."""
        lowbit_stages, layout, device = self.pipeline.lowbit_stages, self.members.layout, self.members.prepared.device
        stages = [
            {
                "stage": index,
                "layers": len(layout.layers_of(index)),
                "weights": sum(p.nbytes for p in module.parameters()),
                "codec_states": lowbit_stages[index].state_bytes() if index in lowbit_stages else 0,
                "messages": lowbit_stages[index].traffic.peak_bytes if index in lowbit_stages else 0,
            }
            for index, module in self.model.modules.items()
        ]
        memory: dict[str, Any] = {
            "rank": self.members.rank,
            "stages": stages,
            "optimizer": self.model.states_bytes(),
            "saved_activations": None if self.saved_bytes is None else self.saved_bytes[0],
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if device.type == "cuda":
            memory["gpu"] = torch.cuda.max_memory_allocated(device)
        return memory

    def _pass(self, *batch: Tensor, **samples: Any) -> tuple[float, Work]:
        """Run forward and backward; if activations are compressed, the first call counts their bytes."""
        if not any(self.members.prepared.activations) or self.saved_bytes is not None:
            return self.pipeline.step(*batch, **samples)
        with counted(nn.ModuleList(self.model.modules.values())) as saved:
            loss, work = self.pipeline.step(*batch, **samples)
        most = torch.tensor(saved.total)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.members.side)
        self.saved_bytes = saved.total, int(most)
        return loss, work

    def _exchange_gradients(self, work: Work) -> None:
        replicas, gradients, apart = self.members.replicas, self.model.gradients, self.model.tied.apart
        if apart:  # averages include only the last stage's copy
            self._sum_tied(work)
        if replicas.count > 1:
            replicas.average_all(gradients)
            replicas.note_traffic(work)
        if self.elastic is not None:
            gradients.average(self.elastic.average)
            self.elastic.note_traffic(work)
        if not apart:  # copies on one rank are in different buckets, but must stay equal
            self._sum_tied(work)

    def _sum_tied(self, work: Work) -> None:
        tied = self.model.tied
        with self.model.gradients.in_full(tied.copies):
            tied.sum_gradients()
        work.add_traffic(tied.sent)

    def _by_receiver(self, work: Work) -> Counter[int]:
        """Count the bytes that this rank sends in a step to each other, including the sums that follow."""
        members, replicas, peer = self.members, self.members.replicas, self.model.tied.peer
        sent, pipeline = Counter[int](self.sums.sent_to), replicas.members(replicas.index)
        for (_, stage), nbytes in self.pipeline.sent.items():
            sent[pipeline[members.layout.rank_of(stage)]] += nbytes
        shares = [(replicas.others if self.elastic is None else [OUTSIDE], work.gradient_bytes)]
        shares += [([rank for rank in pipeline if rank != members.rank], work.other_bytes)]  # announcements
        shares += [([] if peer is None else [peer], work.tied_bytes)]
        for receivers, nbytes in shares:
            sent.update({rank: round(nbytes / len(receivers)) for rank in receivers})
        return sent
