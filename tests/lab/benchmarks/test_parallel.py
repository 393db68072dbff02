"""`python -m benchmarks parallel`: a real measurement of a tiny model on two ranks."""

from pathlib import Path

import pytest

from benchmarks.parallel import COMMAND, ParallelBenchmark
from lowbit.report import run
from tests.lab.bench.shown import shown


@pytest.mark.slow
def test_a_layout_is_measured_beside_one_process(tmp_path: Path):
    settings = ParallelBenchmark(layouts=("sequence",), policies=("published",), dim=64, inner=172, layers=2, length=32)
    (row,) = run(COMMAND, settings).rows
    assert row["error"] == pytest.approx(row["error_alone"], rel=0.05)
    assert row["kept"] == row["kept_bytes"] / row["plain_bytes"] < 1.05 * row["kept_alone"]
    assert "TP, SP" in shown(COMMAND, [row], tmp_path)
