"""`python -m benchmarks titan`: a real measurement of a tiny model, where TorchTitan is installed."""

from pathlib import Path

import pytest

from benchmarks.titan import COMMAND, OWN, TitanBenchmark
from lowbit.report import run
from lowbit_lab.bench.workers import UNLIMITED
from tests.lab.bench.shown import shown


def test_both_stages_train_alike(tmp_path: Path):
    pytest.importorskip("torchtitan")
    settings = TitanBenchmark(
        links=(UNLIMITED,), boundaries=(OWN, "fp32", "int4"), layers=4, batch=4, sequence=16, rounds=1, steps=1
    )
    own, fp32, int4 = run(COMMAND, settings).rows
    assert own["loss"] == fp32["loss"] != int4["loss"]
    assert own["bits_forward"] == 32 < fp32["bits_forward"] < 32.1
    assert 4.5 < int4["bits_forward"] < 4.7
    assert own["speedup_stock_fp32"] == 1
    text = shown(COMMAND, [own, fp32, int4], tmp_path)
    assert "over its" in text
