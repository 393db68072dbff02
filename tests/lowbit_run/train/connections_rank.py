"""One rank of the runs of `test_links`: `lowbit train` on machines that may forbid BBR."""

import dataclasses
from typing import Any
from unittest import mock

import torch.distributed as dist

from lowbit_lab.bench.workers import report_progress, serve
from lowbit_run.train import from_mapping, links
from lowbit_run.train.loop import Run
from lowbit_run.train.metrics import StepMetrics
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer


class Runs:
    def train(self, config: dict[str, Any], permitted: bool = True) -> None:
        """Train; rank 0 reports each step. permitted: whether machines permit BBR."""

        def report(metrics: StepMetrics) -> None:
            if dist.get_rank() == 0:
                report_progress(dataclasses.asdict(metrics))

        change = links.set_congestion_control if permitted else lambda name, others: False
        with mock.patch.object(links, "set_congestion_control", change):
            trainer = Trainer(prepare(from_mapping(config), ranks=dist.get_world_size()))
            Run(trainer).finish(report)


if __name__ == "__main__":
    serve(Runs)
