"""`lowbit bench spectrum`: the tensors are the model's own, and the figures those of the sessions."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowbit.bench import Report, charts, spectrum, spectrum_views
from lowbit.cli import app
from lowbit.codecs import GroupInt
from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model
from lowbit.train.tokenizer import ByteTokenizer

TINY = ModelConfig(dim=32, layers=3, heads=2)


def test_capture_takes_activations_and_their_gradients():
    model = build_model(TINY, vocab=256, sequence=16, seed=0)
    g = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(256, (2, 16), generator=g) for _ in range(2))
    forward, backward = spectrum.capture(model, inputs, targets, stages=3)
    output = model.requires_grad_(True)(
        input_ids=inputs, labels=targets, shift_labels=targets, output_hidden_states=True
    )
    expected = torch.autograd.grad(output.loss, output.hidden_states[1:3])
    for i in range(2):
        assert torch.equal(forward[i], output.hidden_states[1 + i])
        assert torch.allclose(backward[i], expected[i], rtol=1e-4, atol=1e-9)
    again = spectrum.capture(model, inputs, targets, stages=3)
    assert torch.equal(again[1][0], backward[0]), "no hooks and no gradients are left behind"


def test_energy_outside_falls_to_nothing():
    x = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 20, dtype=torch.float64)
    shares = spectrum.outside(x.float())
    assert shares[0] == 1
    assert 0 < shares[2] < shares[1] < 1
    assert shares[3:].max() < 1e-9
    assert spectrum.outside(torch.zeros(4, 3)).tolist() == [1, 1, 1, 1]


def test_a_checkpoint_and_a_text_give_a_table(tmp_path: Path):
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    build_model(TINY, vocab=256, sequence=64, seed=0).save_pretrained(folder)
    ByteTokenizer().hugging_face().save_pretrained(folder)
    text.write_text("The cat sat on the mat; 12 dogs, however, did not.\n" * 60)
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    given = (
        "--stages",
        "3",
        "--direction",
        "4,64",
        "--codec",
        "int4",
        "--sequence",
        "32",
        "--batch",
        "2",
    )
    result = CliRunner().invoke(
        app,
        ["bench", "spectrum", str(folder), str(text), *given, "--json", str(file), "--png", str(picture)],
        env={"COLUMNS": "160", "TERM": "dumb"},
    )
    assert result.exit_code == 0, result.output
    assert "Backward, messages of 2 x 32 x 32" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert {(row["boundary"], row["direction"]) for row in rows} == {
        (b, d) for b in (0, 1) for d in spectrum.DIRECTIONS
    }
    assert not any(row["directions"] == 64 for row in rows), "more directions than channels are left out"
    for row in rows:
        assert row["decibels"] > 0
        if row["format"] == "int4":
            assert row["bits_per_element"] == GroupInt(bits=4).bits_per_element((2, 32, 32))
    for place in itertools.product((0, 1), spectrum.DIRECTIONS):
        chosen = [r for r in rows if (r["boundary"], r["direction"]) == place and r["fitted"]]
        assert [r["bits"] for r in chosen] == [3, 4]
        assert all(0 <= r["outside"] < 1 for r in chosen)
    spectrum_views.draw(Report(**json.loads(file.read_text())), picture)


def test_a_line_has_only_what_all_boundaries_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    drawn: list[Any] = []
    monkeypatch.setattr(charts, "save", lambda figure, path: drawn.append(figure))
    measured = [  # boundary, rank, bits an element, decibels: rank 6 suits both, 5 only one
        (0, 4, 2.0, 10.0), (1, 4, 2.0, 14.0), (0, 5, 2.5, 20.0), (0, 6, 3.0, 20.0), (1, 6, 3.0, 22.0),
    ]  # fmt: skip
    rows = [
        {"direction": "forward", "format": "subspace", "boundary": boundary, "directions": rank, "bits": 2,
         "bits_per_element": bits, "decibels": decibels}
        for boundary, rank, bits, decibels in measured
    ]  # fmt: skip
    spectrum_views.draw(Report(command="bench spectrum", settings={}, machine={}, rows=rows), tmp_path / "a.png")
    line, points = drawn[0].axes[0].lines
    assert line.get_xydata().tolist() == [[2.0, 12.0], [3.0, 21.0]]
    assert points.get_xydata().tolist() == [[2.5, 20.0]]
    assert points.get_linestyle() == "None"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 1}, "stages is 1; allowed: at least 2"),
        ({"directions": (0,)}, "directions is 0"),
        ({"bits": ()}, "bits is empty"),
        ({"codecs": ("aq-sgd",)}, "codecs has 'aq-sgd', which learns"),
        (
            {"codecs": ("SubspaceQuant(directions='auto')",)},
            "codecs has .*, which a pipeline's warm-up settles",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        spectrum.Settings(model="a", text="b", **settings)
