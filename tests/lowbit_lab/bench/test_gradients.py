"""`lowbit bench gradients`: one small real run, and its settings."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lowbit_lab.bench.gradients import COMMAND, STORED, GradientsBenchmark
from lowbit_lab.network import Link, SlowLink
from lowbit_run.report import Report, run
from lowbit_run.train.config import ModelConfig
from tests.lowbit_lab.bench.shown import shown

TINY = GradientsBenchmark(
    links=(Link(None),), ranks=(2,), numel=1 << 20, rounds=2, steps=1, batch=1, sequence=16,
    formats=(*GradientsBenchmark().formats, *STORED), model=ModelConfig(dim=32, layers=1, heads=2, ffn=32),
)  # fmt: skip
SLOW = 100.0
FAR = Link(SLOW, rtt_ms=20)
NO_DISTANCE = SlowLink.available(distance=True)


@pytest.fixture(scope="module")
def report() -> Report:
    links = (Link(None),) if NO_DISTANCE else (FAR, Link(None))
    seen: list[int] = []
    done = run(COMMAND, dataclasses.replace(TINY, links=links), on_rows=lambda rows: seen.append(len(rows)))
    assert seen[-1] == len(done.rows) == len(links) * len(TINY.formats)
    return done


def rows_of(report: Report, rate: float | None = None) -> dict[str, Any]:
    return {row["format"]: row for row in report.rows if row["link_mbit"] == rate}


def test_rows_have_the_agreed_fields_and_bits_and_errors_of_the_formats(report: Report, tmp_path: Path):
    agreed = "format link_mbit ranks numel ms speedup_fp32 speedup_bf16 bits_per_element relative_error"
    for row in report.rows:
        assert row.keys() >= set(agreed.split())
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
    rows = rows_of(report)
    for row in rows.values():
        assert row["speedup_fp32"] == rows["engine-fp32"]["ms"] / row["ms"]
        assert row["speedup_bf16"] == rows["engine-bf16"]["ms"] / row["ms"]
    assert "Data-parallel training" in shown(COMMAND, report.rows, tmp_path)
    for row in rows_of(report, None if NO_DISTANCE else SLOW).values():
        assert row["bits_per_element"] <= row["wire_bits"] < 1.25 * row["bits_per_element"] + 0.5
    error = {name: row["relative_error"] for name, row in rows.items()}
    assert error["engine-fp32"] < 1e-6
    assert error["hook-fp16"] < error["engine-bf16"] < error["int8"] < error["fp8"] < error["int4"]
    assert error["int4"] < 0.3 < error["powersgd"]
    # Training is measured where DDP permits it.
    trained = {name for name, row in rows.items() if row["tokens_per_second"]}
    assert trained == {name for name in TINY.formats if not name.endswith("-bf16")}
    assert rows["engine-fp32"]["training_speedup_fp32"] == 1
    assert 0 < rows["engine-fp32"]["gradient_bytes"] <= rows["fp8"]["gradient_bytes"]
    # Stored gradients that travel as they are take less memory and err less.
    stored, recoded = (rows[name] for name in STORED)
    assert stored["peak_bytes"] < recoded["peak_bytes"]
    assert stored["relative_error"] <= recoded["relative_error"]


@pytest.mark.skipif(NO_DISTANCE is not None, reason=f"{NO_DISTANCE}")
def test_a_slow_link_holds_up_every_format(report: Report):
    rows = rows_of(report, SLOW)
    for row in rows.values():
        assert (row["link"], row["link_rtt_ms"]) == ("100mbit/20ms", 20)
        assert row["rtt_ms"] >= 20
        assert row["ms"] > 20
    assert rows["engine-fp32"]["ms"] > 300  # 4 MB at 95.6 Mbit/s
    assert rows["engine-bf16"]["ms"] > 150
    assert rows["int8"]["ms"] > 75  # the others are not sent faster than their bytes, either
