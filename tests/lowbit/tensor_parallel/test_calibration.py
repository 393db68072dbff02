"""Ranges, features and files of calibrations, against slow and obvious references."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from lowbit.codecs import FeatureInt
from lowbit.tensor_parallel import Calibration, CalibrationError, calibrate
from lowbit.tensor_parallel.calibrate import MOST_ROWS, Observer, sampling
from lowbit.tensor_parallel.calibration import WIDTHS, digest_of, spend, tables_of
from lowbit.tensor_parallel.low_bit import sums_instead
from lowbit.tensor_parallel.observed import _Blocks, _counted
from tests.lowbit.tensor_parallel.models import INT8, LAYERS, WIDTH, Toy, calibrated, sequences, sums_of
from tests.refused import refused


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrated()


def partial_sums(sequence: Tensor) -> dict[str, list[Tensor]]:
    """Of each layer: two ranks' partial sums (S, E) and, last, their sum."""
    seen = sums_of(None, sequence[None])
    return {name: [x[0].double() for x in (*partials, total)] for name, partials, total in seen}


def test_ranges_are_corrected_moving_averages(calibration: Calibration):
    seen = [partial_sums(s) for s in sequences()[:3]]  # the fourth is held out
    weights = 0.99 ** torch.tensor([2.0, 1.0, 0.0]).double()
    assert list(calibration.features) == LAYERS
    for name in LAYERS:
        for rank in range(3):
            values = torch.stack([one[name][rank] for one in seen])
            low, high, mean = (weights @ f(values, 1) / weights.sum() for f in (torch.amin, torch.amax, torch.mean))
            expected = torch.maximum(high - mean, mean - low).float()
            ranges = calibration.total[name] if rank == 2 else calibration.ranges[name][rank]
            torch.testing.assert_close(ranges, expected, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(calibration.means[name][rank], mean.float(), rtol=1e-4, atol=1e-6)
    about = calibration.count, calibration.world, calibration.text, calibration.dtype
    assert about == (3, 2, "toy text", "float32")


def test_features_that_hardly_vary_do_not_set_the_gain_of_others():
    averages = {"low": [1.0, -2.0, 0.5], "high": [1.0001, 2.0, 0.5], "mean": [1.0, 0.0, 0.5]}
    given = {kind: {"a": torch.tensor([values] * 2)} for kind, values in averages.items()}
    ranges, means, zeros = tables_of(given, 1, 0.0)
    least = float(torch.tensor([0.0001, 2.0, 0.5]).square().mean().sqrt() / 64)
    assert ranges["a"][0].tolist() == pytest.approx([least, 2, 0.5])  # one that never varies: its magnitude
    assert (means["a"][0].tolist(), zeros) == ([1, 0, 0.5], [])


def test_outliers_are_the_features_with_the_largest_range_over_all_ranks(calibration: Calibration):
    assert calibration.features["layers.0.mlp.down"] == (5,)  # the model's own outlier
    for name, ranges in calibration.ranges.items():
        best = sorted(range(WIDTH), key=lambda e: -float(ranges[:, e].double().square().sum()))
        for k in (0, 1, 7, WIDTH - 1):
            assert calibration.select(k=k).features[name] == tuple(sorted(best[:k]))
    assert calibration.bits_per_value() == (16 + 16 * 1 + 4 * 64) / 64  # 63 codes, whole bytes
    assert calibration.select(k=0).bits_per_value() == (16 + 4 * 64) / 64


def test_formats_are_chosen_by_the_error_of_the_sums(calibration: Calibration):
    """Of rows that were sampled, here all."""
    seen, chosen = [partial_sums(s) for s in sequences()[:3]], torch.arange(32) * 11 // 32
    for name in (LAYERS[1], LAYERS[2]):
        rows = [torch.cat([one[name][rank][chosen] for one in seen]).bfloat16().float() for rank in range(2)]
        exact = rows[0].double() + rows[1]
        for bits in WIDTHS:
            clip, error = calibration.curves[name][bits]
            found = {}
            for each in (clip - 0.05, clip, clip + 0.05):
                codec = calibration.codec(name).like(bits=bits, clip=each)
                total = sum(codec.part(r).round_trip(x) for r, x in enumerate(rows))
                found[each] = float((total - exact).square().sum(1).mean())
            assert found[clip] == pytest.approx(error, rel=1e-4)
            assert clip == 1 or min(found.values()) == found[clip]
        errors = [calibration.curves[name][bits][1] for bits in WIDTHS]
        assert errors == sorted(errors, reverse=True)
    assert set(calibration.bits.values()) == {4}


def test_a_budget_goes_where_it_helps_the_outputs(calibration: Calibration):
    made = calibrated(bits=6, inputs=None)
    least, budget = made.within(4.6), made.within(6)
    assert calibration.bits_per_value() == 4.5
    assert least.bits_per_value() <= 4.6
    assert 5.5 < budget.bits_per_value() <= 6
    assert len(set(budget.bits.values())) > 1
    for name in LAYERS:
        codec = budget.codec(name)
        assert (codec.bits, codec.clip) == (budget.bits[name], budget.curves[name][codec.bits][0])
        assert codec.bits_per_element((1 << 10, WIDTH)) == budget.bits_per_value(name)
    assert budget.within(None).bits == calibration.bits
    assert budget.fingerprint() == made.fingerprint() != calibration.fingerprint()
    choices = {name: {b: (10.0 * b, size / 4.0**b) for b in WIDTHS} for name, size in (("loud", 64.0), ("soft", 1.0))}
    assert spend(choices, 90) == {"loud": 6, "soft": 3}
    assert spend(choices, 110) == {"loud": 6, "soft": 5}
    offer = {"soft": {**choices["soft"], "inputs": (20.0, 0.0)}, "loud": choices["loud"]}
    assert spend(offer, 90) == {"loud": 6, "soft": "inputs"}


def test_by_default_a_budget_chooses_between_sums_and_inputs(calibration: Calibration):
    made = calibrated(bits="auto")
    assert made.settings["bits"] == calibration.bits_per_value() == 4.5  # 4.25 would be fewer than 4-bit codes take
    assert list(made.inputs) == list(made.offers) == [LAYERS[0], LAYERS[2]]  # those behind attention
    assert 4.25 < made.bits_per_value() <= 4.5
    assert min(made.bits[name] for name in LAYERS if name not in made.inputs) > 4
    for name, offers in made.offers.items():
        assert offers[8][1] == pytest.approx(offers[6][1] * (31 / 127) ** 2)
        assert offers[6][1] < made.effects[name] / 4
    everywhere, summed = made.summed(None), made.summed()
    assert (everywhere.bits, everywhere.bits_per_value()) == (calibration.bits, calibration.bits_per_value())
    for name, by_rank in everywhere.held_out.items():
        for (found, _), (measured, _) in zip(by_rank, calibration.held_out[name], strict=True):
            assert found == pytest.approx(measured, rel=0.2), name
    assert not summed.inputs
    assert summed.bits_per_value() <= 4.5
    assert calibrate(Toy(), sequences(), ranks=2, gain="static").bits == calibration.bits, "as published"


def test_who_codes_sums_only_says_so_for_layers_that_would_send_inputs(caplog: pytest.LogCaptureFixture):
    made, sums = calibrated(bits="auto"), calibrated(bits="auto", inputs=None)
    assert sums_instead(sums, "styles", first=True) is sums
    assert not caplog.text
    assert sums_instead(made, "styles", first=True).bits == sums.bits
    assert "lets 2 of 4 layers send their inputs, and styles add up partial sums only" in caplog.text
    with pytest.raises(CalibrationError, match=r"allowed for styles: one made without inputs \(lowbit calibrate --inp"):
        sums_instead(calibrated(inputs=INT8, bits=4.6), "styles", first=True)


class Masked(Toy):
    """Never says some tokens, as models of text and images."""

    fill = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).index_fill(-1, torch.arange(3, 9), self.fill)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -torch.inf, -1e9])
