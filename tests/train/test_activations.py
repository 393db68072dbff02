from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from lowbit.activations import LayerAware, counted
from lowbit.activations.counting import SavedBytes
from lowbit.train import ConfigError, TrainConfig, from_mapping, trainer
from lowbit.train.activations import saved_policies
from lowbit.train.config import ActivationsConfig
from lowbit.train.metrics import read_metrics
from lowbit.train.prepare import prepare
from lowbit.train.trainer import Trainer
from lowbit.wire.pytorch import version
from tests.processes import Ranks
from tests.train.runs import again, losses, tiny


def test_bits_are_one_number_or_one_for_each_stage():
    assert saved_policies(ActivationsConfig(), 2, {}) == (None, None)
    config = from_mapping({"activations": {"bits": 4, "mlp": [3, 16], "rounding": "stochastic"}})
    first, second = saved_policies(config.activations, 2, {})
    assert first == LayerAware(bits=4, mlp=3, rounding="stochastic")
    assert second == LayerAware(bits=4, mlp=16, rounding="stochastic")
    config = ActivationsConfig(bits=(4, 16))  # pyright: ignore
    assert saved_policies(config, 2, {}) == (LayerAware(bits=4), None)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_a_split_backward_needs_a_newer_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str):
    config = tiny(tmp_path, pipeline={"stages_per_rank": 2, "schedule": schedule}, activations={"bits": 4})
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    prepare(config, ranks=2)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    prepare(again(config, activations={"bits": 16}), ranks=2)
    prepare(again(config, pipeline={"schedule": "Interleaved1F1B"}), ranks=2)
    with pytest.raises(ConfigError, match=f"schedule is '{schedule}'; .* 2.13 .*, here is 2.12.1"):
        prepare(config, ranks=2)


def compressed(config: TrainConfig) -> list[set[int]]:
    """Bits of each stage of a rank."""
    found = []
    for module in Trainer(prepare(config, ranks=1)).modules.values():
        layers = [vars(m)["_lowbit_saved"] for m in module.modules() if "_lowbit_saved" in vars(m)]
        found.append({layer.shared.codec(layer.kind, layer.name).bits for layer in layers if layer.kind})
    return found


def test_each_stage_gets_its_own_bits(ranks: Ranks, tmp_path: Path):
    pipeline = {"ranks": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}
    config = tiny(tmp_path, pipeline=pipeline, activations={"bits": [3, 8]})
    assert ranks.run(compressed, config, ranks=1) == [[{3, 8}, {8}]]


def losses_and_bytes(config: TrainConfig) -> tuple[list[float], int]:
    """Train as a rank; its losses, and what autograd saved on it at most."""
    counts: list[SavedBytes] = []

    @contextmanager
    def noting(model: nn.Module) -> Iterator[SavedBytes]:
        with counted(model) as saved:
            counts.append(saved)
            yield saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "counted", noting)
        found = losses(config)
    (only,) = counts
    return found, only.total


def test_a_pipeline_learns_with_few_bits_what_it_learns_without(ranks: Ranks, tmp_path: Path):
    schedule = "InterleavedZeroBubble" if version() >= (2, 13) else "Interleaved1F1B"
    pipeline = {"stages_per_rank": 2, "schedule": schedule}
    config = tiny(tmp_path, pipeline=pipeline, gradients={"storage": "fp8"}, run={"precision": "bf16"})
    plain = ranks.run(losses, config)[0]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["bytes_activations"] is None
    (few, first), (_, second) = ranks.run(losses_and_bytes, again(config, activations={"bits": 4}))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first != second
    assert {line["bytes_activations"] for line in lines} == {max(first, second)}
    # For each of 64 tokens of a stage's micro-batches in flight, a payload of 32 channels at least.
    assert 10_000 < lines[0]["bytes_activations"] < 200_000
    assert few[0] == pytest.approx(plain[0], abs=2e-3)  # before any backward
    assert few[1:] != plain[1:]
    assert few[-1] == pytest.approx(plain[-1], abs=0.05)
    assert few[-1] < few[0] - 0.02
