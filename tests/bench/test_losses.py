import dataclasses
import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from lowbit.bench import charts, losses
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
PAIRS = [
    row(
        "scratch",
        f"SubspaceQuant(directions={r}, bits=2) / SubspaceQuant(directions={r}, bits=4)",
        0,
        0.9,
        r / 10000 - 0.1,
    )
    for r in (8, 16)
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


def test_a_table_keeps_its_numbers_whole_on_80_columns():
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(losses.show(dataclasses.replace(REPORT, rows=PAIRS)))
    text = console.export_text()
    assert "…" not in text
    for word in ("bits=2/4)", "-0.0984", "9.00", "seeds", "SubspaceQuant(directions=16,"):
        assert word in text


def test_the_picture_has_a_panel_for_each_regime_and_a_point_for_each_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    figures = []
    monkeypatch.setattr(charts, "save", lambda figure, path: figures.append(figure))
    losses.draw(dataclasses.replace(REPORT, rows=ROWS + PAIRS), tmp_path / "losses.png")
    (figure,) = figures
    panels = {
        axes.get_title(loc="left"): {text.get_text().replace("\n", " ") for text in axes.texts} for axes in figure.axes
    }
    names = {f"SubspaceQuant(directions={rank}, bits=2/4)" for rank in (8, 16)}
    assert panels == {"from scratch, no warm-up": {"int4", *names}}, "fp32 is the line at zero"
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_points_are_means_of_differences_over_their_range():
    scratch = [r for r in ROWS if (r["regime"], r["boundary"]) == ("scratch", "int4")]
    assert losses._places(scratch) == {"int4": (9.0, (0.25, 0.5, 0.75))}


@pytest.mark.parametrize("rows", [[], ROWS[:1], ROWS])
def test_a_picture_of_whatever_there_is(rows: list, tmp_path: Path):
    losses.draw(dataclasses.replace(REPORT, rows=rows), tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
