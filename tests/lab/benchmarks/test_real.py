"""`python -m benchmarks real`: a small model on every kind of text."""

from pathlib import Path

import pytest

from benchmarks.real import COMMAND, RealBenchmark
from lowbit.config import ConfigError
from lowbit.report import run
from tests.lab.evaluate.models import write_checkpoint

COARSE = "GroupInt(bits=2, group=32) / fp32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def test_exact_boundaries_cost_nothing_and_few_bits_something(model: Path):
    settings = RealBenchmark(
        models=(str(model),), boundaries=("fp32 / fp32", "transform", COARSE), stages=2,
        kinds=("text", "code", "padded"), tokens=64, windows=2, warm=2,
    )  # fmt: skip
    rows = list(run(COMMAND, settings).rows)
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
    ],
)
def test_what_cannot_be_measured_is_an_error(model: Path, wrong: dict, message: str):
    with pytest.raises(ConfigError) as error:
        run(COMMAND, RealBenchmark(**{"models": (str(model),), "boundaries": ("int4",), "tokens": 32, **wrong}))
    assert message in str(error.value)


def test_a_folder_without_a_model_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="model"):
        run(COMMAND, RealBenchmark(models=(str(tmp_path),)))
