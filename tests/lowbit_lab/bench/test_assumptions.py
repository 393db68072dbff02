"""`lowbit bench assumptions`: errors, bias and gradients are those of the run, and the exact gradient is exact."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit.codecs import Cast, Codec, GroupInt
from lowbit_lab.bench.assumptions import (
    COMMAND,
    AssumptionsBenchmark,
    ErrorMeter,
    Observed,
    aligned,
    bias_of,
    running,
    slope_of,
    summarized,
)
from lowbit_lab.bench.training import boundary_modules
from lowbit_run.report import Report, run
from lowbit_run.train.config import DataConfig, ModelConfig
from lowbit_run.train.model import build_model
from lowbit_run.train.single_process import PlainGradients, model_loss
from tests.lowbit_lab.bench.shown import shown

TINY = ModelConfig(dim=32, layers=3, heads=2)
INT2 = GroupInt(bits=2)
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def settings(text: str) -> AssumptionsBenchmark:
    return AssumptionsBenchmark(
        boundaries=("fp32", "int4"), model=TINY, data=DataConfig(text=(text,), sequence=16, batch=2),
        stages=3, steps=8, warmup_steps=2, every=2, repeats=3, norm_windows=4,
    )  # fmt: skip


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def observed(codec: Codec, *, model: ModelConfig = TINY, steps: int = 3, warmup_steps: int = 1, every: int = 2):
    """A model that computes the gradients of so many batches, and does not move; what was observed."""
    built = build_model(model, vocab=256, sequence=16, seed=0).train()
    watch = Observed(
        built, boundary_modules(built, 3), (codec, codec), warmup_steps=warmup_steps, every=every, repeats=3,
        fixed=(batch(10), batch(11)),
    )  # fmt: skip
    for step in range(steps):
        watch.backward(partial(model_loss, built), *batch(step))
        if step < steps - 1:
            built.zero_grad()
    return built, watch


def gradient_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def test_bias_and_a_constant_error_are_told_from_noise():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, 64, generator=g)
    assert bias_of(GroupInt(bits=4), x, 8) == pytest.approx(1)
    assert bias_of(Cast(), x, 8) == 0
    assert abs(bias_of(GroupInt(bits=4, rounding="stochastic"), x, 8)) < 0.02
    shifted, noisy = ErrorMeter(INT2, 3), ErrorMeter(INT2, 3)
    assert shifted.constant() is None
    for _ in range(50):
        x = torch.randn(2, 32, 8, generator=g)
        shifted.add(x, x + 0.1)
        noisy.add(x, x + 0.1 * torch.randn(x.shape, generator=g))
    assert shifted.constant() == pytest.approx(1, rel=1e-3)
    assert noisy.constant() == pytest.approx(0, abs=0.01)
    assert noisy.errors == pytest.approx([0.01] * 50, rel=0.5)
    assert noisy.repeated == []


def test_without_an_error_the_gradient_is_the_exact_one():
    _, watch = observed(Cast(), model=dataclasses.replace(TINY, family="gpt2", dropout=0.5))
    assert [one["cosine"] for one in watch.alignment] == pytest.approx([1.0]), "the same dropout in both"
    assert watch.alignment[0]["gradient_error"] == pytest.approx(0, abs=1e-9)
    for meter in (meter for meters in watch.meters.values() for meter in meters):
        assert (meter.errors, meter.repeated) == ([0.0, 0.0], [])


def test_messages_and_gradients_are_those_of_the_run():
    model, watch = observed(INT2, steps=4)
    coded = gradient_of(model)
    watch.close()
    assert len(watch.alignment) == 2, "of the first and the third coded step"
    assert [step for step, _ in watch.norms] == [0, 2]
    for meters in watch.meters.values():
        assert [len(meter.errors) for meter in meters] == [3, 3]
        assert [len(meter.repeated) for meter in meters] == [2, 2]
        assert all(share == pytest.approx(1) for meter in meters for share in meter.repeated)
    plain = PlainGradients(model)
    gradients = []
    for seed in (3, 10, 11):
        model.zero_grad()
        plain.backward(partial(model_loss, model), *batch(seed))
        gradients.append(gradient_of(model))
    exact, first, second = gradients
    assert watch.alignment[-1] == pytest.approx(aligned(exact, coded), rel=1e-4)
    assert watch.norms[-1][1] == pytest.approx(float(first @ second), rel=1e-4)
    outputs = model(input_ids=batch(3)[0], output_hidden_states=True).hidden_states
    error = (INT2.round_trip(outputs[1]) - outputs[1]).square().sum() / outputs[1].square().sum()
    assert watch.meters["forward"][0].errors[-1] == pytest.approx(error.item(), rel=1e-4)
    assert 2 < watch.bits()["bits_forward"] < 4
    assert watch.meters["backward"][0].errors[-1] > 0.01


def test_a_run_gives_both_tables_and_a_file_is_gone_on_with(settings: AssumptionsBenchmark, tmp_path: Path):
    file = tmp_path / "a.json"
    run(COMMAND, dataclasses.replace(settings, boundaries=("fp32",)), file=file)
    report = run(COMMAND, settings, file=file)
    assert [row["boundary"] for row in report.rows] == ["fp32", "int4"]
    assert Report.read_json(file).rows == report.rows
    plain, coded = report.rows
    assert plain["error_forward"] == 0
    assert plain["bias_forward"] is None
    assert plain["cosine_lowest"] == pytest.approx(1)
    assert 0 < coded["error_backward"] < coded["error_forward"] < coded["error_forward_highest"] < 0.1
    assert coded["bias_forward"] == pytest.approx(1)
    assert 0.5 < coded["cosine_lowest"] <= coded["cosine"] < 1
    assert [step for step, _ in coded["curve"]] == [2, 4, 6]
    text = shown(COMMAND, report.rows, tmp_path)
    assert text.count("int4") == 3
    assert "100%" in text


def test_seeds_are_averaged_and_slopes_those_of_power_laws():
    rows = [
        {"boundary": "tah-quant", "seed": seed, "forward": "x", "backward": "y", "cosine": 0.8 + seed / 10,
         "cosine_lowest": 0.5 + seed / 10, "gradient_error_highest": 1.0 + seed, "bias_forward": None,
         "curve": [(10, 1.0 + seed), (20, 2.0)]}
        for seed in (0, 1)
    ]  # fmt: skip
    (row,) = summarized(rows)
    assert (row["seeds"], row["cosine_lowest"], row["gradient_error_highest"]) == (2, 0.5, 2.0)
    assert row["cosine"] == pytest.approx(0.85)
    assert row["bias_forward"] is None
    assert row["curve"] == [(10, 1.5), (20, 2.0)]
    norms = [(10 * i, (i + 1) ** 0.5 - i**0.5) for i in range(20)]  # the mean of the first T is T ** -0.5
    assert slope_of(running(norms, 10)) == pytest.approx(-0.5)
    assert running(norms, 10)[0] == (10, 1.0)
    assert slope_of([(1, 1.0), (2, 0.5)]) is None
    assert slope_of([(1, 1.0), (2, 0.5), (3, -0.1)]) is None


def test_too_many_stages_and_too_short_a_text_are_refused(settings: AssumptionsBenchmark, tmp_path: Path):
    (tmp_path / "short.txt").write_text("a" * 20)
    short = dataclasses.replace(settings.data, text=(str(tmp_path / "short.txt"),), batch=1, held_out_share=0)
    for change, message in (
        ({"stages": 4}, "stages is 4; the model has 3 layers; allowed: at most as many"),
        ({"data": short}, "windows? to train on; allowed: at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run(COMMAND, dataclasses.replace(settings, **change))
