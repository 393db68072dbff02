from pathlib import Path

import pytest
import torch

from lowbit import kernels
from lowbit.codecs import GroupInt, TAHQuant, parse
from lowbit.report import run
from lowbit_lab.bench import codec_speed, codecs, timing
from lowbit_lab.bench.codecs import COMMAND, CodecsBenchmark, relative_error
from lowbit_lab.bench.samples import drawn
from tests.lab.bench.shown import shown

MEMORY = "SubspaceQuant(directions=4)"
NAMES = ("int4", "feature-int4", "feature-int4-static", "tah-quant", MEMORY, "untimed")


class Untimed:
    """No codec, but with what its bits and errors are measured by."""

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def bits_per_element(self, shape: torch.Size) -> float:
        return 32.0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("activations") / "x.pt"
    torch.save([drawn("gaussian", (2, 8, 128), seed=5)], path)
    with pytest.MonkeyPatch.context() as patch, kernels.backend("reference"):
        patch.setattr(timing, "last_level_cache", lambda device: 2**20)
        patch.setitem(codecs.EXTRA_NAMES, "untimed", Untimed())
        return run(
            COMMAND,
            CodecsBenchmark(
                codecs=NAMES,
                dtypes=("float32", "bfloat16"),
                threads=(1,),
                data=("student-t", "real"),
                shape=(1, 32, 128),
                rounds=2,
                layer=True,
                activations=str(path),
            ),
        )


def test_there_is_a_row_for_everything(report):
    found = [(r["data"], r["dtype"], r["codec"], r["threads"]) for r in report.rows]
    expected = [
        (data, dtype, codec, 1)
        for data in ("student-t", "real")
        for dtype in ("float32", "bfloat16")
        for codec in NAMES
    ]
    assert found == expected
    assert report.command == "bench codecs"


def test_bits_and_errors_are_those_of_the_codec(report):
    x = drawn("student-t", (1, 32, 128)).bfloat16()
    row = next(r for r in report.rows if (r["codec"], r["dtype"]) == ("int4", "bfloat16"))
    with kernels.backend("reference"):
        y = GroupInt().round_trip(x)
    assert row["bits_per_element"] == 8 * GroupInt().nbytes(x.shape) / x.numel()
    assert row["relative_error"] == pytest.approx(
        ((x.double() - y.double()).pow(2).sum() / x.double().pow(2).sum()).sqrt().item()
    )
    real = next(r for r in report.rows if r["data"] == "real")
    assert real["relative_error"] != report.rows[0]["relative_error"]


def test_speeds_stand_beside_a_copy_and_eager_pytorch(report):
    for row in report.rows:
        timed = row["codec"] != "untimed"
        assert all(
            (field in row) == timed
            for field in (
                "encode_gb_s",
                "decode_gb_s",
                "copy_gb_s",
                "encode_share_of_copy",
                "checksum_gb_s",
                "checksum_share",
            )
        )
        eager = timed and row["data"] == "student-t"
        assert ("reference_encode_gb_s" in row) == eager
        assert ("share_of_layer" in row) == eager
        assert all(value > 0 for name, value in row.items() if name.endswith("gb_s"))


def test_a_codec_with_memory_is_shown_by_its_first_message(report):
    codec, x = parse(MEMORY), drawn("student-t", (1, 32, 128))
    row = next(r for r in report.rows if r["codec"] == MEMORY)
    with kernels.backend("reference"):
        sender, receiver = (codec.open(shape=x.shape, dtype=x.dtype) for _ in range(2))
        y = receiver.decode(sender.encode(x))
    assert row["relative_error"] == pytest.approx(relative_error(x, y))
    assert row["bits_per_element"] == 8 * codec.nbytes(x.shape) / x.numel()


def test_a_layer_is_run_forward_and_backward_on_the_same_tensor(monkeypatch: pytest.MonkeyPatch):
    x, seen = drawn("gaussian", (1, 32, 128)), []
    layer = codec_speed.decoder_layer(x)
    layer.layers[0].register_full_backward_hook(lambda m, inner, outer: seen.append(outer[0]))
    layer.layers[0].register_forward_hook(lambda m, given, out: seen.append(given[0]))
    codec_speed._forward_and_backward(layer, [x])(0)
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


def test_a_codec_that_sleeps_is_slow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 2**10)
    monkeypatch.setattr(GroupInt, "_encode", lambda self, x, payload: torch.arange(10**7).sum())
    settings = CodecsBenchmark(
        codecs=("int4",), dtypes=("float32",), threads=(1,), data=("gaussian",), shape=(1, 64, 512), rounds=3
    )
    (row,) = run(COMMAND, settings).rows
    assert row["encode_share_of_copy"] < 0.1
    assert row["encode_gb_s"] < row["copy_gb_s"] / 10


def test_heavy_tails_cost_less_than_with_plain_int4_at_no_more_bits():
    shape = (2, 64, 1024)
    plain, ours = GroupInt(bits=4, group=64), TAHQuant()
    assert ours.bits_per_element(shape) < plain.bits_per_element(shape)
    for data in ("student-t", "outliers"):
        x = drawn(data, shape)
        with kernels.backend("reference"):
            errors = [relative_error(x, codec.round_trip(x)) for codec in (ours, plain)]
        assert errors[0] < errors[1]


def test_relative_error_of_zeros():
    zeros = torch.zeros(4)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros, torch.ones(4)) == 2
    assert relative_error(torch.ones(4), zeros) == 1


def test_the_report_is_shown_and_drawn(report, tmp_path: Path):
    text = shown(COMMAND, report.rows, tmp_path, width=120)
    assert "tah-quant" in text
    assert "student-t" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"codecs": ("int9",)}, "codec is 'int9'"),
        ({"codecs": ("aq-sgd-8bit",)}, "'aq-sgd-8bit', which needs every sample twice; .*`lowbit bench pipeline`"),
        (
            {"codecs": ("SubspaceQuant(directions='auto')",)},
            "codec is .*, which chooses a parameter in a",
        ),
        ({"layer": True, "shape": (1, 4, 9)}, "model.dim is 9; allowed: .* even width"),
        ({"dtypes": ("float64",)}, r"dtypes is .*allowed: float32"),
        ({"data": ()}, r"data is empty"),
        ({"threads": (10**6,)}, "threads is"),
        ({"shape": (1, 0, 8)}, "shape is"),
        (
            {"shape": (1, 4, 8), "codecs": ("SubspaceQuant(directions=32)",)},
            r"directions is 32, and the last dimension of \(1, 4, 8\) is 8",
        ),
        ({"rounds": 0}, "rounds is 0; allowed: at least 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        CodecsBenchmark(**wrong)
