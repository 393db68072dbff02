"""`RateGoal`: a rate by the wanted error, or by what the error is expected to cost of the loss."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.codecs import RateGoal, TransformQuant
from lowbit.codecs.transform_quant.rates import bits_for_loss, raised
from tests.lowbit.codecs.transform_quant.messages import crossed, decibels, ends, tokens

ROWS, CHANNELS = 256, 64


def example() -> tuple[Tensor, Tensor]:
    """Activations with a few large tokens, and gradients that differ by token."""
    g = torch.Generator().manual_seed(3)
    x = tokens((ROWS, CHANNELS), seed=0, directions=8) + 0.01 * torch.randn(ROWS, CHANNELS, generator=g)
    x[::50] *= 5
    gradient = torch.randn(ROWS, CHANNELS, generator=g) * torch.rand(ROWS, 1, generator=g) / ROWS
    return x, gradient


def rate(codec: TransformQuant) -> float:
    assert codec.bits is not None
    return codec.bits


@pytest.mark.parametrize("step", ["token", "message"])
@pytest.mark.parametrize("goal", ["nats=0.2", "nats=0.02", "nats=0.002", "decibels=20", "decibels=30"])
def test_the_rate_that_is_chosen_errs_and_costs_about_as_much_as_is_wanted(goal: str, step: Any) -> None:
    (x, gradient), (name, _, wanted) = example(), goal.partition("=")
    if name == "decibels":
        x[::50] /= 5  # steps are relative to the median token's norm, and decibels to the largest tokens'
    settings: Any = {name: float(wanted)}
    sender, receiver = ends(RateGoal(step=step, **settings).choose(x, gradient, part=0.5), (ROWS, CHANNELS))
    for _ in range(12):
        y = crossed(sender, receiver, x)
    # Half of (g . e)^2, in the mean over errors alike in all channels; the loss is a mean over the tokens.
    cost = ROWS / 2 * float(gradient.double().square().sum(1) @ (y - x).double().square().mean(1))
    if name == "nats":
        assert 0.4 < cost / (0.5 * float(wanted)) < 1.6
    else:
        assert abs(decibels(x, y) - float(wanted)) < 2


def test_a_quarter_of_the_cost_takes_a_bit_more_and_gradients_a_bit_less() -> None:
    x, gradient = example()
    geo = TransformQuant().geometry(x.shape)
    bits = [bits_for_loss(x, gradient, nats, geo) or 0.0 for nats in (4e-4, 1e-4)]
    assert bits[1] - bits[0] == pytest.approx(1, abs=0.1)
    assert bits_for_loss(x, 2 * gradient, 4e-4, geo) == pytest.approx(bits[1], abs=0.02)
    goal = RateGoal(nats=1e-4)
    rates = [rate(goal.choose(x, gradient)), rate(goal.for_gradients().choose(x, gradient, backward=True))]
    assert 1.1 < rates[0] - rates[1] < 1.35  # a gradient has neither norms nor weights to send
    x[3], gradient[3] = 0, 0
    assert bits_for_loss(x, gradient, 1e-4, geo) == pytest.approx(bits[1], abs=0.1), "a token of zeros does not count"


def test_rates_stay_between_the_least_and_the_most() -> None:
    x, gradient = example()
    least = RateGoal(nats=1e9).choose(x, gradient)
    assert least.nbytes(x.shape) < 0.6 * x.numel() / 8 * 2
    crossed(*ends(least, (ROWS, CHANNELS)), x)
    assert rate(RateGoal(nats=1e-30).choose(x, gradient)) == 16
    more = raised(TransformQuant(bits=1), 0.495), raised(TransformQuant(bits=15.5), 2.0), raised(TransformQuant(), 1.0)
    assert more == (TransformQuant(bits=1.5), TransformQuant(bits=16), TransformQuant())


def test_gradients_by_error_are_measured_themselves() -> None:
    x, gradient = example()
    goal = RateGoal(step="message")
    assert goal.choose(x, gradient, backward=True) == goal.choose(gradient) != goal.choose(x, gradient)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize(("nats", "which"), [(0.01, "all"), (0.01, "gradient"), (None, "all"), (None, "every second")])
def test_tokens_that_tell_nothing_choose_the_rate_of_none(
    nats: float | None, which: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    x, gradient = example()
    {"all": x, "gradient": gradient, "every second": x[1::2]}[which].fill_(bad)
    chosen = rate(RateGoal(nats=nats).choose(x, gradient))
    assert abs(chosen - TransformQuant().bits_per_element(x.shape)) < 0.1
    assert f"it {'' if nats is None else 'or its gradient '}is zeros, or has NaN or Inf" in caplog.text


def test_no_gradient_is_a_warning_and_the_rate_of_none(caplog: pytest.LogCaptureFixture) -> None:
    x, _ = example()
    for goal, backward in ((RateGoal(nats=0.01), False), (RateGoal(), True)):
        chosen = rate(goal.choose(x, backward=backward))
        assert abs(chosen - TransformQuant().bits_per_element(x.shape)) < 0.1
        assert "it had no gradient; using the default, 3 bits and" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("shape", [(1, 600), (300, 1), (1, 1), (2, 5, 7)])
def test_unusual_shapes_get_a_rate(shape: tuple[int, ...]) -> None:
    x, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    crossed(*ends(RateGoal(nats=0.01).choose(x, gradient), shape), x)


def test_a_rate_does_not_depend_on_the_default_dtype() -> None:
    torch.manual_seed(0)
    x = 1e-6 * torch.randn(64, 4) @ torch.randn(4, 64)
    expected = RateGoal().choose(x)
    torch.set_default_dtype(torch.float16)
    try:
        assert RateGoal().choose(x) == expected
    finally:
        torch.set_default_dtype(torch.float32)
