"""What the drift monitor samples, when it warns, and where it shows that."""

import logging

import pytest
import torch
from torch import Tensor

from lowbit.tensor_parallel import Calibration, Drift
from lowbit.tensor_parallel.drift import sample
from tests.lowbit.tensor_parallel.models import LAYERS, WIDTH, Toy, calibrated, ids, sums_of

NAME = "layers.1.mlp.down"


def watched(drift: Drift, calibration: Calibration, *rows: int) -> list[Tensor]:
    """Run so many tokens at a time; what a layer's ranks had to add."""
    seen = sums_of(calibration, *(ids(rows=1, length=length) for length in rows), drift=drift)
    return [partials for name, partials, _ in seen if name == NAME]


def known(calibration: Calibration, mean: float, spread: float) -> Calibration:
    """The same with this error of held-out text on all ranks and layers."""
    for codec in calibration._codecs.values():
        object.__setattr__(codec, "held_out", ((mean, spread),) * 2)
    return calibration


def test_errors_are_those_of_the_rows(caplog: pytest.LogCaptureFixture):
    calibration = known(calibrated(), 0.5, 0.01)
    codec, drift = calibration.codec(NAME), Drift(every=2)
    seen = watched(drift, calibration, 4, 4, 4)  # so few rows that all of a call are sampled
    report = drift.report()
    assert [(row.layer, row.rank) for row in report.rows] == [(name, rank) for name in LAYERS for rank in (0, 1)]
    for rank in (0, 1):
        rows = [values[rank].reshape(4, WIDTH) for values in (seen[0], seen[2])]
        errors = [float(((codec.part(rank).round_trip(x) - x).norm(dim=1) / x.norm(dim=1)).median()) for x in rows]
        row = next(row for row in report.rows if (row.layer, row.rank) == (NAME, rank))
        assert row.error == pytest.approx(sum(errors) / 2, rel=1e-5)
        assert (row.samples, row.expected, row.bad, row.drifted) == (2, 0.5, 0, False)
    assert not caplog.records


def test_samples_are_at_other_positions_of_all_sequences():
    batch, length = 64, 25
    positions = torch.arange(length).repeat(batch)[:, None]
    sequence = torch.arange(batch).repeat_interleave(length)[:, None]
    for x in (positions, sequence):
        found = torch.cat([sample(x.view(batch, length, 1), turn) for turn in range(32)])
        assert len(found.unique()) > 0.6 * len(x.unique())
    assert torch.equal(sample(positions[:4], 7), positions[:4].float())


def test_layers_whose_error_is_above_the_expected_are_told_once_and_together(caplog: pytest.LogCaptureFixture):
    errors = Drift(every=1)
    watched(errors, calibrated(), 16)
    assert not errors.report().drifted, "nothing to compare with"
    low, high = (f(row.error for row in errors.report().rows) for f in (min, max))
    drift = Drift(every=1)
    watched(drift, known(calibrated(), high, 0.0), 16, 16, 16)
    assert not drift.report().drifted
    watched(drift, known(calibrated(), low / 2, high), 16, 16, 16)
    assert not drift.report().drifted, "may be chance"
    assert not caplog.records
    watched(drift, known(calibrated(), low / 2, low / 100), 16, 16, 16)
    assert drift.report().drifted == LAYERS
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    worst = max(drift.report().rows, key=lambda row: row.error / row.expected)
    assert warning.startswith(f"the error of coded values has grown in 4 of 4 layers, most in {worst.layer} on rank ")
    assert "--continue" in warning
    lines = str(drift.report()).splitlines()
    assert lines[0].split() == ["layer", "rank", "samples", "error", "expected"]
    assert sum(line.endswith("drifted") for line in lines) == 8


def test_nan_is_told_apart_where_it_starts(caplog: pytest.LogCaptureFixture):
    drift, model = Drift(every=1), Toy().requires_grad_(False)
    model.get_parameter("layers.0.mlp.down.weight")[3, -1] = torch.inf  # an input of rank 1
    sums_of(known(calibrated(), 1.0, 0.0)._codecs, ids(1, 8), model=model, drift=drift)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("NaN or Inf in the partial sums of layers.0.mlp.down on rank 1: not a matter of the cali")
    bad = [(row.layer, row.rank) for row in drift.report().rows if row.bad]
    assert bad[0] == ("layers.0.mlp.down", 1)
    assert "layers.0.mlp.down" not in drift.report().drifted
    assert "NaN or Inf in 1 calls" in str(drift.report())
