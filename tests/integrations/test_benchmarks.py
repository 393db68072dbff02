"""`python -m benchmarks replicas` and `diloco`, with the smallest settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import elastic
from lowbit.codecs import parse
from lowbit.collectives import all_reduce_bytes
from lowbit.report import run
from lowbit.train.config import DataConfig, ModelConfig
from tests.lab.bench.shown import shown

pytest.importorskip("torchft")

MODEL = ModelConfig(dim=32, layers=2, heads=2)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i) for i in range(2000)))
    return DataConfig(text=(str(text),), batch=2, sequence=32)


def test_a_killed_replica(data: DataConfig, tmp_path: Path):
    settings = elastic.ReplicasBenchmark(
        kills=1, seeds=1, replicas=3, steps=60, model=MODEL, data=data, held_out_windows=4
    )
    report = run(elastic.REPLICAS, settings)
    killed, undisturbed = report.rows
    assert (killed["run"], undisturbed["run"]) == ("killed", "undisturbed")
    assert (killed["kills"], undisturbed["kills"]) == (1, 0)
    assert killed["differing"] == undisturbed["differing"] == 0
    assert killed["identical"] == undisturbed["identical"] == 60
    assert killed["gap"] > 0
    assert killed["back"] > 0
    assert killed["held_out_loss"] < 5.6
    assert "killed" in shown(elastic.REPLICAS, report.rows, tmp_path)


def test_diloco(data: DataConfig):
    settings = elastic.DiLoCoBenchmark(
        seeds=1, replicas=2, steps=8, sync_every=4, model=MODEL, data=data, held_out_windows=4
    )
    rows = {(row["format"], row["fragments"]): row for row in run(elastic.DILOCO, settings).rows}
    assert set(rows) == {("ddp", 1), ("fp32", 1), ("int4", 1), ("int2", 1), ("fp32", 2), ("int4", 2)}
    assert all(row["identical"] for (_, fragments), row in rows.items() if fragments == 1)
    assert rows["fp32", 1]["bytes_under_ddp"] == 4
    numel = 2 * 256 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 128 + 2 * 32) + 32
    sent = all_reduce_bytes(numel, parse(elastic.SHORT["int4"]), rank=0, ranks=2)
    assert rows["int4", 1]["bytes_per_token"] == pytest.approx(2 * sent / (8 * 2 * 32), rel=0.01)
    assert all(row["held_out_loss"] < 6 for row in rows.values())
