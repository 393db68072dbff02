"""Perplexity and errors of sums by hand; windows of a text, of which every token is predicted once."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowbit_lab.evaluate import EvaluationConfig, Sequences, loading, perplexity, score
from lowbit_lab.evaluate.score import SumErrors
from lowbit_run.config import ConfigError


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


def test_logits_are_compared_with_those_of_the_reference(monkeypatch: pytest.MonkeyPatch):
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
    broken = Bigram()
    broken.table[3] = math.nan
    result = perplexity(broken, text, reference=reference)
    assert result.logits_error is not None
    assert math.isnan(result.perplexity + result.loss + result.logits_error)
    monkeypatch.setattr(score, "REMEMBERED", 4 * 16 * 8 * 4)  # one batch of three windows, or the last window of four
    reference = []
    perplexity(Bigram(), text, batch=3, reference=reference)
    assert [len(logits) for logits in reference] == [3], "a batch that is not remembered ends the comparison"
    assert perplexity(Bigram(), text, batch=3, reference=reference).logits_error == 0


def test_errors_of_sums_are_those_of_all_calls():
    errors = SumErrors()
    for scale in (1.0, 3.0):
        parts = [torch.full((4,), scale), torch.full((4,), scale)]
        errors("a", parts, torch.full((4,), 2 * scale + 1))
        errors("b", parts, torch.full((4,), 2 * scale))
    assert errors.relative() == {"a": pytest.approx((8 / 160) ** 0.5), "b": 0.0}
    assert errors.mean() == pytest.approx((8 / 160 / 2) ** 0.5)
    assert SumErrors().mean() is None


def windows_of(count: int, length: int, begin: int | None = None) -> Sequences:
    return Sequences(tokens=np.arange(count, dtype=np.uint8), length=length, begin=begin)


@pytest.mark.parametrize("begin", [None, 200])
@pytest.mark.parametrize("count", [2, 9, 16, 17, 18, 40])
def test_every_token_is_predicted_once_from_the_one_before_it(count: int, begin: int | None):
    windows = windows_of(count, 8, begin)
    batches = list(windows.batches(windows.spread(0), 2))
    predicted = torch.cat([targets.flatten() for _, targets in batches])
    assert sorted(predicted.tolist()) == list(range(0 if begin else 1, count))
    assert windows.predicted == len(predicted)
    for inputs, targets in batches:
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == 8 or len(inputs) == 1
        if begin is None:
            assert (inputs + 1 == targets).all()
        else:
            assert (inputs[:, 0] == begin).all()
            assert (inputs[:, 1:] == targets[:, :-1]).all()


def test_windows_are_spread_over_the_text_or_drawn_by_the_seed(caplog: pytest.LogCaptureFixture):
    windows = windows_of(161, 8)
    assert windows.spread(4) == [0, 5, 10, 15]
    assert windows.spread(100) == list(range(20))
    for count in (0, 20, 21):
        windows.warn_if_fewer(count)
    assert caplog.messages == ["sequences is 21, and text has 20 of 8 tokens: using all of them"]
    first, again, other = ([w.tolist() for w in windows.draw(5, seed)] for seed in (0, 0, 1))
    assert first == again != other
    assert len({w[0].item() for w in windows.draw(50, 0)}) == 20
    assert all(len(w) == 8 and w[0] % 8 == 0 for w in first)
    with pytest.raises(ConfigError, match="text has 8 tokens; allowed: at least one sequence of 8"):
        windows_of(8, 8).draw(1, 0)


def test_the_end_of_the_library_is_held_out():
    settings = EvaluationConfig(model="m", tokenizer="bytes", max_bytes=10**9)
    rest, held_out = (loading.read_text(settings, held_out=held_out)[0].tokens for held_out in (False, True))
    assert len(held_out) / (len(rest) + len(held_out)) == pytest.approx(0.05, abs=1e-4)
    assert rest[-1000:].tobytes() not in held_out.tobytes()


def test_missing_text_and_tokenizers_are_named():
    for setting, error in (
        ({"text": ("nowhere.txt",)}, "'nowhere.txt'"),
        ({"tokenizer": "nowhere"}, "^tokenizer is 'nowhere'; allowed: bytes, or a folder"),
        ({"tokenizer": str(Path(__file__).parent)}, "^tokenizer .* cannot be loaded"),
    ):
        with pytest.raises(ConfigError, match=error):
            loading.read_text(EvaluationConfig(**{"model": "m", "tokenizer": "bytes", **setting}))
