"""Perplexity against a slow, obvious computation; errors of logits and of sums; NaN is seen."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowbit_lab.evaluate import Sequences, perplexity, score
from lowbit_lab.evaluate.score import SumErrors


class Bigram(nn.Module):
    """Logits that depend on the token alone."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(16, 16, generator=generator)
        self.table = self.table + noise * torch.randn(16, 16, generator=generator)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[ids])


def some_text(length: int) -> Sequences:
    tokens = np.random.default_rng(0).integers(0, 16, 101).astype(np.uint8)
    return Sequences(tokens=tokens, length=length)


@pytest.mark.parametrize("batch", [1, 3])
def test_it_is_that_of_every_token_by_hand(batch: int):
    text, model = some_text(8), Bigram()
    logs = torch.log_softmax(model.table.double(), -1)
    losses = [-logs[a, b].item() for a, b in zip(text.tokens[:-1], text.tokens[1:], strict=True)]
    result = perplexity(model, text, batch=batch)
    assert result.tokens == len(losses) == 100
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.loss))


def test_logits_are_compared_with_those_of_the_reference():
    text, reference = some_text(8), []
    first = perplexity(Bigram(), text, reference=reference)
    again = perplexity(Bigram(), text, reference=reference)
    other = perplexity(Bigram(noise=0.1), text, reference=reference)
    assert first.logits_error is None
    assert again.logits_error == 0.0
    assert again.logits == first.logits != other.logits
    difference = Bigram(0.1).table - Bigram().table
    rows = torch.from_numpy(text.tokens[:-1].astype(np.int64))
    truth = Bigram().table[rows]
    expected = difference[rows].norm() / (truth - truth.mean(-1, keepdim=True)).norm()
    assert other.logits_error == pytest.approx(expected.item(), rel=1e-4)


def test_a_batch_that_is_not_remembered_ends_the_comparison(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(score, "REMEMBERED", 4 * 16 * 8 * 4)  # one batch of three windows, or the last window of four
    text, reference = some_text(8), []
    perplexity(Bigram(), text, batch=3, reference=reference)
    assert [len(logits) for logits in reference] == [3]
    assert perplexity(Bigram(), text, batch=3, reference=reference).logits_error == 0


def test_nan_is_seen():
    model, reference = Bigram(), []
    perplexity(model, some_text(8), reference=reference)
    model.table[3] = math.nan
    result = perplexity(model, some_text(8), reference=reference)
    assert result.logits_error is not None
    assert math.isnan(result.perplexity + result.loss + result.logits_error)


def test_errors_of_sums_are_those_of_all_calls():
    errors = SumErrors()
    for scale in (1.0, 3.0):
        parts = [torch.full((4,), scale), torch.full((4,), scale)]
        errors("a", parts, torch.full((4,), 2 * scale + 1))
        errors("b", parts, torch.full((4,), 2 * scale))
    assert errors.relative() == {"a": pytest.approx((8 / 160) ** 0.5), "b": 0.0}
    assert errors.mean() == pytest.approx((8 / 160 / 2) ** 0.5)
    assert SumErrors().mean() is None
