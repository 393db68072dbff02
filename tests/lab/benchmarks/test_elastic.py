"""`python -m benchmarks replicas` and `diloco`: their arithmetic.

tests/integrations/test_benchmarks.py runs them where torchft is installed.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.elastic import DILOCO, _cost, _fragments, _have_committed, means
from lowbit.report import compare
from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model
from tests.lab.bench.shown import shown


def test_the_cost_of_a_kill():
    logs = [
        [(1, 1.0, True), (2, 2.0, True), (2, 4.0, False), (3, 7.0, True), (4, 8.0, True), (5, 20.0, True)],
        [(1, 1.1, True), (2, 2.1, True), (4, 9.0, True)],  # killed at 2.5
        [(1, 1.0, True), (2, 2.2, True), (2, 4.0, False), (2, 5.0, False), (3, 6.0, True), (4, 8.5, True)],
    ]
    lines = [[{"step": s, "time": t, "committed": c, "replicas": 3} for s, t, c in log] for log in logs]
    run: Any = SimpleNamespace(job=SimpleNamespace(replicas=3), lines=lines.__getitem__)
    assert _cost(run, 1, 2.5) == {"gap": 5.0, "back": 6.5, "lost": 2}
    assert _have_committed(run, 0.0, 3)
    assert not _have_committed(run, 0.0, 4)
    assert not _have_committed(run, 1.1, 3)


def test_means_over_the_seeds(tmp_path: Path):
    rows = [
        {"seed": seed, "format": name, "fragments": fragments, "held_out_loss": loss, "bytes_per_token": sent}
        for seed, name, fragments, loss, sent in [
            (0, "ddp", 1, 1.0, 800.0), (0, "fp32", 1, 1.2, 80.0), (0, "int4", 1, 1.25, 8.0), (0, "int4", 2, 1.5, 8.0),
            (1, "fp32", 1, 1.4, 80.0), (1, "int4", 1, 1.43, 8.0),
        ]
    ]  # fmt: skip
    compared = compare(rows, DILOCO.baselines)
    found = {(row["format"], row["fragments"]): row for row in means(compared)}
    four = found["int4", 1]
    assert four["seeds"] == 2
    assert four["over_diloco"] == pytest.approx(0.04)
    assert four["over_diloco_spread"] == pytest.approx(0.02 / 2**0.5)
    assert four["bytes_under_ddp"] == 100
    assert four["over_ddp"] == pytest.approx(0.25), "of the seed that has it"
    text = shown(DILOCO, compared, tmp_path)
    assert "FP32, each step" in text
    assert "+0.0400" in text


def test_fragments_hold_all_parameters_once():
    net = build_model(ModelConfig(dim=32, layers=3, heads=2), vocab=256, sequence=16, seed=0)
    parts = _fragments(net, 2)
    names = [id(p) for part in parts for p in part.parameters()]
    assert len(names) == len(set(names))
    assert set(names) == {id(p) for p in net.parameters()}
    assert _fragments(net, 1) == [net]
