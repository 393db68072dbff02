"""Errors of ranks: the kurtosis of sums of uniforms, and the table of a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ranks import COMMAND, RanksBenchmark, Static, expected, kurtosis, measured
from lowbit.config import ConfigError
from lowbit.report import run
from tests.lab.bench.shown import shown
from tests.lab.evaluate.models import write_checkpoint


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_kurtosis_of_sums_of_uniforms_is_that_of_irwin_and_hall(ranks: int):
    generator = torch.Generator().manual_seed(ranks)
    errors = torch.rand(ranks, 20_000, 8, generator=generator).sum(0) * torch.arange(1, 9)  # of any width and mean
    assert kurtosis(errors) == pytest.approx(3 - 1.2 / ranks, abs=0.02)
    assert expected(torch.full((ranks, 8), 0.3)) == pytest.approx(3 - 1.2 / ranks)


def test_a_wide_rank_counts_more_than_a_narrow_one():
    assert expected(torch.tensor([[3.0], [1e-6]])) == pytest.approx(1.8)
    assert expected(torch.tensor([[2.0], [1.0]])) == pytest.approx(3 - 1.2 * 17 / 25)
    assert kurtosis(torch.tensor([[1.0, 5.0], [-1.0, 5.0]])) == 1, "a feature without an error does not count"


def test_rounding_follows_the_theory_and_values_that_are_cut_do_not():
    generator = torch.Generator().manual_seed(0)

    def drawn(ranks: int) -> list[torch.Tensor]:
        return list(torch.randn(ranks, 16, 256, 128, generator=generator))

    for ranks in (1, 4):
        form = Static(drawn(ranks))
        found = measured(form, [x.flatten(0, 1) for x in drawn(ranks)])
        assert found["kurtosis_of_rounding"] == pytest.approx(found["expected_here"], abs=0.02)
        assert found["expected_here"] == pytest.approx(3 - 1.2 / ranks, abs=0.01)
        assert found["cancelled"] == pytest.approx(1, abs=0.01)
        assert 0 < found["clipped"] < 0.02
        assert found["kurtosis"] > found["kurtosis_of_rounding"]
        # a step is a seventh of the range, which the largest of 256 Gaussians gives: 2.83 standard deviations
        assert found["rounding"] == pytest.approx(2.83 / 7 / 12**0.5, rel=0.05)


def test_a_table_of_a_tiny_model(tmp_path: Path):
    folder = write_checkpoint(tmp_path)
    text = (str(folder / "text.txt"),)
    given: dict[str, Any] = {"model": str(folder), "text": text, "calibration_text": text, "length": 32}
    report = run(COMMAND, RanksBenchmark(**given, ranks=(1, 2, 16), sequences=4))
    rows = {(row["candidate"], row["ranks"]): row for row in report.rows}
    assert list(rows) == [(name, ranks) for name in ("static", "feature-int4") for ranks in (1, 2, 16)]
    assert rows["static", 1]["error"] == rows["static", 1]["error_of_rank"]
    assert rows["static", 1]["cancelled"] == 1
    assert rows["feature-int4", 2]["expected"] is None
    assert len(rows["static", 16]["layers"]) == 4
    assert "Irwin-Hall" in shown(COMMAND, report.rows, tmp_path)
    with pytest.raises(ConfigError, match="ranks is 3; allowed: divisors of 32, the inputs of model.layers.0"):
        run(COMMAND, RanksBenchmark(**given, ranks=(3,), sequences=1))
