"""One rank of the runs of `test_auto`: `lowbit train` with other numbers of steps between choices."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch.distributed as dist

from lowbit.train import auto, from_mapping
from lowbit.train.loop import Run
from lowbit.train.metrics import StepMetrics
from lowbit.train.prepare import prepare
from lowbit.train.trainer import Trainer
from lowbit_lab.bench.worker import report_progress, serve


class AutoRuns:
    def train(self, config: dict[str, Any], constants: dict[str, float]) -> list[dict[str, Any]]:
        """What the run chose; rank 0 reports each step."""

        def report(metrics: StepMetrics) -> None:
            if dist.get_rank() == 0:
                report_progress(dataclasses.asdict(metrics))

        with mock.patch.multiple(auto, **constants):
            trainer = Trainer(prepare(from_mapping(config), ranks=dist.get_world_size()))
            return Run(trainer).finish(report).formats


if __name__ == "__main__":
    serve(AutoRuns)
