"""Ranges, features and files of calibrations, against slow and obvious references."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import FeatureInt
from lowbit.ranks.groups import default_group
from lowbit.tensor_parallel import (
    Calibration,
    CalibrationError,
    calibrate,
    emulate_tensor_parallel_,
)
from lowbit.tensor_parallel.calibration import select
from lowbit.tensor_parallel.files import join
from lowbit.tensor_parallel.observe import Observer
from tests.processes import Ranks
from tests.tensor_parallel.models import LAYERS, WIDTH, Toy, calibrated, logits, sequences


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrated()


def partial_sums(sequence: Tensor, ranks: int) -> dict[str, list[Tensor]]:
    """Of each layer: the ranks' partial sums (S, E) and, last, their sum."""
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, partials: Any, total: Tensor) -> None:
        seen[name] = [x[0].double() for x in (*partials, total)]

    model = Toy()
    with emulate_tensor_parallel_(model, ranks, watch=watch):
        logits(model, sequence[None])
    return seen


def test_ranges_are_corrected_moving_averages(calibration: Calibration):
    momentum, seen = 0.99, [partial_sums(s, 2) for s in sequences()]
    weights = [momentum ** (3 - i) for i in range(4)]
    assert list(calibration.features) == LAYERS
    for name in LAYERS:
        for rank in range(3):
            values = [one[name][rank] for one in seen]
            low = sum(w * v.amin(0) for w, v in zip(weights, values, strict=True)) / sum(weights)
            high = sum(w * v.amax(0) for w, v in zip(weights, values, strict=True)) / sum(weights)
            expected = torch.maximum(low.abs(), high.abs()).float()
            ranges = calibration.total[name] if rank == 2 else calibration.ranges[name][rank]
            torch.testing.assert_close(ranges, expected, rtol=1e-4, atol=1e-6)
    assert (calibration.count, calibration.world, calibration.text) == (4, 2, "toy text")


def test_outliers_are_the_features_with_the_largest_range_over_all_ranks(calibration: Calibration):
    assert calibration.features["layers.0.mlp.down"] == (5,)  # the model's own outlier
    for name, ranges in calibration.ranges.items():
        best = sorted(range(WIDTH), key=lambda e: -float(ranges[:, e].double().square().sum()))
        for k in (0, 1, 7, WIDTH - 1):
            assert calibration.select(k=k).features[name] == tuple(sorted(best[:k]))
    assert calibration.bits_per_value() == (16 + 16 * 1 + 4 * 64) / 64  # 63 codes, whole bytes
    assert calibration.select(k=0).bits_per_value() == (16 + 4 * 64) / 64


def test_features_go_where_they_take_away_most_error_for_the_same_bits():
    ranges = {"flat": torch.ones(2, 64), "peaked": torch.ones(2, 128)}
    ranges["peaked"][1, [3, 99, 40]] = torch.tensor([50.0, 60.0, 70.0])
    totals = {"flat": torch.ones(64), "peaked": torch.ones(128)}
    assert {n: len(f) for n, f in select(ranges, totals).items()} == {"flat": 1, "peaked": 2}
    chosen = select(ranges, totals, layout="distributed")
    assert chosen == {"flat": (), "peaked": (3, 40, 99)}
    totals["peaked"] *= 1e6  # as large a sum hides what is lost
    assert {n: len(f) for n, f in select(ranges, totals, layout="distributed").items()} == {
        "flat": 3,
        "peaked": 0,
    }
    many = select(ranges, totals, k=40, layout="distributed")
    assert len(many["flat"]) <= 16
    assert len(many["peaked"]) <= 32


