from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_real_activations_come_from_a_file(suffix: str, tmp_path: Path):
    path = tmp_path / f"x{suffix}"
    tensors = {"a": torch.randn(2, 4, 8), "b": torch.randn(6, 8).bfloat16(), "ids": torch.arange(4)}
    if suffix == ".pt":
        torch.save([tensors], path)
    else:
        save_file(tensors, path)
    found = samples.real(str(path), steps=1)
    assert [tuple(x.shape) for x in found] == [(2, 4, 8), (1, 6, 8)]
    assert torch.equal(found[1][0], tensors["b"].float())


def test_a_file_without_activations_is_refused(tmp_path: Path):
    torch.save({"ids": torch.arange(4), "name": "x"}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="no floating tensor with two or more dimensions"):
        samples.real(str(tmp_path / "x.pt"), steps=1)
    with pytest.raises(FileNotFoundError):
        samples.real(str(tmp_path / "y.safetensors"), steps=1)
