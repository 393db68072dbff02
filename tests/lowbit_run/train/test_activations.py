"""Saved activations in few bits in a run: by settings, or by a plan's file, which fits on all ranks or is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowbit.activations import LayerAware, LayerChoice, LayerPlan, counted
from lowbit.activations.counting import SavedBytes
from lowbit.wire.pytorch import version
from lowbit_run.train import ConfigError, TrainConfig, from_mapping, trainer
from lowbit_run.train.activations import compress, planned_settings, saved_policies
from lowbit_run.train.config import ActivationsConfig
from lowbit_run.train.metrics import read_metrics
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from tests.lowbit_run.train.runs import again, losses, tiny
from tests.processes import Ranks
from tests.refused import refused


def test_bits_are_one_number_or_one_for_each_stage():
    assert saved_policies(ActivationsConfig(), 2, {}) == (None, None)
    config = from_mapping({"activations": {"bits": 4, "mlp": [3, 16], "rounding": "stochastic"}})
    first, second = saved_policies(config.activations, 2, {})
    assert first == LayerAware(bits=4, mlp=3, rounding="stochastic")
    assert second == LayerAware(bits=4, mlp=16, rounding="stochastic")
    config = ActivationsConfig(bits=(4, 16))  # pyright: ignore
    assert saved_policies(config, 2, {}) == (LayerAware(bits=4), None)


def test_a_split_backward_needs_a_newer_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
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
    for module in Trainer(prepare(config, ranks=1)).model.modules.values():
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

    with mock.patch.object(trainer, "counted", noting):
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


LOW, HIGH = dict.fromkeys(("norm", "mlp", "linear"), 4), {"norm": 8, "mlp": 16, "linear": 16}


def planned(folder: Path, *stages: dict[str, int]) -> TrainConfig:
    """A run of two ranks with a plan that was made for it."""
    config = tiny(folder)
    layout = prepare(config, ranks=2).layout
    plan = LayerPlan.by_stage(stages or (LOW, HIGH), layers=(layout.layer_counts * 2)[: len(stages) or 2], group=32)
    settings = planned_settings(config, layout, 256)
    replace(plan, made_for=settings).write(folder / "plan.json")
    return again(config, activations={"plan": str(folder / "plan.json")})


def test_stages_get_the_bits_of_the_plan(tmp_path: Path):
    config = planned(tmp_path)
    first, second = prepare(config, ranks=2).activations
    assert first == LayerAware(bits=16, **LOW, attention=16, group=32)
    assert second == LayerAware(bits=16, **HIGH, attention=16, group=32)
    stochastic = again(config, activations={"rounding": "stochastic"})
    assert prepare(stochastic, ranks=2).activations[0] == replace(first, rounding="stochastic")
    whole = planned(tmp_path, LOW, dict.fromkeys(LOW, 16))
    assert prepare(whole, ranks=2).activations[1] is None


def planned_by_layer(folder: Path, *stages: tuple[LayerChoice, ...]) -> TrainConfig:
    config = tiny(folder)
    settings = planned_settings(config, prepare(config, ranks=2).layout, 256)
    LayerPlan(stages=stages, made_for=settings).write(folder / "plan.json")
    return again(config, activations={"plan": str(folder / "plan.json")})


KEEP, EXACT = LayerChoice(), LayerChoice(checkpoint=True)
SMALL = LayerChoice(checkpoint=True, input="GroupInt(bits=8, group=64)", norm=8, mlp=4, linear=4)


def test_a_run_keeps_of_each_layer_what_is_planned(ranks: Ranks, tmp_path: Path):
    config = planned_by_layer(tmp_path / "one", (SMALL, EXACT), (KEEP, EXACT))
    plain = ranks.run(losses, again(config, activations={"plan": ""}))[0]
    exact = planned_by_layer(tmp_path / "two", (EXACT, EXACT), (KEEP, EXACT))
    assert ranks.run(losses, exact)[0] == pytest.approx(plain, abs=1e-5)
    few = ranks.run(losses, config)[0]
    assert few[0] == pytest.approx(plain[0], abs=2e-3)
    assert few[-1] == pytest.approx(plain[-1], abs=0.05)
    one, two = (prepare(c, ranks=2).identity["activations.layers"] for c in (config, exact))
    assert one != two
    assert prepare(tiny(tmp_path), ranks=2).identity["activations.layers"] is None


def test_a_plan_for_another_run_is_one_line(tmp_path: Path):
    config, other = planned(tmp_path / "two"), tmp_path / "other.json"
    other.write_text('{"format": "lowbit plan of saved activations", "version": 9}')
    three = planned(tmp_path / "three", LOW, LOW, HIGH).activations.plan
    layers = prepare(planned_by_layer(tmp_path / "layers", (KEEP, KEEP), (KEEP, EXACT)), ranks=2).activations[0]
    module = torch.nn.Sequential(torch.nn.Linear(8, 8))
    says = {
        r"activations\.bits is \(4,\) and activations\.plan is '.*'; allowed: one of the": {"activations": {"bits": 4}},
        r"activations\.mlp is \(4, 4\) and activations\.plan is": {"activations": {"mlp": [4, 4]}},
        r"activations\.group is 128 and activations\.plan is": {"activations": {"group": 128}},
        r"\.plan: nowhere\.json cannot be read: No such file": {"activations": {"plan": "nowhere.json"}},
        r"plan\.json has bits for 3 stages; this run has 2": {"activations": {"plan": three}},
        r"other\.json has version 9; allowed: 3": {"activations": {"plan": str(other)}},
        r"plan\.json was made for model\.dim 32; here it is 64; allowed: what `lowbit plan": {"model": {"dim": 64}},
        r"was made for model\.family 'llama'; here it is 'gpt2'": {"model": {"family": "gpt2"}},
        r"was made for data\.sequence 16; here it is 32": {"data": {"sequence": 32}},
        r"was made for samples of a micro-batch 2; here it is 4": {"data": {"batch": 16}},
        r"was made for pipeline\.schedule '1F1B'; here it is 'GPipe'": {"pipeline": {"schedule": "GPipe"}},
        r"was made for gradients\.storage 'fp32'; here it is .BlockFloat8": {"gradients": {"storage": "fp8"}},
    }
    texts = refused(
        *((lambda c=c: prepare(again(config, **c), ranks=2), ConfigError, text) for text, c in says.items()),
        (
            lambda: compress(module, layers, torch.device("cpu")), ConfigError,
            "plan does not fit this run: the plan is for 2 x .* this model has 1 x Linear of 72",
        ),
    )  # fmt: skip
    assert not any("\n" in text for text in texts)


def test_a_resume_knows_a_plan_by_its_bits(tmp_path: Path):
    config = planned(tmp_path / "one")
    moved = planned(tmp_path / "two")
    other = planned(tmp_path / "three", HIGH, HIGH)
    by_hand = {kind: [LOW[kind], HIGH[kind]] for kind in LOW} | {"plan": "", "group": 32, "attention": 16}
    same = again(config, activations=by_hand)
    one, two, three, four = (prepare(c, ranks=2).identity for c in (config, moved, same, other))
    assert {key for key in one if one[key] != two[key] or one[key] != three[key]} <= {"data.text"}
    assert one["activations.norm"] != four["activations.norm"]


def train_with_own_file(config: TrainConfig, folders: list[str]) -> list[float]:
    """Train as a rank whose plan lies in a folder of its own."""
    path = Path(folders[dist.get_rank()]) / "plan.json"
    return losses(again(config, activations={"plan": str(path)}))


def test_ranks_with_other_bits_do_not_begin(ranks: Ranks, tmp_path: Path):
    config = planned(tmp_path / "one")
    planned(tmp_path / "two", HIGH, HIGH)
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for outcome in ranks.outcomes(train_with_own_file, config, folders):
        assert outcome.kind == "AgreementError"
        assert "saved activations: {'bits': [16], 'norm': [4, 8]" in outcome.text
    planned(tmp_path / "two")
    first, second = ranks.run(train_with_own_file, config, folders)
    assert first == second
