import io
from pathlib import Path

import pytest
from rich.console import Console

from lowbit.bench import losses
from lowbit.bench.report import Report


def row(regime: str, boundary: str, seed: int, loss: float, over: float | None) -> dict:
    bits = 32.0 if boundary == "fp32" else 4.5
    curve = [[10, loss + 1], [20, loss]]
    return {
        "regime": regime, "boundary": boundary, "seed": seed, "loss": loss, "over_fp32": over, "curve": curve,
        "bits_forward": bits, "bits_backward": bits, "state_bytes": 2_000_000 * (boundary != "fp32"),
    }  # fmt: skip


ROWS = [
    row("finetune", "int4", 0, 2.0, None),
    row("scratch", "fp32", 0, 1.0, 0.0),
    row("scratch", "fp32", 1, 3.0, 0.0),
    row("scratch", "int4", 0, 1.25, 0.25),
    row("scratch", "int4", 1, 3.75, 0.75),
]
REPORT = Report(command="bench convergence", settings={}, machine={}, rows=ROWS)


def test_means_and_spreads_are_over_seeds_of_one_regime_and_boundary():
    first, second, third = losses.summary(ROWS)
    assert (first["regime"], first["boundary"]) == ("scratch", "fp32")
    assert (third["regime"], third["seeds"], third["over_fp32"]) == ("finetune", 1, None)
    assert second["loss"] == 2.5
    assert second["loss_spread"] == pytest.approx(2.5 / 2**0.5)
    assert second["over_fp32"] == 0.5
    assert second["over_fp32_spread"] == pytest.approx(0.5 / 2**0.5)
    assert second["state_mb"] == 2
    assert third["loss_spread"] is None


def test_a_table_for_each_regime():
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(losses.show(REPORT))
    text = console.export_text()
    assert text.count("Held-out loss") == 2
    assert "+0.5000" in text
    assert "4.50" in text


def test_curves_are_differences_from_the_same_seed():
    curves = losses._over_reference([r for r in ROWS if r["regime"] == "scratch"])
    assert curves["int4"] == [[(10, 0.25), (20, 0.25)], [(10, 0.75), (20, 0.75)]]


def test_the_picture_has_a_panel_for_each_regime(tmp_path: Path):
    losses.draw(REPORT, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
