"""`lowbit bench tensor-parallel`: one small real run, and its settings."""

from pathlib import Path
from typing import Any

import pytest

from lowbit.report import Report, run
from lowbit.train.config import ModelConfig
from lowbit_lab.bench.sums import Taken
from lowbit_lab.bench.tensor_parallel import COMMAND, TensorParallelBenchmark, rows_of
from lowbit_lab.bench.workers import set_link
from lowbit_lab.network import Link
from tests.lab.bench.shown import shown

TINY = TensorParallelBenchmark(
    links=(Link(None),), ranks=(2,), tokens=(2, 300), width=256, rounds=1, prefill=16,
    model=ModelConfig(dim=64, layers=1, heads=2, ffn=64),
)  # fmt: skip


@pytest.fixture(scope="module")
def report(forked: None) -> Report:
    seen: list[int] = []
    done = run(COMMAND, TINY, on_rows=lambda rows: seen.append(len(rows)))
    assert seen[:2] == [10, 2 * 10]
    assert len(done.rows) == 2 * 10 + 4
    return done


def sums_of(report: Report) -> list[dict[str, Any]]:
    return [dict(row) for row in report.rows if "tokens_per_second" not in row]


def test_rows_have_the_agreed_fields(report: Report):
    agreed = "format algorithm link_mbit ranks numel ms spread speedup_bf16 bits_per_value"
    found = {(row["format"], row["algorithm"], row["tokens"]): row for row in sums_of(report)}
    for (_, _, tokens), row in found.items():
        assert row.keys() >= set(agreed.split())
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["speedup_bf16"] == found["bf16", "ring", tokens]["ms"] / row["ms"]
        assert row["numel"] == 256 * tokens
        assert row["choice"] in (("plain", "one_shot") if row["algorithm"] == "auto" else (row["algorithm"],))
    bits = {row["format"]: row["bits_per_value"] for row in sums_of(report) if row["choice"] != "plain"}
    expected = {"bf16": 16, "int4": 4 + 16 / 256, "int8": 8.125, "feature-int4": (16 + 16 * 4 + 4 * 252) / 256}
    assert bits == pytest.approx(expected, abs=1e-3)


def test_errors_are_those_of_the_formats(report: Report):
    error = {(row["format"], row["algorithm"]): row["relative_error"] for row in sums_of(report)}
    assert error["bf16", "ring"] < 5e-3
    for name in ("int4", "int8", "feature-int4"):
        assert error[name, "one_shot"] < error[name, "two_shot"]
    assert 2 * error["feature-int4", "one_shot"] < error["int4", "one_shot"] < 0.3


def test_prefill_is_measured_by_every_format_and_shown(report: Report, tmp_path: Path):
    rows = {row["format"]: row for row in report.rows if row.get("tokens_per_second")}
    assert set(rows) == set(TINY.formats)
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(1e3 * 16 / row["ms"])
        assert row["speedup_bf16"] == rows["bf16"]["ms"] / row["ms"]
        assert row["numel"] == 16 * 64
    text = shown(COMMAND, report.rows, tmp_path)
    assert "All-reduce of partial sums, 256 features a token" in text
    assert "Prefill of 16 tokens" in text


def test_crossover_is_the_size_from_which_on_all_are_faster():
    taken = []
    for tokens, ms in ((1, 0.5), (4, 2.0), (16, 0.9), (64, 0.2)):
        for name, algorithm, factor in (("bf16", "ring", 1.0), ("int4", "one_shot", ms)):
            contender, link = {"name": name, "algorithm": algorithm}, set_link(None, Link(None)) | {"goodput_mbit": 1.0}
            one = Taken(phase=f"sum of {tokens}", contender=contender, ranks=2, link=link)
            one.turns.append([{"seconds": factor * 1e-3, "sent": 10.0}] * 2)
            taken.append(one)
    rows = {(r["format"], r["tokens"]): r for r in rows_of(TINY, taken, {"bf16": 16.0, "int4": 4.0}, {})}
    assert rows["int4", 64]["crossover"] == rows["int4", 1]["crossover"] == 16 * 256
    assert rows["bf16", 64]["crossover"] is None
    # Two ranks on hosts of their own, which each sent 10 bytes where as many elements as the message has must travel.
    assert rows["int4", 64]["wire_bits"] == 8 * 10 / (64 * 256)
