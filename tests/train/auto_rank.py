"""One rank of the runs of `test_auto`: `lowbit train` with other numbers of steps between choices."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import torch.distributed as dist

from lowbit.train import auto, connections, from_mapping
from lowbit.train.loop import Run
from lowbit.train.metrics import StepMetrics
from lowbit.train.prepare import prepare
from lowbit.train.trainer import Trainer
from lowbit_lab.bench.worker import report_progress, serve


class AutoRuns:
    def train(
        self, config: dict[str, Any], constants: dict[str, float], permitted: bool = True
    ) -> list[dict[str, Any]]:
        """What the run chose; rank 0 reports each step. permitted: whether machines permit BBR."""

        def report(metrics: StepMetrics) -> None:
            if dist.get_rank() == 0:
                report_progress(dataclasses.asdict(metrics))

        change = connections.set_congestion_control if permitted else lambda name, others: False
        with mock.patch.object(connections, "set_congestion_control", change), contextlib.ExitStack() as stack:
            for name, value in constants.items():
                stack.enter_context(mock.patch.object(auto, name, value))
            trainer = Trainer(prepare(from_mapping(config), ranks=dist.get_world_size()))
            return Run(trainer).finish(report).formats


if __name__ == "__main__":
    serve(AutoRuns)