def test_a_break_or_a_batch_changes_nothing_and_a_calibration_goes_on(calibration: Calibration, tmp_path: Path):
    state, done = tmp_path / "state", []

    def stop(count: int) -> None:
        done.append(count)
        if count == 3:
            raise KeyboardInterrupt

    model = Toy().train()
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, sequences(), ranks=2, state=state, save_every=2, progress=stop, text="toy text")
    assert done == [1, 2, 3]
    assert model.training
    again = calibrate(model, sequences(), ranks=2, state=state, text="toy text", progress=done.append)
    assert done == [1, 2, 3, 3, 4]
    assert again.fingerprint() == calibration.fingerprint()
    first = calibrate(Toy(), sequences()[:3], ranks=2, text="toy text")
    last = calibrate(Toy(), sequences()[3:], ranks=2, start=first)
    assert last.fingerprint() == calibration.fingerprint()
    batched = calibrate(Toy(), [torch.stack(sequences())], ranks=2)
    for name in LAYERS:  # matrix products of other shapes
        torch.testing.assert_close(batched.ranges[name], calibration.ranges[name])
    with pytest.raises(CalibrationError, match="state of a calibration with momentum '0.99'; this one has '0.5'"):
        calibrate(Toy(), sequences(), ranks=2, state=state, momentum=0.5, text="toy text")
    with pytest.raises(CalibrationError, match="a world of 2, this one is for 4"):
        calibrate(Toy(), sequences(), ranks=4, start=first)


def test_files_hold_everything(calibration: Calibration, tmp_path: Path):
    path = tmp_path / "folder" / "c.safetensors"
    calibration.save(path)
    loaded = Calibration.load(path)
    assert loaded.fingerprint() == calibration.fingerprint()
    assert loaded.features == calibration.features
    assert (loaded.text, loaded.count, loaded.settings) == ("toy text", 4, calibration.settings)
    codec = loaded.codec(LAYERS[1], rank=1)
    assert codec == FeatureInt(
        ranges=calibration.ranges[LAYERS[1]], total=calibration.total[LAYERS[1]], features=(5,), rank=1,
        artifact=calibration.fingerprint(),
    )  # fmt: skip
    loaded.check(Toy(), 2)
    loaded.check(Toy().bfloat16(), 2)  # ranges do not depend on the dtype
    assert [p.name for p in path.parent.iterdir()] == ["c.safetensors"]


def edited(data: bytes, **changes: str) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


DAMAGED = r"cut short, or not a safetensors file: it has {} bytes"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d[:-1], DAMAGED.format(r"\d+")),
        (lambda d: d[:100], DAMAGED.format(100)),
        (lambda d: d[:5], DAMAGED.format(5)),
        (lambda d: b"", DAMAGED.format(0)),
        (lambda d: d + b"x", DAMAGED.format(r"\d+")),
        (lambda d: b"\x04" + bytes(7) + b"[[[[" + d, DAMAGED.format(r"\d+")),
        (lambda d: b"\x02" + bytes(7) + b"{}", "has the format None; expected 'lowbit-calibration'"),
        (lambda d: edited(d, format="other"), "has the format 'other'; expected 'lowbit-calibration'"),
        (lambda d: edited(d, codec_version="0"), r"is for version 0 of FeatureInt, this lowbit has version \d"),
        (lambda d: edited(d, features="[]"), "not as `lowbit calibrate` writes it"),
        (lambda d: edited(d, world="two"), "not as `lowbit calibrate` writes it: ValueError"),
    ],
)
def test_files_that_cannot_be_used_say_why(
    calibration: Calibration, tmp_path: Path, change: Callable[[bytes], bytes], error: str
):
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CalibrationError, match=error):
        Calibration.load(path)


def test_other_models_and_worlds_are_refused(calibration: Calibration, tmp_path: Path):
    with pytest.raises(CalibrationError, match="not-there: No such file"):
        Calibration.load(tmp_path / "not-there")
    with pytest.raises(CalibrationError, match="for 2 ranks, this is a group of 4"):
        calibration.check(Toy(), 4)
    for edited in (
        "embed.weight", "layers.0.attn.v.weight", "layers.1.first.weight", "layers.1.mlp.down.weight", "head.bias"
    ):  # fmt: skip
        model = Toy()
        with torch.no_grad():
            model.get_parameter(edited).view(-1)[-3] += 0.1
        with pytest.raises(CalibrationError, match=r"for the model Toy \[\w+\], this is Toy \[\w+\]"):
            calibration.check(model, 2)
    model = Toy()
    with torch.no_grad():
        model.embed.weight[[3, 4]] = model.embed.weight[[4, 3]]
    with pytest.raises(CalibrationError, match="for the model Toy"):
        calibration.check(model, 2)
    shorter = Toy()
    del shorter.layers[1]
    with pytest.raises(CalibrationError, match="has 4 layers, the model 2; .*layers.1.attn.o"):
        calibration.check(shorter, 2)
    with pytest.raises(CalibrationError, match="layer is 'x'; calibrated: layers.0.attn.o"):
        calibration.codec("x")


