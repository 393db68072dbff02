"""`python -m benchmarks auto`: the runs of a format and of `auto`, and the comparison of their speeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.auto import COMMAND, AutoBenchmark, config_of, shares
from lowbit.config import ConfigError
from lowbit.report import run
from lowbit.train.config import DataConfig, ModelConfig, PipelineConfig
from lowbit_lab.bench.workers import UNLIMITED

TINY = {
    "model": ModelConfig(dim=32, layers=2, heads=2), "pipeline": PipelineConfig(ranks=2, microbatches=2),
    "data": DataConfig(batch=4, sequence=16, held_out_share=0.0), "links": (UNLIMITED,), "boundaries": ("bf16",),
}  # fmt: skip


def test_auto_and_a_fixed_format_are_the_same_run_but_for_the_format(tmp_path: Path):
    settings = AutoBenchmark(**TINY)
    auto, fixed = (config_of(settings, name, str(tmp_path)) for name in ("auto", "bf16"))
    assert auto.pipeline.is_auto
    assert fixed.pipeline.forward == ("Cast(dtype=torch.bfloat16)",)
    assert (auto.data, auto.model, auto.run) == (fixed.data, fixed.model, fixed.run)
    assert len(AutoBenchmark().links) == 8
    with pytest.raises(ConfigError, match="pipeline.forward is"):
        AutoBenchmark(pipeline=PipelineConfig(forward=("auto",)))


def test_the_best_fixed_format_of_each_link_is_the_measure():
    rows = [
        {"link": link, "boundary": name, "seconds": seconds}
        for link, name, seconds in (
            ("x", "auto", 2.0),
            ("x", "a", 1.0),
            ("x", "b", 3.0),
            ("y", "a", 4.0),
            ("y", "auto", 2.0),
        )
    ]
    assert shares(rows) == {"x": 0.5, "y": 2.0}


@pytest.mark.slow
def test_real_runs_are_compared():
    auto, fixed = run(COMMAND, AutoBenchmark(rounds=1, steps=1, **TINY)).rows
    assert (auto["boundary"], auto["formats"], auto["steps"]) == ("auto", [["bf16"]], 1)
    assert auto["predicted"]["these"] > 0
    assert (fixed["formats"], fixed["predicted"], fixed["choice"]) == ([], None, None)