def test_masked_outputs_do_not_hide_what_coding_does(fill: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Masked, "fill", fill)
    made, plain = (calibrate(kind(), sequences(), ranks=2) for kind in (Masked, Toy))
    for name, effect in plain.effects.items():
        assert effect / 2 < made.effects[name] < effect * 2
    assert 4.25 < made.bits_per_value() <= 4.5


def test_large_hidden_states_are_not_masks():
    x = torch.tensor([[40_000.0, -40_000.0, torch.inf, torch.nan]], dtype=torch.float16)
    assert _counted(SimpleNamespace(last_hidden_state=x)).tolist() == [[40_000, -40_000, 0, 0]]
    assert _counted(SimpleNamespace(logits=x)).tolist() == [[40_000, 0, 0, 0]]


def test_a_budget_that_has_nothing_to_choose_by_is_not_spent(caplog: pytest.LogCaptureFixture):
    model = Toy()
    torch.nn.init.zeros_(model.head.weight)
    made = calibrate(model, sequences(), ranks=2)
    assert set(made.bits.values()) == {4}
    assert not made.inputs
    assert "coding no layer's sum changes the model's outputs" in caplog.text


class Handing(Toy):
    """The second block needs what the first one leaves behind."""

    def forward(self, ids: Tensor) -> Tensor:
        self.layers[0].left = None
        hook = self.layers[0].second.register_forward_hook(lambda *each: setattr(self.layers[0], "left", each[2]))
        x = self.layers[0](self.embed(ids))
        hook.remove()
        return self.head(self.layers[1](x) + self.layers[0].left)


