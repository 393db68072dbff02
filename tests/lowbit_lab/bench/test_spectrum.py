"""`lowbit bench spectrum`: the tensors are the model's own, and the figures those of the sessions."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from lowbit.codecs import GroupInt
from lowbit_lab.bench import spectrum
from lowbit_lab.bench.spectrum import COMMAND, SpectrumBenchmark
from lowbit_run.report import run
from lowbit_run.train.config import ModelConfig
from lowbit_run.train.model import build_model
from lowbit_run.train.pretrained import ByteTokenizer
from tests.lowbit_lab.bench.shown import shown

TINY = ModelConfig(dim=32, layers=3, heads=2)
FLAT, ONE = (torch.tensor(each, dtype=torch.float64) for each in ([3.0] * 8, [16.0, 0.0, 0.0, 0.0]))


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
    settings = SpectrumBenchmark(
        checkpoint=str(folder), text=str(text), stages=3, codecs=("int4", "transform"), sequence=32, batch=2
    )
    rows = run(COMMAND, settings).rows
    assert "Backward, messages of 2 x 32 x 32" in shown(COMMAND, rows, tmp_path)
    assert {(row["boundary"], row["direction"]) for row in rows} == {
        (b, d) for b in (0, 1) for d in spectrum.DIRECTIONS
    }
    formats = [row for row in rows if row["format"] != "bound"]
    for row in formats:
        assert row["decibels"] > 0
        assert row["token_decibels"] > 0
        for measure in ("", "token_"):
            assert row[f"{measure}bound"] >= 0
            assert row[f"{measure}above"] == row["bits_per_element"] - row[f"{measure}bound"]
        if row["format"] == "int4":
            assert row["bits_per_element"] == GroupInt(bits=4).bits_per_element((2, 32, 32))
    for place in itertools.product((0, 1), spectrum.DIRECTIONS):
        own = [r for r in rows if (r["boundary"], r["direction"]) == place]
        line = [(r["decibels"], r["bits_per_element"]) for r in own if r["format"] == "bound"]
        assert line[0] == (0, pytest.approx(0, abs=1e-9))
        assert line == sorted(line), "more precision takes more bits"
        for row in own:  # between its neighbours on the line
            if row["format"] != "bound":
                lower = max(bits for decibels, bits in line if decibels <= row["decibels"])
                upper = min(bits for decibels, bits in line if decibels >= row["decibels"])
                assert lower <= row["bound"] <= upper


def test_a_format_without_error_has_no_bound(tmp_path: Path):
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    place = spectrum._Boundary(0, "forward")
    settings = SpectrumBenchmark(checkpoint="a", text="b", codecs=("fp32", "int8"))
    place.carry(settings, x, True)
    exact, coded = list(place.rows(x.shape))[:2]
    assert exact["decibels"] == math.inf
    assert exact["bound"] is exact["above"] is exact["token_above"] is None
    assert coded["above"] > 0
    assert "–" in shown(COMMAND, [exact, coded], tmp_path)
    # The bound at a signal-to-noise ratio.
    assert spectrum.rate_at([FLAT], 0.0) == 0
    assert spectrum.rate_at([ONE], 20.0) == pytest.approx(0.5 * math.log2(100) / 4)


def tokens(count: int, variances: list[float], *, seed: int = 0) -> torch.Tensor:
    """Gaussian tokens with exactly these second moments, along random directions."""
    g = torch.Generator().manual_seed(seed)
    white = torch.linalg.qr(torch.randn(count, len(variances), generator=g, dtype=torch.float64)).Q * count**0.5
    turn = torch.linalg.qr(torch.randn(len(variances), len(variances), generator=g, dtype=torch.float64)).Q
    return white * torch.tensor(variances, dtype=torch.float64).sqrt() @ turn.t()


@pytest.mark.parametrize(
    ("spectra", "error", "bits"),
    [
        *(([FLAT], error, 0.5 * math.log2(3 / error)) for error in (3e-9, 0.01, 0.5, 2.9)),
        *(([FLAT], error, 0.0) for error in (2.999999, 3.0, 4.0, 7.0)),  # as large as the message: no bits
        ([ONE], 0.25, 0.5 * math.log2(16 / (4 * 0.25)) / 4),  # all error and all bits are its own
        ([torch.tensor([0.5, 16.0, 0.1, 4.0]).double()], 2.6 / 4, (2 + 1) / 4),  # level 1: errors 1 + 1 + 0.5 + 0.1
        # Messages share one level, as if they were components of one; spreading the error evenly takes more bits.
        ([100 * FLAT, FLAT], 1.0, (0.5 * math.log2(300) + 0.5 * math.log2(3)) / 2),
        ([100 * FLAT, FLAT], 5.0, 0.5 * math.log2(300 / 7) / 2),  # 3 of the quiet, 7 of the loud
        ([100 * FLAT, 100 * FLAT], 1.0, 0.5 * math.log2(300)),
        ([0 * ONE], 0.0, 0.0),
        ([0 * ONE], 1.0, 0.0),
        ([FLAT], 0.0, None),  # no number of bits is enough
        ([FLAT], math.nan, None),
        ([torch.full((4,), math.nan, dtype=torch.float64)], 0.1, None),
    ],
)
def test_the_bound_of_sources_whose_rate_is_known(spectra, error: float, bits: float | None):
    assert spectrum.rate(spectra, error) == (None if bits is None else pytest.approx(bits, abs=1e-6))


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e30])
def test_a_spectrum_is_that_of_the_second_moments(scale: float):
    variances = [9.0, 4.0, 1.0, 0.25, 0.0]
    x = tokens(50, variances) * scale
    found = spectrum.spectrum(x.view(2, 25, 5)) / scale**2
    assert found.sort(descending=True).values.tolist() == pytest.approx(variances, abs=1e-9)
    few = spectrum.spectrum(x[:3])
    assert few.shape == (5,)
    assert float(few.sum()) == pytest.approx(float(x[:3].square().sum(-1).mean()))
    assert (few > 1e-9 * few.max()).sum() == 3, "three tokens span three directions"
    x[1, 2] = math.inf
    assert spectrum.spectrum(x).isnan().all()
