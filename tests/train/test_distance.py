"""How far neighbours are apart, and what a schedule makes of it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit.train import TrainConfig, loop, train
from lowbit.train.config import PipelineConfig
from lowbit.train.layout import make_layout, needless
from tests.processes import Ranks
from tests.train.runs import tiny


@pytest.mark.parametrize(
    ("schedule", "per_rank", "ranks", "rtt", "said"),
    [
        ("Interleaved1F1B", 4, 2, 0.1, "crosses between them 14 times in a row (0.70 s of each"),
        ("ZBVZeroBubble", 2, 2, 0.1, "crosses between them 4 times in a row (0.20 s of each step)"),
        ("Interleaved1F1B", 2, 3, 0.1, "crosses 4 times (0.20 s): set pipeline.stages_per_rank"),
        ("Interleaved1F1B", 4, 2, 0.001, None),
        ("GPipe", 1, 3, 10.0, None),
    ],
)
def test_needless_crossings_are_told_where_they_cost_time(
    schedule: str, per_rank: int, ranks: int, rtt: float, said: str | None
):
    pipeline = PipelineConfig(schedule=schedule, stages_per_rank=per_rank, microbatches=12)
    plan = make_layout(pipeline, ranks=ranks, layers=12)
    pairs = {(i, j): rtt for i in range(ranks) for j in range(i + 1, ranks)}
    line = needless(plan, schedule, pairs)
    assert (line is None) if said is None else (line and said in line)


def test_only_pairs_between_which_a_step_waits_count():
    plan = make_layout(PipelineConfig(schedule="Interleaved1F1B", stages_per_rank=2), ranks=3, layers=6)
    trips = {(0, 1): 0.001, (1, 2): 0.001, (0, 2): 0.2}
    line = needless(plan, "Interleaved1F1B", trips)
    assert line is not None
    assert line.startswith("neighbours are up to 200 ms apart, there and back, and Interleaved1F1B")


def _warned(config: TrainConfig, least: float) -> tuple[list[str], float | None]:
    with mock.patch.object(loop.log, "warning") as warning, mock.patch.object(needless, "__defaults__", (least,)):
        summary = train(config)
    lines = [str(call.args[-1]) for call in warning.call_args_list]
    assert not lines or dist.get_rank() == 0
    return lines, summary.round_trip_seconds


def test_a_run_measures_once_and_rank_0_tells(ranks: Ranks, tmp_path: Path):
    pipeline = {"schedule": "Interleaved1F1B", "stages_per_rank": 2}
    config = tiny(tmp_path, pipeline=pipeline, run={"steps": 1})
    (lines, seconds), (others, same) = ranks.run(_warned, config, -1.0, timeout=110)
    assert (len(lines), others) == (1, [])
    assert "Interleaved1F1B with 2 stages on each of 2 ranks crosses between them 6" in lines[0]
    assert seconds == same
    assert seconds is not None
    assert seconds > 0
