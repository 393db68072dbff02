"""`lowbit bench activations`: a real measurement of a tiny model."""

from pathlib import Path

import pytest

from lowbit.bench.activations import METHODS, PLAIN, Settings, run, summary
from lowbit.bench.activations_views import draw, show


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i) for i in range(2000)))
    return Settings(
        methods=tuple(METHODS)[1:], sequences=(32, 64), samples=2, train_steps=3, dim=64, layers=1, heads=2,
        text=(str(text),), threads=1,
    )  # fmt: skip


def test_bytes_and_errors_of_every_method(settings: Settings, tmp_path: Path):
    from rich.console import Console

    report = run(settings)
    assert [row["sequence"] for row in report.rows] == [32] * len(METHODS) + [64] * len(METHODS)
    for rows in (report.rows[: len(METHODS)], report.rows[len(METHODS) :]):
        found = {row["method"]: row for row in rows}
        errors = {row["method"]: row for row in summary(rows)}
        assert all(len(errors) == 2 for errors in found["low-bit"]["errors"].values())
        assert {"norm", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "embedding"} <= errors[PLAIN].keys()
        assert errors[PLAIN]["all"] < 1e-5
        size = {method: row["saved_bytes"] for method, row in found.items()}
        assert size["int4-uniform"] < size["low-bit+attention-4"] < size["low-bit"] < size[PLAIN]
        assert size["int4"] < size["low-bit"]
        assert 1e-3 < errors["low-bit"]["all"] < errors["int4"]["all"] < 0.3
        assert errors["attention-8"]["all"] < errors["attention-4"]["all"]
        # Attention alone turns its own linear layers, which backward reaches after it.
        assert errors["attention-4"]["mlp"] < 1e-5 < 1e-3 < errors["attention-4"]["k_proj"]
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(show(report))
    text = console.export_text()
    assert all(name in text for name in (*METHODS, "k_proj", "median"))
    draw(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"methods": ("int3",)}, r"methods is \('int3',\); allowed: plain, low-bit"),
        ({"sequences": (1,)}, r"sequences is \(1,\); allowed: at least 2 each"),
        ({"samples": 0}, "samples is 0; allowed: at least 1"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"dim": 33}, "model.dim is 33"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)
