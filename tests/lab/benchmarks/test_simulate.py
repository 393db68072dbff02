"""`python -m benchmarks simulate`, `grid` and `arena`: small settings, and the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predicted import ARENA, GRID, ArenaSettings, GridSettings
from benchmarks.simulate import CASES, COMMAND, Case, SimulateBenchmark, config_of, predict, ranked_right
from lowbit.config import ConfigError
from lowbit.report import run
from lowbit.simulate import Channel
from lowbit.train.config import DataConfig, ModelConfig
from lowbit_lab.network import Link

TINY = {"model": ModelConfig(dim=32, layers=4, heads=2), "data": DataConfig(batch=4, sequence=32), "steps": 2}


def test_a_case_is_its_text():
    case = Case.parse("2:1F1B/1/8:fp32:100mbit/40ms")
    assert (case.ranks, case.split.microbatches, case.boundary, case.link) == (2, 8, "fp32", Link(100.0, rtt_ms=40.0))
    assert Case.parse(str(case)) == case
    assert len(set(CASES)) == 16
    changing = Case.parse("2:1F1B/1/8:fp32:100mbit@1s:9mbit")
    assert changing.link == Link(100.0, changes=((1, Link(9.0)),))
    with pytest.raises(ConfigError, match="cases has 100mbit@1s:9mbit, which changes"):
        SimulateBenchmark(cases=(changing,), **TINY)
    for text in ("1F1B/1/8:fp32:100mbit", "1:1F1B/1/8:fp32:100mbit", "2:1F1B:fp32:100mbit"):
        with pytest.raises(ValueError, match="is '|allowed: ranks:split:format:link"):
            Case.parse(text)


@pytest.mark.slow
def test_a_real_run_is_measured_and_predicted():
    case = Case.parse("2:ZBVZeroBubble/2/4:int4:unlimited")
    [row] = run(COMMAND, SimulateBenchmark(cases=(case,), **TINY)).rows
    assert row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
    assert 0 < row["compute_seconds"] < row["predicted"]
    assert row["error"] == row["predicted"] / row["seconds"] - 1


def test_a_prediction_has_the_measured_parts(tmp_path: Path):
    case = Case.parse("2:1F1B/1/4:int4:unlimited")
    config = config_of(SimulateBenchmark(cases=(case,), **TINY), case, str(tmp_path))
    times = [
        {
            f"{rank} forward": 1.0, f"{rank} backward": 2.0, f"{rank} encode_forward": 0.25, "rest": 8 * 0.5,
            "optimizer": 3.0, "averaging": 1.0,
        }
        for rank in range(2)
    ]  # fmt: skip
    step = predict(config, [{"times": each} for each in times], Channel(), 2)
    assert step.compute.tolist() == [4 * 3 + 4] * 2
    assert step.coding.tolist() == [4 * 0.25, 0]
    assert step.finish.tolist() == [4, 4]
    assert step.seconds == pytest.approx(3 + 1 + (4 + 1) * 4 + 5 * 0.25, abs=0.5)


def test_pairs_of_formats_are_compared_on_one_link():
    values = [("x", 1.0, 2.0), ("x", 2.0, 3.0), ("y", 2.0, 1.0), ("y", 1.0, 0.9)]
    rows = [{"ranks": 2, "split": "a", "link": link, "seconds": s, "predicted": p} for link, s, p in values]
    assert ranked_right(rows) == (2, 2)
    assert ranked_right([*rows[:3], rows[3] | {"seconds": 3.0, "predicted": 0.5}]) == (1, 2)


def test_the_grid_ranks_formats_by_their_bits_on_a_slow_link():
    settings = GridSettings(
        links=(Link(10.0), Link(10_000.0)), boundaries=("fp32", "bf16", "int4"), stages=2, sequence=64,
        batch=8, microbatches=8, model=ModelConfig(dim=64, layers=4, heads=4, vocab=128),
    )  # fmt: skip
    rows = run(GRID, settings).rows
    slow, fast = (rows[:3], rows[3:])
    assert slow[0]["seconds_per_step"] > slow[1]["seconds_per_step"] > slow[2]["seconds_per_step"]
    assert slow[2]["speedup_fp32"] > fast[2]["speedup_fp32"] >= 1


def test_published_entries_of_the_speedrun_are_predicted_from_their_bytes():
    rows = run(ARENA, ArenaSettings(boundaries=("bf16", "int4"), rows=(8, 16))).rows
    dense, subspace, bf16, int4 = rows
    assert dense["seconds"] == pytest.approx(dense["published"], rel=0.01)
    assert subspace["seconds"] == pytest.approx(subspace["published"], rel=0.02)
    assert bf16["seconds"] == pytest.approx(dense["seconds"], rel=1e-9)
    assert int4["seconds"] < bf16["seconds"] / 2
    assert int4["score"] == 2925 * int4["seconds"]
