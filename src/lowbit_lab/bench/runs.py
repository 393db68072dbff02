"""One rank of several training runs that take turns: the program of the pipeline benchmarks."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch.distributed as dist

from lowbit.pipeline import LowBitStage, connect_more
from lowbit.train.config import from_mapping
from lowbit.train.data import Order
from lowbit.train.loop import Run
from lowbit.train.metrics import StepMetrics
from lowbit.train.prepare import Prepared, prepare
from lowbit.train.trainer import Trainer
from lowbit.wire.messages import gather_json
from lowbit_lab.bench.device import Device, Recording
from lowbit_lab.bench.worker import TIMEOUT_SECONDS, report_progress, serve


class Runs:
    """Has this rank's part of every run, by name. All ranks get the same orders."""

    def __init__(self) -> None:
        self._trainers: dict[str, Trainer] = {}
        self._steps: dict[str, int] = {}
        self._connections: dict[str, int] = {}
        self._devices: dict[str, Device] = {}
        self._recordings: dict[str, Recording] = {}

    def open(self, name: str, config: dict[str, Any], samples: int, connections: int = 1, compute: float = 0.0) -> None:
        """Set up a run.

        Args:
            name: of the run in later orders.
            config: of the run, as nested mappings.
            samples: windows of the text to train on, in every epoch; 0: all.
            connections: for each pair of ranks, at all steps of this run, which posts receives for the next ones.
            compute: seconds that a stage waits in a forward pass, with recorded activations; 0: it computes.
        """
        trainer = _trainer(config)
        if samples:
            trainer.order = Order(samples=samples, batch=trainer.config.data.batch, seed=trainer.config.run.seed)
        self._trainers[name], self._steps[name], self._connections[name] = trainer, 0, connections
        if compute:
            self._devices[name] = Device(trainer, self._recording(trainer.prepared, samples), compute)

    def steps(self, name: str, count: int) -> list[dict[str, Any]]:
        """Advance a run; return metrics of each step (`lowbit.train.metrics.StepMetrics`)."""
        connect_more(self._trainers[name].replicas.pipeline, self._connections[name], timeout=TIMEOUT_SECONDS)
        dist.barrier()
        start = self._steps[name]
        self._steps[name] += count
        return [self._step(name, step) for step in range(start, start + count)]

    def _step(self, name: str, step: int) -> dict[str, Any]:
        trainer = self._trainers[name]
        if name in self._devices:
            self._devices[name].ids = trainer.order.ids(step)
        return dataclasses.asdict(trainer.step(step))

    def _recording(self, prepared: Prepared, samples: int) -> Recording:
        """Return the recording of a model cut into these stages; contenders that differ in formats share it."""
        config, samples = prepared.config, samples or len(prepared.data.train)
        key = f"{config.model} {config.data} {prepared.layout} {config.run.seed} {config.pipeline.boundary}"
        if key not in self._recordings:
            self._recordings[key] = Recording(prepared, samples)
        return self._recordings[key]

    def turn(self, name: str, count: int, *, evaluate: bool) -> dict[str, Any]:
        """Take `count` steps, and evaluate. A step before them is not counted: caches are cold and TCP starts again."""
        return {
            "steps": self.steps(name, 1 + count)[1:],
            "evaluation": self.evaluate(name) if evaluate else None,
            "state_bytes": self.state_bytes(name),
        }

    def held_out_loss(self, name: str) -> float:
        """Return the loss on held-out text, with full precision at the boundaries."""
        return self._evaluate(name, None)

    def evaluate(self, name: str) -> float:
        """Return the seconds of an evaluation on held-out text, with this run's formats at the boundaries."""
        prepared = self._trainers[name].prepared
        codecs = prepared.codecs.forward if prepared.config.pipeline.boundary == "lowbit" else None
        dist.barrier()
        start = time.perf_counter()
        self._evaluate(name, codecs)
        return time.perf_counter() - start

    def state_bytes(self, name: str) -> int:
        """Return the bytes that this rank's codecs keep between steps."""
        stages = self._trainers[name].pipeline.stages
        return sum(stage.state_bytes() for stage in stages if isinstance(stage, LowBitStage))

    def train(self, config: dict[str, Any], seconds: float = math.inf) -> None:
        """Run a training and write its files as `lowbit train` does, for about `seconds`; rank 0 reports steps."""
        run, passed = Run(_trainer(config)), 0.0

        def report(metrics: StepMetrics) -> bool:
            nonlocal passed
            passed += metrics.seconds
            if dist.get_rank() == 0:
                report_progress(dataclasses.asdict(metrics))
            enough = passed + metrics.seconds / 2 > seconds  # the next step would end farther from it than this one
            return gather_json(enough, run.trainer.side)[0]

        run.finish(report)

    def _evaluate(self, name: str, codecs: Any) -> float:
        trainer = self._trainers[name]
        batch, batches = trainer.config.data.batch, trainer.config.run.eval_batches
        held_out = trainer.prepared.data.held_out
        return trainer.evaluation.scores(held_out, batch=batch, batches=batches, codecs=codecs)[0]


def _trainer(config: dict[str, Any]) -> Trainer:
    return Trainer(prepare(from_mapping(config), ranks=dist.get_world_size()))


if __name__ == "__main__":
    serve(Runs)
