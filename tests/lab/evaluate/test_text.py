"""Windows: every token is predicted once, what is drawn depends on the seed alone, the library's end is held out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowbit.config import ConfigError
from lowbit_lab.evaluate import EvaluationConfig, Sequences, loading


def sequences(count: int, length: int, begin: int | None = None) -> Sequences:
    return Sequences(tokens=np.arange(count, dtype=np.uint8), length=length, begin=begin)


@pytest.mark.parametrize("begin", [None, 200])
@pytest.mark.parametrize("count", [2, 9, 16, 17, 18, 40])
def test_every_token_is_predicted_once_from_the_one_before_it(count: int, begin: int | None):
    windows = sequences(count, 8, begin)
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


def test_windows_are_spread_over_the_text():
    windows = sequences(161, 8)
    assert windows.spread(4) == [0, 5, 10, 15]
    assert windows.spread(100) == list(range(20))


def test_fewer_windows_than_asked_for_are_logged(caplog: pytest.LogCaptureFixture):
    for count in (0, 20, 21):
        sequences(161, 8).warn_if_fewer(count)
    assert [r.getMessage() for r in caplog.records] == [
        "sequences is 21, and text has 20 of 8 tokens: using all of them"
    ]


def test_draws_are_different_windows_that_the_seed_decides():
    windows = sequences(81, 8)
    first, again, other = windows.draw(5, 0), windows.draw(5, 0), windows.draw(5, 1)
    assert [w.tolist() for w in first] == [w.tolist() for w in again]
    assert [w.tolist() for w in first] != [w.tolist() for w in other]
    assert len({w[0].item() for w in windows.draw(50, 0)}) == 10
    assert all(len(w) == 8 and w[0] % 8 == 0 for w in first)


def test_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ConfigError, match="text has 8 tokens; allowed: at least one sequence of 8"):
        sequences(8, 8).draw(1, 0)


def test_the_end_of_the_library_is_held_out():
    settings = EvaluationConfig(model="m", tokenizer="bytes", max_bytes=10**9)
    rest, held_out = (loading.read_text(settings, held_out=held_out)[0].tokens for held_out in (False, True))
    assert len(held_out) / (len(rest) + len(held_out)) == pytest.approx(0.05, abs=1e-4)
    assert rest[-1000:].tobytes() not in held_out.tobytes()


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"text": ("nowhere.txt",)}, "'nowhere.txt'"),
        ({"tokenizer": "nowhere"}, "^tokenizer is 'nowhere'; allowed: bytes, or a folder"),
        ({"tokenizer": str(Path(__file__).parent)}, "^tokenizer .* cannot be loaded"),
    ],
)
def test_missing_text_and_tokenizers_are_named(setting: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        loading.read_text(EvaluationConfig(**{"model": "m", "tokenizer": "bytes", **setting}))
