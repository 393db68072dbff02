from functools import partial

import pytest
import torch

from lowbit.train.config import ModelConfig
from lowbit_lab.bench import samples

TINY = ModelConfig(dim=32, layers=3, heads=2)


def kurtosis(x: torch.Tensor) -> float:
    return ((x - x.mean()) ** 4).mean().item() / x.var().item() ** 2


def test_tails_are_as_heavy_as_they_say():
    shape = (2, 100, 800)
    assert kurtosis(samples.drawn("gaussian", shape)) == pytest.approx(3, abs=0.2)
    assert kurtosis(samples.drawn("student-t", shape)) > 10
    outliers = samples.drawn("outliers", shape)
    large = outliers.std((0, 1)) > 10
    assert large.sum() == 4
    assert outliers[..., ~large].std().item() == pytest.approx(1, abs=0.05)


def test_draws_repeat_and_differ_by_seed():
    a, b, c = (samples.drawn("student-t", (2, 8), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    with pytest.raises(ValueError, match=r"kind is 'uniform'; allowed: 'gaussian'"):
        samples.drawn("uniform", (2, 8))


def test_real_activations_come_from_a_model_trained_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples, "ModelConfig", partial(ModelConfig, dim=32, layers=3, heads=2))
    monkeypatch.setattr(samples, "DataConfig", partial(samples.DataConfig, text=(__file__,)))
    monkeypatch.setattr(samples, "SEQUENCE", 32)
    monkeypatch.setattr(samples, "BATCH", 2)
    sent = samples.real("", steps=2)
    assert [tuple(x.shape) for x in sent] == [(2, 32, 32)] * 2
    assert all(x.isfinite().all() and x.std() > 0 for x in sent)


def test_activations_of_no_folder_are_refused():
    with pytest.raises(ValueError, match=r"activations are 'x.pt'; allowed: a folder with a model"):
        samples.real("x.pt", steps=1)
