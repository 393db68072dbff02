"""`python -m benchmarks race`, `real` and the report of a GPU: their arithmetic, small real runs, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_report, real, saved
from benchmarks.marks import replaced
from benchmarks.race import COMMAND, RaceBenchmark, Racer, rows_of
from benchmarks.real import RealBenchmark
from benchmarks.saved import SavedBenchmark
from lowbit_lab.bench.runs import seconds_until
from lowbit_lab.network import Link
from lowbit_run.config import ConfigError
from lowbit_run.report import compare, run
from lowbit_run.train.config import DataConfig, ModelConfig, PipelineConfig
from tests.lowbit_lab.bench.shown import shown
from tests.lowbit_lab.evaluate.models import write_checkpoint

TINY = RaceBenchmark(
    links=(Link(None),), boundaries=("fp32", "tah-quant", "aq-sgd"), model=ModelConfig(dim=32, layers=2, heads=2),
    data=DataConfig(batch=4, sequence=32), pipeline=PipelineConfig(microbatches=2), start_steps=2, samples=8, epochs=2,
    evaluations=1, eval_batches=1, lr=1e-3, precision="fp32",
)  # fmt: skip


def racer_of(boundary: str, curve: list[tuple[float, float]]) -> Racer:
    racer = object.__new__(Racer)
    racer.about, racer.curve, racer.state_bytes = {"boundary": boundary}, curve, 0
    racer.steps = [
        {"bits_forward": 4.0, "bits_backward": 6.0, "bytes_sent": 1e6, "tokens_per_second": 100.0, "seconds": 1.0}
    ]
    return racer


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
    curve = [(0.0, 2.0), (10.0, 1.0), (11.0, 1.1), (13.0, 0.7)]
    assert [seconds_until(curve, target) for target in (2.0, 1.5, 1.0, 0.9)] == pytest.approx([0, 5, 10, 12])
    assert seconds_until(curve, 0.5) is None


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


COARSE = "GroupInt(bits=2, group=32) / fp32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def test_exact_boundaries_of_a_real_model_cost_nothing_and_few_bits_something(model: Path):
    settings = RealBenchmark(
        models=(str(model),), boundaries=("fp32 / fp32", "transform", COARSE), stages=2,
        kinds=("text", "code", "padded"), tokens=64, windows=2, warm=2,
    )  # fmt: skip
    rows = list(run(real.COMMAND, settings).rows)
    phases = [("fp32 / fp32", "cold"), ("transform", "cold"), ("transform", "warm"), (COARSE, "cold")]
    assert [(row["boundary"], row["phase"]) for row in rows] == 3 * phases
    for kind in ("text", "code", "padded"):
        exact, cold, warm, coarse = (row for row in rows if row["kind"] == kind)
        assert exact["ratio"] == pytest.approx(1, abs=1e-6)
        assert exact["error"] == exact["error_first"] == 0
        assert 0 < warm["divergence"] < coarse["divergence"]
        assert 0 < cold["error"] < 1
        assert cold["error"] != warm["error"]
        assert all(row["perplexity"] == exact["perplexity"] for row in (cold, warm, coarse))
        assert 30 < exact["bits_forward"] < 34
        assert coarse["bits_forward"] < 5


def test_gradients_of_a_real_model_err_more_in_fewer_bits(model: Path):
    with pytest.raises(ConfigError, match="methods has 'int3'; allowed: default, "):
        SavedBenchmark(models=(str(model),), methods=("int3",))
    settings = SavedBenchmark(models=(str(model),), methods=("default", "agoq"), tokens=64, windows=2)
    ours, published = run(saved.COMMAND, settings).rows
    assert 0 < ours["error"] < 0.03 < published["error"] < 0.5
    assert ours["norm"] < published["norm"]
    assert 0 < ours["saved"] < published["saved"] < 1  # which leaves attention as it is
    assert "norm" in ours["name"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stages": 3}, "stages is 3; the model has 2 layers; allowed: at most as many"),
        ({"kinds": ("chat",), "stages": 2}, "the tokenizer of the model has no chat template"),
        ({"boundaries": ("aq-sgd",)}, "allowed: formats that need no sample ids"),
        ({"windows": 10**5, "stages": 2}, "the text has too few tokens"),
        ({"models": (str(Path(__file__).parent),)}, "model"),
    ],
)
def test_what_cannot_be_measured_is_an_error(model: Path, wrong: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        run(real.COMMAND, RealBenchmark(**{"models": (str(model),), "boundaries": ("int4",), "tokens": 32, **wrong}))


def test_a_report_of_a_gpu_keeps_what_was_measured_when_a_part_fails_or_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_report, "FOLDER", tmp_path / "out")
    page = tmp_path / "gpu.md"
    page.write_text(gpu_report.PAGE.read_text("utf-8"), "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_report, "SECONDS", 0.1)  # no part can begin in that time
        gpu_report.main("cpu", ["memory"], page)
    assert "**Not whole**: it was ended after" in page.read_text("utf-8")
    rows, why = gpu_report.run_part("nothing", "cpu")
    assert rows == []
    assert why.startswith("it failed: ")
    text = gpu_report.section("bytes", [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed"}], "")
    assert "2 tests: 1 failed, 1 passed.\n\n- b: failed" in text
    text = gpu_report.section("speed", [{"format": "int4", "bits": 4.25}], "it failed: x")
    assert "| format | bits |\n| --- | --- |\n| int4 | 4.25 |\n\n**Not whole**: it failed: x." in text


@pytest.mark.slow
def test_a_report_of_a_gpu_can_be_tried_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_report, "FOLDER", tmp_path)
    for part, column in {"speed": "encode_of_copy", "memory": "peak_mb", "training": "bits"}.items():
        rows, why = gpu_report.run_part(part, "cpu")
        assert not why, part
        assert all(column in row for row in rows), part
        assert len(rows) >= 3, part


def test_text_is_put_between_marks():
    page = replaced("before\n<!-- measured -->\nold\n<!-- end -->\nafter\n", "measured", "new")
    assert page == "before\n<!-- measured -->\n\nnew\n\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="the page has no <!-- other -->"):
        replaced(page, "other", "new")