@pytest.mark.parametrize(("kind", "fewer"), [(Toy, True), (Handing, False)])
def test_blocks_are_skipped_where_that_changes_nothing(kind: type[Toy], fewer: bool, monkeypatch: pytest.MonkeyPatch):
    def run() -> tuple[str, int]:
        model, calls = kind(), list[int]()
        model.layers[0].second.register_forward_hook(lambda *_: calls.append(1))
        return calibrate(model, sequences(), ranks=2).fingerprint(), len(calls)

    fingerprint, calls = run()
    monkeypatch.setattr(_Blocks, "check", lambda self, *_: vars(self).update(index={}))
    whole, most = run()
    assert fingerprint == whole
    assert most - calls == (9 if fewer else 0)  # the second block's three effects on three sequences


def test_the_last_eighth_is_held_out_and_measures_the_error():
    model, text = Toy(), sequences(16, length=4)
    calibration = calibrate(model, text, ranks=2)
    assert calibration.count == 14
    codec = calibration.codec(LAYERS[3])
    for rank in range(2):
        errors = []
        for sequence in text[14:]:
            rows = partial_sums(sequence)[LAYERS[3]][rank].float()
            each = (codec.part(rank).round_trip(rows) - rows).norm(dim=1) / rows.norm(dim=1)
            errors += [float(each.median())] * 4  # so few rows that all are sampled
        mean, spread = calibration.held_out[LAYERS[3]][rank]
        assert mean == pytest.approx(sum(errors) / len(errors), rel=1e-4)
        assert spread == pytest.approx(float(torch.tensor(errors).std(unbiased=False)), rel=1e-2)
    assert calibrate(model, text[:1], ranks=2).held_out == {}


def test_samples_are_bounded_and_spread_over_all_sequences():
    for count in (1, 4, 5, 32, 128, 129, 1000, 5000):
        rows, every = sampling(count)
        assert MOST_ROWS // 2 <= rows * -(-count // every) <= MOST_ROWS or count < 3
    observer = Observer({"a": 2}, ranks=1, momentum=0.9)
    for first in range(0, 300, 3):
        numbers = torch.arange(first, first + 3).float().view(3, 1, 1).expand(3, 40, 2)
        for rank in (0, 1):
            observer.see("a", rank, numbers)
        observer.commit()
    expected = torch.arange(0, 300, 4).bfloat16()[:, None]
    assert torch.equal(observer.samples["a"][0, :, :, 0], expected)


