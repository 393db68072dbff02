"""Wrong settings of the benchmarks are refused in one line that says what is allowed."""

from typing import Any

import pytest
import torch

from benchmarks import activations, parallel, predicted, race, simulate
from lowbit.config import build

CASE = simulate.CASES[0]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


@pytest.mark.parametrize(
    ("settings", "wrong", "message"),
    [
        (activations.ActivationsBenchmark, {"methods": ("int3",)}, "methods has int3; allowed: plain, default, norm-8"),
        (activations.ActivationsBenchmark, {"sequences": (1,)}, r"sequences is \(1,\); allowed: at least 2"),
        (activations.ActivationsBenchmark, {"model": {"dim": 33}}, "model.dim is 33"),
        (parallel.ParallelBenchmark, {"layers": 3}, "layers is 3; allowed: multiples of 2"),
        (predicted.GridSettings, {"batch": 9, "microbatches": 2}, "batch is 9; allowed: a multiple of microbatches"),
        (race.RaceBenchmark, {"samples": 6}, "samples is 6; allowed: a multiple of data.batch"),
        (race.RaceBenchmark, {"samples": 64, "evaluations": 3}, r"allowed: at most the steps of an epoch \(2\)"),
        (race.RaceBenchmark, {"boundaries": ("int9",)}, "codec is 'int9'"),
        pytest.param(race.RaceBenchmark, {"device": "cuda"}, "this machine has 0 devices", marks=NO_GPU),
        (simulate.SimulateBenchmark, {"cases": (CASE, CASE)}, "cases is empty or contains a case twice"),
    ],
)
def test_wrong_settings_are_refused(settings: type, wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build(settings, wrong)
