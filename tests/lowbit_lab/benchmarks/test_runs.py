"""`python -m benchmarks race`, `real` and the report of a GPU: their arithmetic, small real runs, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_report, real
from benchmarks.race import COMMAND, RaceBenchmark, Racer, rows_of
from benchmarks.real import RealBenchmark
from benchmarks.which_model import replaced
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stages": 3}, "stages is 3; the model has 2 layers; allowed: at most as many"),
        ({"kinds": ("chat",), "stages": 2}, "the tokenizer of the model has no chat template"),
        ({"boundaries": ("aq-sgd",)}, "allowed: formats that need neither a choice nor sample ids"),
        ({"windows": 10**5, "stages": 2}, "the text has too few tokens"),
        ({"models": (str(Path(__file__).parent),)}, "model"),
    ],
)
def test_what_cannot_be_measured_is_an_error(model: Path, wrong: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        run(real.COMMAND, RealBenchmark(**{"models": (str(model),), "boundaries": ("int4",), "tokens": 32, **wrong}))


TESTS = "import pytest\n\ndef test_a(): pass\n\ndef test_b(): assert False\n\ndef test_c(): pytest.skip()\n"


def test_a_section_of_a_gpus_report_has_tests_tables_and_failures(tmp_path: Path):
    (tmp_path / "test_three.py").write_text(TESTS)
    steps = {
        "Codecs": "bench codecs --codec int4,fp8 --data gaussian --dtype float32 --shape 1,8,64 --rounds 1 --thread 1 "
        "--no-reference",
        "Nothing": "bench codecs --codec nonsense",
    }
    text = gpu_report.section(steps, [f"{tmp_path}/test_three.py", "-p", "no:cacheprovider"], tmp_path / "out")
    assert "1 tests passed, 1 failed, 1 were skipped." in text
    assert "| int4 | " in text
    assert "### Nothing\n\n**Failed**: error: " in text
    assert "nonsense" in text
    page = replaced("before\n<!-- measured -->\nold\n<!-- end -->\nafter\n", "measured", text)
    assert page.startswith("before\n<!-- measured -->\n\n")
    assert page.endswith("<!-- end -->\nafter\n")
    assert "old" not in page
    replaced(gpu_report.PAGE.read_text("utf-8"), "measured", "")  # has its marks
    for words in gpu_report.BENCHMARKS.values():
        assert gpu_report.command_of(words).name == f"bench {words.split()[1]}"
    if not torch.cuda.is_available():  # else it would be measured
        with pytest.raises(ConfigError, match="PyTorch can use no GPU on this machine; allowed"):
            gpu_report.main([])