def test_a_batch_changes_nothing_and_a_calibration_goes_on(calibration: Calibration):
    done: list[int] = []
    model = Toy().train()
    model.layers[0].eval()  # frozen
    modes = [module.training for module in model.modules()]
    again = calibrate(model, sequences(), ranks=2, text="toy text", progress=done.append, bits=None)
    assert done == [1, 2, 3, 4]
    assert [module.training for module in model.modules()] == modes
    assert again.fingerprint() == calibration.fingerprint()
    first = calibrate(Toy(), sequences()[:3], ranks=2, text="toy text")
    last = calibrate(Toy(), sequences()[2:], ranks=2, start=first)
    batched = calibrate(Toy(), [torch.stack(sequences())], ranks=2, bits=None)
    assert (first.count, last.count) == (2, 3)
    for name in LAYERS:
        assert torch.equal(last.ranges[name], calibration.ranges[name])
        torch.testing.assert_close(batched.ranges[name], calibration.ranges[name])  # products of other shapes
        assert batched.held_out[name][1] == pytest.approx(calibration.held_out[name][1], rel=1e-3)
    with pytest.raises(CalibrationError, match="a world of 2, this one is for 4"):
        calibrate(Toy(), sequences(), ranks=4, start=first)


def test_files_hold_everything(calibration: Calibration, tmp_path: Path):
    path = tmp_path / "folder" / "c.safetensors"
    calibration.save(path)
    loaded = Calibration.load(path)
    assert loaded.fingerprint() == calibration.fingerprint()
    for name in ("text", "count", "settings", "features", "bits", "curves", "held_out"):
        assert getattr(loaded, name) == getattr(calibration, name), name
    codec, means = loaded.codec(LAYERS[1], rank=1), calibration.means[LAYERS[1]]
    assert codec == FeatureInt(
        ranges=calibration.ranges[LAYERS[1]], total=calibration.total[LAYERS[1]], offsets=means[:2],
        total_offset=means[2], features=(5,), rank=1, artifact=calibration.fingerprint(),
        bits=4, clip=calibration.curves[LAYERS[1]][4][0],
    )  # fmt: skip
    assert codec.held_out == calibration.held_out[LAYERS[1]]
    for model in (Toy(), Toy().bfloat16()):  # ranges do not depend on the dtype
        loaded.check(model, 2)
    assert [p.name for p in path.parent.iterdir()] == ["c.safetensors"]


def test_files_from_before_inputs_were_chosen_are_read(calibration: Calibration, tmp_path: Path):
    calibration.save(path := tmp_path / "c.safetensors")
    data = path.read_bytes()
    tensors = load(data)
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    for name in ("offers", "sha256"):
        del metadata[name]
    path.write_bytes(save(tensors, {**metadata, "sha256": digest_of(tensors, metadata)}))
    assert Calibration.load(path).fingerprint() == calibration.fingerprint()


