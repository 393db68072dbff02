"""`python -m benchmarks race`: its arithmetic, and a small real run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.race import COMMAND, RaceBenchmark, Racer, rows_of
from lowbit.config import build
from lowbit.report import compare, run
from lowbit.train.config import DataConfig, ModelConfig, PipelineConfig
from lowbit_lab.bench.runs import seconds_until
from lowbit_lab.network import Link
from tests.lab.bench.shown import shown

TINY = RaceBenchmark(
    links=(Link(None),), boundaries=("fp32", "tah-quant", "aq-sgd"), model=ModelConfig(dim=32, layers=2, heads=2),
    data=DataConfig(batch=4, sequence=32), pipeline=PipelineConfig(microbatches=2), start_steps=2, samples=8, epochs=2,
    evaluations=1, eval_batches=1, lr=1e-3, precision="fp32",
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"links": ("9mbit@1s:1mbit",)}, "links has 9mbit@1s:1mbit, which changes; allowed: links that stay"),
        ({"samples": 6}, "samples is 6; allowed: a multiple of data.batch"),
        ({"samples": 64, "evaluations": 3}, r"allowed: at most the steps of an epoch \(2\)"),
        ({"boundaries": ("int9",)}, "codec is 'int9'"),
        pytest.param(
            {"device": "cuda"}, "this machine has 0 devices",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build(RaceBenchmark, wrong)


def racer_of(boundary: str, curve: list[tuple[float, float]]) -> Racer:
    racer = object.__new__(Racer)
    racer.about, racer.curve, racer.state_bytes = {"boundary": boundary}, curve, 0
    racer.steps = [
        {"bits_forward": 4.0, "bits_backward": 6.0, "bytes_sent": 1e6, "tokens_per_second": 100.0, "seconds": 1.0}
    ]
    return racer


@pytest.mark.parametrize(("target", "seconds"), [(2.0, 0.0), (1.5, 5.0), (1.0, 10.0), (0.9, 12.0), (0.5, None)])
def test_seconds_between_evaluations_by_a_straight_line(target: float, seconds: float | None):
    curve = [(0.0, 2.0), (10.0, 1.0), (11.0, 1.1), (13.0, 0.7)]
    found = seconds_until(curve, target)
    assert found == (seconds if seconds is None else pytest.approx(seconds))


def test_the_target_is_what_all_have_reached():
    racers = [
        racer_of("fp32", [(0, 2.0), (40, 1.0), (80, 0.9)]),
        racer_of("tah-quant", [(0, 2.0), (10, 1.2), (20, 1.0)]),
        racer_of("aq-sgd", [(0, 2.0), (30, 1.2), (40, 0.8)]),
    ]
    rows = compare(rows_of(racers, {"link": "100mbit"}), COMMAND.baselines)
    rows = {row["boundary"]: row for row in rows}
    assert {row["target_loss"] for row in rows.values()} == {1.0}
    assert [rows[name]["seconds_to_loss"] for name in rows] == [40, 20, 35]
    assert rows["fp32"]["megabytes"] == 1
    assert rows["tah-quant"]["speedup_aq_sgd"] == 1.75
    assert rows["tah-quant"]["speedup_fp32"] == 2.0


@pytest.mark.slow
def test_a_real_race(tmp_path: Path):
    report = run(COMMAND, TINY)
    rows: dict[str, Any] = {row["boundary"]: row for row in report.rows}
    assert list(rows) == list(TINY.boundaries)
    starts = {row["curve"][0] for row in rows.values()}
    assert len(starts) == 1, "all start from the same weights"
    assert all(len(row["curve"]) == 3 for row in rows.values())
    assert all(row["seconds_to_loss"] is not None for row in rows.values())
    # The first epoch of AQ-SGD is full precision, the second is int4: a little over 18 bits on the average.
    assert rows["aq-sgd"]["bits_forward"] == pytest.approx((32 + 4.5) / 2, abs=0.6)
    assert rows["aq-sgd"]["state_bytes"] == 2 * 8 * 32 * 32 * 4
    assert rows["tah-quant"]["state_bytes"] == 0
    assert "aq-sgd" in shown(COMMAND, report.rows, tmp_path, width=100)
