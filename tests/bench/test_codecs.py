import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lowbit import ops
from lowbit.bench import codecs, timing
from lowbit.bench.codecs import Settings, relative_error, run
from lowbit.bench.samples import drawn
from lowbit.codecs import GroupInt, TAHQuant

NAMES = ("int4", "feature-int4", "tah-quant", "published-procedure")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("activations") / "x.pt"
    torch.save([drawn("gaussian", (2, 8, 128), seed=5)], path)
    with pytest.MonkeyPatch.context() as patch, ops.backend("reference"):
        patch.setattr(timing, "last_level_cache", lambda device: 2**20)
        return run(
            Settings(
                codecs=NAMES,
                dtypes=("float32", "bfloat16"),
                threads=(1,),
                data=("student-t", "real"),
                shape=(1, 32, 128),
                rounds=2,
                activations=str(path),
            )
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
    with ops.backend("reference"):
        y = GroupInt().round_trip(x)
    assert row["bits_per_element"] == 8 * GroupInt().nbytes(x.shape) / x.numel()
    assert row["relative_error"] == pytest.approx(
        ((x.double() - y.double()).pow(2).sum() / x.double().pow(2).sum()).sqrt().item()
    )
    real = next(r for r in report.rows if r["data"] == "real")
    assert real["relative_error"] != report.rows[0]["relative_error"]


def test_speeds_stand_beside_a_copy_and_eager_pytorch(report):
    for row in report.rows:
        timed = row["codec"] != "published-procedure"
        assert all(
            (field in row) == timed
            for field in ("encode_gb_s", "decode_gb_s", "copy_gb_s", "encode_share_of_copy")
        )
        eager = timed and row["data"] == "student-t"
        assert ("reference_encode_gb_s" in row) == eager
        assert all(value > 0 for name, value in row.items() if name.endswith("gb_s"))


def test_a_codec_that_sleeps_is_slow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 2**10)
    monkeypatch.setattr(GroupInt, "_encode", lambda self, x, payload: torch.arange(10**7).sum())
    settings = Settings(
        codecs=("int4",), dtypes=("float32",), threads=(1,), data=("gaussian",), shape=(1, 64, 512), rounds=3
    )  # fmt: skip
    (row,) = run(settings).rows
    assert row["encode_share_of_copy"] < 0.1
    assert row["encode_gb_s"] < row["copy_gb_s"] / 10


def test_heavy_tails_cost_less_than_with_plain_int4_at_no_more_bits():
    shape = (2, 64, 1024)
    plain, ours = GroupInt(bits=4, group=64), TAHQuant()
    assert ours.bits_per_element(shape) < plain.bits_per_element(shape)
    for data in ("student-t", "outliers"):
        x = drawn(data, shape)
        with ops.backend("reference"):
            errors = [relative_error(x, codec.round_trip(x)) for codec in (ours, plain)]
        assert errors[0] < errors[1]


def test_relative_error_of_zeros():
    zeros = torch.zeros(4)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros, torch.ones(4)) == 2
    assert relative_error(torch.ones(4), zeros) == 1


def test_the_report_is_shown_and_drawn(report, tmp_path: Path):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(codecs.show(report))
    text = console.export_text()
    assert "tah-quant" in text
    assert "student-t" in text
    codecs.draw(report, tmp_path / "codecs.png")
    assert (tmp_path / "codecs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"codecs": ("int9",)}, "codec is 'int9'"),
        ({"codecs": ("aq-sgd",)}, "works on sessions only"),
        ({"dtypes": ("float64",)}, r"dtypes is .*allowed: float32"),
        ({"data": ()}, r"data is \(\)"),
        ({"threads": (10**6,)}, "threads is"),
        ({"shape": (1, 0, 8)}, "shape is"),
        ({"rounds": 0}, "rounds is 0; allowed: at least 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)
