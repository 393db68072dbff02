"""What the drift monitor counts, when it warns, and where it shows that."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lowbit.codecs import GroupInt
from lowbit.tensor_parallel import Drift, SumSettings, emulate_tensor_parallel_
from tests.tensor_parallel.models import LAYERS, WIDTH, Toy, calibrated, ids, logits

NAME = "layers.1.mlp.down"


def test_shares_and_errors_are_those_of_the_values(caplog: pytest.LogCaptureFixture):
    model = Toy()
    calibration = calibrated()
    drift, seen = Drift(threshold=0.3, every=1), []

    def watch(name: str, partials: list[torch.Tensor], total: torch.Tensor) -> None:
        seen.extend([torch.stack(list(partials))] if name == NAME else [])

    settings = SumSettings(small=0, algorithm="two_shot")
    with emulate_tensor_parallel_(model, 2, calibration, settings=settings, drift=drift, watch=watch):
        for _ in range(2):
            logits(model, ids(rows=1, length=4))  # so few rows that all are sampled
        inside = drift.report()
        with torch.no_grad():
            for parameter in model.get_submodule("layers.1.mlp.up").parameters():
                parameter.mul_(20)
        for _ in range(3):
            logits(model, ids(rows=1, length=4))
    codec = calibration.codec(NAME)
    rest = [e for e in range(WIDTH) if e not in codec.features]
    values = torch.stack(seen[:2]).flatten(2, -2)  # (calls, ranks, rows, E)
    cut = (values.abs() >= codec.ranges[:, None] * (7.5 / 7))[..., rest].sum()
    row = next(row for row in inside.rows if row.layer == NAME)
    assert row.values == values.numel()
    assert row.clipped == pytest.approx(float(cut) / values.numel(), abs=2 / values.numel())
    coded = torch.stack([codec.part(r).round_trip(values[:, r]) for r in range(2)], 1)
    assert row.error == pytest.approx(float((coded - values).norm() / values.norm()), rel=1e-5)
    assert [r.layer for r in inside.rows] == LAYERS
    assert NAME not in inside.drifted

    after = drift.report()
    assert after.drifted == [NAME]
    drift.report()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1  # once, for one layer
    assert warnings[0].startswith(NAME)
    assert "threshold 30.00 %" in warnings[0]
    assert "--continue" in warnings[0]
    assert str(after).count("drifted") == 1
    assert str(after).splitlines()[0].split() == ["layer", "values", "clipped", "clipped", "sum", "error"]

    drift.reset()
    assert [row.values for row in drift.report().rows] == [0] * 4
    assert not drift.report().drifted


def test_curves_and_samples(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, drift = Toy(), Drift(every=3)
    calibration = calibrated()
    with emulate_tensor_parallel_(model, 2, calibration, settings=SumSettings(small=0), drift=drift):
        logits(model, ids())
    with SummaryWriter(str(tmp_path)) as writer:
        drift.write(writer, 7)
    curves = EventAccumulator(str(tmp_path)).Reload()
    tags = [f"drift/{kind}/{name}" for name in LAYERS for kind in ("clipped", "error")]
    assert sorted(curves.Tags()["scalars"]) == sorted(tags)
    event = curves.Scalars(f"drift/clipped/{NAME}")[0]
    row = drift.report().rows[-1]
    assert (event.step, event.value) == (7, pytest.approx(row.clipped))


def test_bad_input():
    with pytest.raises(ValueError, match="threshold is 2"):
        Drift(threshold=2)
    with pytest.raises(ValueError, match="every is 0"):
        Drift(every=0)
    with pytest.raises(TypeError, match="codec is GroupInt.*; allowed: one with calibrated ranges"):
        emulate_tensor_parallel_(Toy(), 2, GroupInt(bits=4), drift=Drift())
    with emulate_tensor_parallel_(Toy(), 2, GroupInt(bits=4)) as emulation:
        assert emulation.ranks == 2
