"""Traffic by link and waiting by machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from lowbit.train import StepMetrics, TrainConfig, train, trainer
from lowbit.train.config import PipelineConfig
from lowbit.train.layout import make_layout
from lowbit.train.links import OUTSIDE, Links, link_name
from tests.processes import Ranks
from tests.train.runs import tiny

LIMIT = 110


def _links(machines: str, *, ranks: int, pipelines: int = 1, **pipeline: object) -> Links:
    layout = make_layout(PipelineConfig(**pipeline), ranks=ranks, layers=12)
    return Links(layout, pipelines, list(machines))


def test_only_what_leaves_a_machine_is_on_a_link():
    links = _links("aabb", ranks=4)
    assert links.pairs == [(0, 2), (2, 0)]
    assert links.machines == [0, 2]
    sums = [0.0] * links.count
    sent = {0: {1: 10}, 1: {2: 20, 0: 5}, 2: {3: 30, 1: 7}, 3: {2: 40}}
    for rank, of_rank in sent.items():
        sums = [a + b for a, b in zip(sums, links.values(rank, of_rank, 1.0 + rank), strict=True)]
    assert links.named(sums) == ({"0 to 2": 20, "2 to 0": 7}, {"0": 1.5, "2": 3.5})


def test_a_v_goes_back_on_the_same_link_and_laps_on_another():
    assert _links("ab", ranks=2, schedule="ZBVZeroBubble", stages_per_rank=2).pairs == [(0, 1), (1, 0)]
    laps = _links("abc", ranks=3, schedule="Interleaved1F1B", stages_per_rank=2, microbatches=3)
    assert (2, 0) in laps.pairs
    assert (0, 2) in laps.pairs
    assert _links("aa", ranks=2).pairs == []


def test_gradients_between_pipelines_are_on_links_too():
    links = _links("abab", ranks=2, pipelines=2)  # machine a has the first stages
    assert links.pairs == [(0, 1), (1, 0)]
    assert links.values(0, {2: 900.0}, 0.0)[:2] == [0.0, 0.0], "rank 2 is on the same machine"
    links = _links("aabbcc", ranks=2, pipelines=3)
    assert dict(zip(links.pairs, links.values(0, {2: 450.0, 4: 450.0}, 0.0), strict=False)) == {
        (0, 2): 450.0, (0, 4): 450.0, (2, 0): 0.0, (2, 4): 0.0, (4, 0): 0.0, (4, 2): 0.0,
    }  # fmt: skip


def test_ends_of_a_pipeline_and_other_runs_have_links():
    assert (2, 0) in _links("abc", ranks=3).pairs, "a tied embedding, and the sums of a step"
    layout = make_layout(PipelineConfig(), ranks=2, layers=12)
    links = Links(layout, 1, ["a", "a"], elastic=True)
    assert links.named(links.values(0, {OUTSIDE: 700.0, 1: 5.0}, 0.0))[0] == {"0 to other replicas": 700}


def _on_two_machines(config: TrainConfig) -> list[StepMetrics]:
    found: list[StepMetrics] = []
    own = trainer.machine_name
    trainer.machine_name = lambda: f"machine of rank {dist.get_rank()}"
    try:
        train(config, on_step=found.append)
    finally:
        trainer.machine_name = own
    return found


def test_bytes_of_links_add_up_to_those_sent(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, pipeline={"boundary": "stock-fp32"})
    here, there = ranks.run(_on_two_machines, config, timeout=LIMIT)
    for metrics, other in zip(here, there, strict=True):
        assert metrics.links.keys() == {link_name(0, 1), link_name(1, 0)}
        assert sum(metrics.links.values()) == metrics.bytes_sent
        assert sum(metrics.waiting.values()) == pytest.approx(2 * metrics.wait_seconds)
        assert (metrics.links, metrics.waiting) == (other.links, other.waiting)
