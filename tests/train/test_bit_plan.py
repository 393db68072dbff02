"""A plan's file in a run: what fits is in effect, anything else is one line, and all ranks have the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.activations import LayerAware, LayerChoice, LayerPlan
from lowbit.train import ConfigError, TrainConfig
from lowbit.train.activations import compress, planned_settings
from lowbit.train.prepare import prepare
from tests.processes import Ranks
from tests.train.runs import again, losses, tiny

LOW, HIGH = dict.fromkeys(("norm", "mlp", "linear"), 4), {"norm": 8, "mlp": 16, "linear": 16}


def planned(folder: Path, *stages: dict[str, int], **sections: dict[str, Any]) -> TrainConfig:
    """A run of two ranks with a plan that was made for it."""
    config = tiny(folder, **sections)
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


@pytest.mark.parametrize(("changes", "says"), [
    ({"activations": {"bits": 4}}, r"activations\.bits is \(4,\) and activations\.plan is '.*'; allowed: one of the"),
    ({"activations": {"mlp": [4, 4]}}, r"activations\.mlp is \(4, 4\) and activations\.plan is"),
    ({"activations": {"group": 128}}, r"activations\.group is 128 and activations\.plan is"),
    ({"activations": {"plan": "nowhere.json"}}, r"activations\.plan: nowhere\.json cannot be read: No such file"),
    ({"model": {"dim": 64}}, r"plan\.json was made for model\.dim 32; here it is 64; allowed: what `lowbit plan"),
    ({"model": {"family": "gpt2"}}, r"was made for model\.family 'llama'; here it is 'gpt2'"),
    ({"data": {"sequence": 32}}, r"was made for data\.sequence 16; here it is 32"),
    ({"data": {"batch": 16}}, r"was made for samples of a micro-batch 2; here it is 4"),
    ({"pipeline": {"schedule": "GPipe"}}, r"was made for pipeline\.schedule '1F1B'; here it is 'GPipe'"),
    ({"gradients": {"storage": "fp8"}}, r"was made for gradients\.storage 'fp32'; here it is .BlockFloat8"),
])  # fmt: skip
def test_a_plan_for_another_run_is_one_line(tmp_path: Path, changes: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        prepare(again(planned(tmp_path), **changes), ranks=2)
    assert "\n" not in str(caught.value)


def planned_by_layer(folder: Path, *stages: tuple[LayerChoice, ...], **made_for: Any) -> TrainConfig:
    config = tiny(folder)
    settings = planned_settings(config, prepare(config, ranks=2).layout, 256) | made_for
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


def test_a_plan_for_other_layers_is_one_line(tmp_path: Path):
    config = planned_by_layer(tmp_path, (KEEP, KEEP), (KEEP, EXACT))
    module = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(
        ConfigError, match=r"plan does not fit this run: the plan is for 2 x .* this model has 1 x Linear of 72"
    ):
        compress(module, prepare(config, ranks=2).activations[0], torch.device("cpu"))


def test_a_plan_for_other_stages_is_one_line(tmp_path: Path):
    config = planned(tmp_path, LOW, LOW, HIGH)
    with pytest.raises(ConfigError, match="plan.json has bits for 3 stages; this run has 2"):
        prepare(config, ranks=2)
    (tmp_path / "plan.json").write_text('{"format": "lowbit plan of saved activations", "version": 9}')
    with pytest.raises(ConfigError, match="plan.json has version 9; allowed: 3"):
        prepare(config, ranks=2)


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
    import torch.distributed as dist

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
