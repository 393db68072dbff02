"""`python -m benchmarks activations` and `parallel`: real measurements of tiny models."""

from pathlib import Path

import pytest

from benchmarks import parallel
from benchmarks.activations import COMMAND, METHODS, PLAIN, ActivationsBenchmark, summarized
from lowbit.report import run
from lowbit.train.config import ModelConfig
from tests.lab.bench.shown import shown


@pytest.fixture
def settings(tmp_path: Path) -> ActivationsBenchmark:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i) for i in range(2000)))
    return ActivationsBenchmark(
        methods=tuple(METHODS)[1:], sequences=(32, 64), samples=2, train_steps=3,
        model=ModelConfig(dim=64, layers=1, heads=2),
        text=(str(text),), threads=1,
    )  # fmt: skip


def test_bytes_and_errors_of_every_method(settings: ActivationsBenchmark, tmp_path: Path):
    report = run(COMMAND, settings)
    assert [row["sequence"] for row in report.rows] == [32] * len(METHODS) + [64] * len(METHODS)
    for rows in (report.rows[: len(METHODS)], report.rows[len(METHODS) :]):
        found = {row["method"]: row for row in rows}
        errors = {row["method"]: row for row in summarized(rows)}
        assert all(len(errors) == 2 for errors in found["norm-8"]["errors"].values())
        assert {"norm", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "embedding"} <= errors[PLAIN].keys()
        assert errors[PLAIN]["all"] < 1e-5
        assert errors["default"]["norm"] < errors["default"]["worst norm"] < 0.2
        size = {method: row["saved_bytes"] for method, row in found.items()}
        assert size["int4-uniform"] < size["norm-8+attention-4"] < size["norm-8"] < size[PLAIN]
        assert size["agoq"] < size["norm-8"]
        assert 1e-3 < errors["norm-8"]["all"] < errors["agoq"]["all"] < 0.3
        assert errors["attention-8"]["all"] < errors["attention-4"]["all"]
        # Attention alone turns its own linear layers, which backward reaches after it.
        assert errors["attention-4"]["mlp"] < 1e-5 < 1e-3 < errors["attention-4"]["k_proj"]
    text = shown(COMMAND, report.rows, tmp_path, width=120)
    assert all(name in text for name in (*METHODS, "k_proj", "median"))


@pytest.mark.slow
def test_a_layout_is_measured_beside_one_process(tmp_path: Path):
    settings = parallel.ParallelBenchmark(
        layouts=("sequence",), policies=("published",), dim=64, inner=172, layers=2, length=32
    )
    (row,) = run(parallel.COMMAND, settings).rows
    assert row["error"] == pytest.approx(row["error_alone"], rel=0.05)
    assert row["kept"] == row["kept_bytes"] / row["plain_bytes"] < 1.05 * row["kept_alone"]
    assert "TP, SP" in shown(parallel.COMMAND, [row], tmp_path)