def test_static_ranges_are_the_papers_and_no_token_has_a_gain(calibration: Calibration, tmp_path: Path):
    """Symmetric by averages of extremes, E // 64 features in bfloat16, 4 bits for the others, and nothing else."""
    made = calibrate(Toy(), sequences(), ranks=2, text="toy text", gain="static")
    made.save(tmp_path / "static")
    loaded = Calibration.load(tmp_path / "static")
    assert loaded.fingerprint() == made.fingerprint() != calibration.fingerprint()
    assert (loaded.gain, loaded.settings["gain"], calibration.gain) == ("static", "static", "token")
    weight, rows = 1 - 0.99**3, partial_sums(sequences(9)[8].repeat(2)[:16])[LAYERS[1]][1].float()
    for name in LAYERS:
        low, high = (loaded.averages[kind][name] / weight for kind in ("low", "high"))
        extreme = torch.maximum(low.abs(), high.abs())
        codec = loaded.codec(name, rank=1)
        best = extreme[:2].square().sum(0).argmax()
        assert codec == FeatureInt(
            gain="static", clip=1.0, ranges=extreme[:2], total=extreme[2], features=(int(best),), rank=1,
            artifact=made.fingerprint(),
        )  # fmt: skip
        assert codec.bits_per_element(rows.shape) == made.bits_per_value(name) == (16 + 4 * 64) / 64  # whole bytes
        step, rest = extreme[1] / 7, [e for e in range(WIDTH) if e != best]
        expected = (rows / step).round().clamp(-7, 7) * step
        torch.testing.assert_close(codec.round_trip(rows)[:, rest], expected[:, rest])
    other = calibration.select(gain="static")
    assert all(torch.equal(other.ranges[name], made.ranges[name]) for name in LAYERS)
    assert (other.features, other.curves, other.held_out) == (made.features, {}, {})
    assert torch.equal(other.select(gain="token").ranges[LAYERS[0]], calibration.ranges[LAYERS[0]])
    assert {clip for curve in made.curves.values() for clip, _ in curve.values()} == {1.0}
    budget = calibrate(Toy(), sequences(), ranks=2, gain="static", bits=5, inputs=None)
    assert 4.25 < budget.bits_per_value() <= 5
    for name, partials, total in sums_of(made, sequences(1)[0][None]):
        codec = made.codec(name)
        expected = codec.sum([codec.part(r).encode(x) for r, x in enumerate(partials)], out=torch.empty_like(total))
        assert torch.equal(total, expected)


def edited(data: bytes, **changes: str) -> bytes:
    """The file with other metadata, and a digest that fits them."""
    size, tensors = int.from_bytes(data[:8], "little"), load(data)
    metadata = json.loads(data[8 : 8 + size])["__metadata__"] | changes
    del metadata["sha256"]
    return save(tensors, metadata | {"sha256": digest_of(tensors, metadata)})


def test_files_that_cannot_be_used_say_why(calibration: Calibration, tmp_path: Path):
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    whole = path.read_bytes()

    def loading(data: bytes) -> Calibration:
        path.write_bytes(data)
        return Calibration.load(path)

    damaged, foreign = "is damaged: its digest differs from that of its contents", "not a file of `lowbit calibrate`"
    old = "is for version 2 of FeatureInt4, this lowbit has version 4 of FeatureInt: calibrate again"
    rows = [
        (whole[:-3] + bytes([whole[-3] ^ 4]) + whole[-2:], f"{damaged}; calibrate again"),
        (whole.replace(b'"world":"2"', b'"world":"4"'), damaged),
        (b"\x02" + bytes(7) + b"{}", "has the format None; expected 'lowbit-calibration'"),
        (edited(whole, format="other"), "has the format 'other'; expected 'lowbit-calibration'"),
        (edited(whole, codec="FeatureInt4", codec_version="2"), old),
        (edited(whole, held_out="[" * 10_000), f"{foreign}: RecursionError"),
        (edited(whole, held_out="[]"), f"{foreign}: AttributeError"),
        (edited(whole, features="[]"), f"{foreign}: AttributeError"),
        (edited(whole, settings='{"momentum": 0, "gain": "row"}'), "ValueError: gain is 'row'; allowed: 'token'"),
        (edited(whole, world="two"), f"{foreign}: ValueError"),
    ]
    for data in (whole[:-1], whole[:100], whole[:5], b"", whole + b"x", b"\x04" + bytes(7) + b"[[[[" + whole):
        rows.append((data, f"cut short, or not a safetensors file: it has {len(data)} bytes"))
    refused(
        *((partial(loading, data), CalibrationError, text) for data, text in rows),
        (lambda: Calibration.load(tmp_path / "not-there"), CalibrationError, "not-there: No such file"),
    )


