"""One rank of a benchmark: a process that holds several training runs and advances them on demand.

``python -m lowbit.bench.rank`` reads orders from standard input, one JSON list `[method, arguments]` a line, and
answers each with one line of JSON. All boundary formats that are compared live in the same processes, so that
they can take turns: what else the machine does then hits all of them alike. Standard output belongs to the answers;
what libraries print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lowbit.pipeline import LowBitStage
from lowbit.ranks.errors import first_line
from lowbit.ranks.process_group import joined
from lowbit.train.config_file import from_mapping
from lowbit.train.data import Order
from lowbit.train.loop import Trainer, threads_per_rank
from lowbit.train.prepare import prepare

TIMEOUT_SECONDS = 600.0


class Rank:
    """This rank's part of every run, by name. All ranks get the same orders."""

    def __init__(self) -> None:
        self._trainers: dict[str, Trainer] = {}
        self._steps: dict[str, int] = {}

    def open(self, name: str, config: dict[str, Any], samples: int) -> None:
        """Set up a run.

        Args:
            name: how later orders call it.
            config: of the run, as nested mappings.
            samples: train on so many windows of the text, over and over; 0: on all.
        """
        made = from_mapping(config)
        trainer = Trainer(prepare(made, ranks=dist.get_world_size(), rank=dist.get_rank()))
        if samples:
            trainer.order = Order(samples=samples, batch=made.data.batch, seed=made.run.seed)
        self._trainers[name], self._steps[name] = trainer, 0

    def steps(self, name: str, count: int) -> list[dict[str, Any]]:
        """Advance a run; metrics of each step (`lowbit.train.metrics.StepMetrics`)."""
        dist.barrier()
        start = self._steps[name]
        self._steps[name] += count
        done = [self._trainers[name].step(step) for step in range(start, start + count)]
        return [dataclasses.asdict(metrics) for metrics in done]

    def held_out_loss(self, name: str) -> float:
        """Loss on held-out text, with full precision at the boundaries."""
        trainer = self._trainers[name]
        batch, batches = trainer.config.data.batch, trainer.config.run.eval_batches
        held_out = trainer.prepared.data.held_out
        return trainer.evaluation.loss(held_out, batch=batch, batches=batches)

    def evaluate(self, name: str) -> float:
        """Seconds that the held-out loss took, with this run's formats at the boundaries."""
        trainer = self._trainers[name]
        held_out, run = trainer.prepared.data.held_out, trainer.config.run
        codecs = None
        if trainer.config.pipeline.boundary == "lowbit":
            codecs = trainer.prepared.codecs.forward
        dist.barrier()
        start = time.perf_counter()
        trainer.evaluation.loss(held_out, batch=trainer.config.data.batch, batches=run.eval_batches, codecs=codecs)
        return time.perf_counter() - start

    def state_bytes(self, name: str) -> int:
        """Bytes that this rank's codecs keep between steps."""
        stages = self._trainers[name].pipeline.stages
        return sum(stage.state_bytes() for stage in stages if isinstance(stage, LowBitStage))

    def train(self, config: dict[str, Any]) -> None:
        """A whole run, with everything that it writes, as `lowbit train` would do it."""
        made = from_mapping(config)
        Trainer(prepare(made, ranks=dist.get_world_size(), rank=dist.get_rank())).run()


def pin(rank: int, ranks: int) -> None:
    """Give this rank a share of the machine's cores for itself, where there are enough of them."""
    cores = sorted(os.sched_getaffinity(0))
    threads = threads_per_rank(ranks)
    if ranks <= len(cores):
        os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])
    torch.set_num_threads(threads)


def follow(worker: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Follow one order: {"result": ...}, or {"error": one line}, after which this process is of no more use."""
    try:
        return {"result": getattr(worker, method)(**arguments)}
    except Exception as error:
        traceback.print_exc()
        return {"error": first_line(error)}


def serve(make: Callable[[], Any]) -> None:
    """Join the other ranks and let what `make` makes then follow orders until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pin(rank, ranks)
    with joined(TIMEOUT_SECONDS):
        worker = make()
        for line in sys.stdin:
            method, arguments = json.loads(line)
            answers.write(json.dumps(follow(worker, method, arguments)) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve(Rank)