def test_zero_features_get_a_floor_and_zero_layers_an_error(caplog: pytest.LogCaptureFixture):
    model = Toy()
    with torch.no_grad():
        model.layers[1].mlp.down.weight[7] = 0
        model.layers[1].mlp.down.weight[9, :51] = 0  # the columns of the first of two ranks
    ranges = calibrate(model, sequences(2), ranks=2).ranges["layers.1.mlp.down"]
    others = ranges[:, [e for e in range(WIDTH) if e not in (7, 9)]]
    assert float(ranges[0, 7]) == float(ranges[1, 7]) == float(ranges[0, 9])
    assert float(ranges[0, 7]) <= float(others.min())
    assert ranges[1, 9] > ranges[0, 9]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "always zero in the calibration text: feature 7 on rank 0 of layers.1.mlp.down; such features get "
        "the smallest range of their layer"
    ]
    with torch.no_grad():
        model.layers[1].mlp.down.weight.zero_()
    with pytest.raises(ValueError, match=r"features 0 to 63 of layers.1.mlp.down were zero in all 2 sequences"):
        calibrate(model, sequences(2), ranks=2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"k": WIDTH}, "k is 64; allowed: 0 to 63"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"features": "some"}, "features is 'some'; allowed: 'fixed', 'distributed'"),
        ({"ranks": 3}, None),
        ({"ranks": None}, "ranks is None"),
        ({"sequences": []}, "sequences is empty"),
        ({"sequences": [torch.ones(1, 2, 3, dtype=torch.long)]}, "sequences has torch.int64"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: str | None):
    chosen = {"sequences": sequences(1), "ranks": 2} | arguments
    if error is None:
        assert calibrate(Toy(), **chosen).world == 3
        return
    with pytest.raises((ValueError, TypeError), match=error):
        calibrate(Toy(), **chosen)


def test_a_model_that_is_not_finite_is_refused():
    model = Toy()
    with torch.no_grad():
        model.layers[0].mlp.down.weight[3] = torch.inf
    with pytest.raises(ValueError, match="sequence 0 makes feature 3 of layers.0.mlp.down on rank 0"):
        calibrate(model, sequences(1), ranks=2)
    assert "forward" not in vars(model.layers[0].mlp.down)  # whole again


def gathers(widths: dict[str, int]) -> dict[str, Tensor]:
    """Averages of two ranks that saw other numbers, put together."""
    rank, group = dist.get_rank(), default_group()
    if rank and "wider" in widths:
        widths = {**widths, "wider": 4}
    observer = Observer(widths if rank else dict(reversed(widths.items())), ranks=2, momentum=0.5)
    for average in (*observer.lows.values(), *observer.highs.values()):
        average.fill_(average.shape[1] + 100 * rank)
    observer.gather(group)
    return join(observer.lows, observer.highs)


def test_ranks_put_together_what_each_has_seen(ranks: Ranks):
    for tensors in ranks.run(gathers, {"a": 2, "b": 3}):
        for name, width in (("a.low", 2), ("a.high", 2), ("b.low", 3), ("b.high", 3)):
            assert tensors[name][:2].tolist() == [[width] * width, [width + 100] * width]


def test_ranks_with_other_layers_are_refused(ranks: Ranks):
    for outcome in ranks.outcomes(gathers, {"a": 2, "wider": 3}):
        assert outcome.kind == "CalibrationError"
        assert "'wider': 4" in outcome.text
        assert "'wider': 3" in outcome.text


def test_calibrate_gives_every_module_its_own_mode_back():
    model = Toy().train()
    model.layers[0].eval()  # frozen
    before = [module.training for module in model.modules()]
    calibrate(model, sequences(), ranks=2)
    assert [module.training for module in model.modules()] == before