def test_other_models_and_layers_are_refused(calibration: Calibration):
    def check(change: Callable[[Toy], object]) -> Callable[[], None]:
        change(model := Toy().requires_grad_(False))
        return lambda: calibration.check(model, 2)

    def nudge(name: str) -> Callable[[Toy], object]:
        return lambda model: model.get_parameter(name).view(-1)[-3].add_(0.1)

    layers = ("0.attn.v.weight", "1.first.weight", "1.mlp.down.weight")
    nudged = ("embed.weight", *(f"layers.{name}" for name in layers), "head.bias")
    another = r"for the model Toy \[\w+\], this is Toy \[\w+\]"
    refused(
        *((check(nudge(name)), CalibrationError, another) for name in nudged),
        (check(lambda model: model.embed.weight[:2].copy_(model.embed.weight[:2].flip(0))), CalibrationError, another),
        (check(Toy.half), CalibrationError, r"Toy \[\w+\] in float32, this is Toy \[\w+\] in float16"),
        (check(lambda model: model.layers.pop(1)), CalibrationError, "has 4 layers, the model 2; .*layers.1.attn.o"),
        (lambda: calibration.codec("x"), CalibrationError, "layer is 'x'; calibrated: layers.0.attn.o"),
    )


def test_zero_features_get_a_floor_and_zero_layers_an_error(caplog: pytest.LogCaptureFixture):
    model = Toy().requires_grad_(False)
    weight = model.get_parameter("layers.1.mlp.down.weight")
    weight[7] = weight[9, :51] = 0  # of the latter the columns of the first of two ranks
    ranges = calibrate(model, sequences(2), ranks=2).ranges["layers.1.mlp.down"]
    others = ranges[:, [e for e in range(WIDTH) if e not in (7, 9)]]
    assert float(ranges[0, 7]) == float(ranges[1, 7]) == float(ranges[0, 9])
    assert float(ranges[0, 7]) <= float(others.min())
    assert ranges[1, 9] > ranges[0, 9]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "always zero in the calibration text: feature 7 on rank 0 of layers.1.mlp.down; such features get "
        "the smallest range of their layer"
    ]
    weight.zero_()
    with pytest.raises(ValueError, match=r"features 0 to 63 of layers.1.mlp.down were zero in all 1 sequences"):
        calibrate(model, sequences(2), ranks=2)


def test_wrong_arguments_are_refused():
    broken = Toy().requires_grad_(False)
    broken.get_parameter("layers.0.mlp.down.weight")[3] = torch.inf

    def given(model: Toy | None = None, **arguments: Any) -> Callable[[], Calibration]:
        return lambda: calibrate(model or Toy(), **{"sequences": sequences(1), "ranks": 2} | arguments)

    refused(
        (given(k=WIDTH), ValueError, "k is 64; allowed: 0 to 63"),
        (given(momentum=1.0), ValueError, "momentum is 1.0"),
        (given(bits=3.4), ValueError, "bits is 3.4; allowed: at least 3.5, which codes of 3 bits take, or None"),
        (given(bits="5"), TypeError, "bits is '5'; allowed: 'auto', a number of bits per value, or None"),
        (given(gain="row"), ValueError, "gain is 'row'; allowed: 'token', 'static'"),
        (given(ranks=None), TypeError, "ranks is None"),
        (given(sequences=[]), ValueError, "sequences is empty"),
        (given(sequences=[torch.ones(1, 2, 3, dtype=torch.long)]), ValueError, "sequences has torch.int64"),
        (given(broken), ValueError, "sequence 0 makes feature 3 of layers.0.mlp.down on rank 0"),
    )
    assert "forward" not in vars(broken.layers[0].mlp.down)  # whole again
    assert given(ranks=3)().world == 3
