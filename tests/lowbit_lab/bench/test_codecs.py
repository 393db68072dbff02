import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from lowbit import kernels
from lowbit.codecs import GroupInt, parse
from lowbit_lab.bench import codecs, timing
from lowbit_lab.bench.codecs import COMMAND, CodecsBenchmark, drawn, relative_error
from lowbit_run.report import run
from lowbit_run.train.config import ModelConfig
from tests.lowbit_lab.bench.shown import shown

MEMORY = "TransformQuant()"
NAMES = ("int4", "feature-int4", "feature-int4-static", "tah-quant", MEMORY)


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch, kernels.backend("reference"):
        patch.setattr(timing, "last_level_cache", lambda device: 2**20)
        patch.setattr(codecs, "real", lambda source, steps: [drawn("gaussian", (2, 8, 128), seed=5)])
        settings = CodecsBenchmark(
            codecs=NAMES, threads=(1,), data=("student-t", "real"), shape=(1, 32, 128), rounds=2, layer=True,
        )  # fmt: skip
        return run(COMMAND, settings)


def test_there_is_a_row_for_everything(report, tmp_path: Path):
    found = [(r["data"], r["dtype"], r["codec"], r["threads"]) for r in report.rows]
    assert found == list(itertools.product(("student-t", "real"), ("float32", "bfloat16"), NAMES, (1,)))
    assert report.command == "bench codecs"
    x = drawn("student-t", (1, 32, 128)).bfloat16()
    row = next(r for r in report.rows if (r["codec"], r["dtype"]) == ("int4", "bfloat16"))
    with kernels.backend("reference"):
        y = GroupInt().round_trip(x)
    assert row["bits_per_element"] == 8 * GroupInt().nbytes(x.shape) / x.numel()
    assert row["relative_error"] == pytest.approx(
        ((x.double() - y.double()).pow(2).sum() / x.double().pow(2).sum()).sqrt().item()
    )
    codec, x = parse(MEMORY), drawn("student-t", (1, 32, 128))
    row = next(r for r in report.rows if r["codec"] == MEMORY)
    with kernels.backend("reference"):  # its first message
        sender, receiver = (codec.open(shape=x.shape, dtype=x.dtype) for _ in range(2))
        y = receiver.decode(sender.encode(x))
    assert row["relative_error"] == pytest.approx(relative_error(x, y))
    assert row["bits_per_element"] == 8 * codec.nbytes(x.shape) / x.numel()
    real = next(r for r in report.rows if r["data"] == "real")
    assert real["relative_error"] != report.rows[0]["relative_error"]
    # Speeds stand beside a copy and eager PyTorch.
    for row in report.rows:
        fields = ("encode_gb_s", "decode_gb_s", "copy_gb_s", "encode_share_of_copy", "checksum_gb_s", "checksum_share")
        assert all(field in row for field in fields)
        eager = row["data"] == "student-t"
        assert ("reference_encode_gb_s" in row) == eager
        assert ("share_of_layer" in row) == eager
        assert all(value > 0 for name, value in row.items() if name.endswith("gb_s"))
    assert {r["codec"] for r in report.rows if r["error_of"] == "first message"} == {MEMORY}
    text = shown(COMMAND, report.rows, tmp_path, width=140)
    assert text.count("first message") == 1
    assert "tah-quant" in text
    assert "student-t" in text


def test_a_layer_is_run_forward_and_backward_on_the_same_tensor(monkeypatch: pytest.MonkeyPatch):
    x, seen = drawn("gaussian", (1, 32, 128)), []
    layer = codecs.decoder_layer(x)
    layer.layers[0].register_full_backward_hook(lambda m, inner, outer: seen.append(outer[0]))
    layer.layers[0].register_forward_hook(lambda m, given, out: seen.append(given[0]))
    codecs._forward_and_backward(layer, [x])(0)
    assert all(torch.equal(found, x) for found in seen)
    assert len(seen) == 2
    assert len(layer.layers) == 1
    seconds = {"copy": 1.0, "encode": 2.0, "decode": 3.0, "checksum": 0.25, "layer": 100.0}
    monkeypatch.setattr(timing, "in_turn", lambda given, **_: {name: [seconds[name]] * 2 for name in given})
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 2**10)
    settings = CodecsBenchmark(
        codecs=("int4",), dtypes=("float32",), threads=(1,), data=("gaussian",), shape=(1, 32, 128),
        reference=False, layer=True,
    )  # fmt: skip
    (row,) = run(COMMAND, settings).rows
    assert (row["layer_seconds"], row["share_of_layer"]) == (100, 0.05)
    assert row["checksum_share"] == 0.1  # at both ends
    assert row["checksum_gb_s"] == 4 * GroupInt().nbytes((1, 32, 128)) / 1e9  # of the payload


def kurtosis(x: torch.Tensor) -> float:
    return ((x - x.mean()) ** 4).mean().item() / x.var().item() ** 2


def test_draws_repeat_and_their_tails_are_as_heavy_as_they_say():
    shape = (2, 100, 800)
    assert kurtosis(drawn("gaussian", shape)) == pytest.approx(3, abs=0.2)
    assert kurtosis(drawn("student-t", shape)) > 10
    outliers = drawn("outliers", shape)
    large = outliers.std((0, 1)) > 10
    assert large.sum() == 4
    assert outliers[..., ~large].std().item() == pytest.approx(1, abs=0.05)
    a, b, c = (drawn("student-t", (2, 8), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    with pytest.raises(ValueError, match=r"kind is 'uniform'; allowed: 'gaussian'"):
        drawn("uniform", (2, 8))


def test_real_activations_come_from_a_model_trained_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(codecs, "ModelConfig", partial(ModelConfig, dim=32, layers=3, heads=2))
    monkeypatch.setattr(codecs, "DataConfig", partial(codecs.DataConfig, text=(__file__,)))
    monkeypatch.setattr(codecs, "SEQUENCE", 32)
    monkeypatch.setattr(codecs, "BATCH", 2)
    sent = codecs.real("", steps=2)
    assert [tuple(x.shape) for x in sent] == [(2, 32, 32)] * 2
    assert all(x.isfinite().all() and x.std() > 0 for x in sent)
    with pytest.raises(ValueError, match=r"activations are 'x.pt'; allowed: a folder with a model"):
        codecs.real("x.pt", steps=1)


def test_operations_take_turns_on_changing_buffers(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, int]] = []
    operations = {name: lambda i, name=name: calls.append((name, i)) for name in ("copy", "encode", "slow")}
    seconds = timing.in_turn(operations, rounds=3, buffers=4, fewer={"slow": 1})
    assert calls[:3] == [("copy", 0), ("encode", 0), ("slow", 0)]  # not timed
    assert [name for name, _ in calls[3:]] == ["copy", "encode", "slow"] + ["copy", "encode"] * 2
    assert [i for _, i in calls[3:]] == [1, 2, 3, 0, 1, 2, 3]
    assert {name: len(values) for name, values in seconds.items()} == {"copy": 3, "encode": 3, "slow": 1}
    assert min(min(values) for values in seconds.values()) > 0
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 100)
    assert timing.buffers_for(10) * 10 > 200, "together more than the cache"
    assert timing.buffers_for(10**6) == 3
