"""Plans of memory: files, models that they are for, and gradients with them."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lowbit.activations import LayerAware, LayerChoice, LayerPlan, compress_saved_, restore_
from lowbit.activations.layer_plan import layers_of
from tests.lowbit.activations.models import GatedBlock, distance, gradients, hugging_face, loss_of, tokens

BYTE = "GroupInt(bits=8, group=64)"
KEEP, LOW = LayerChoice(), LayerChoice(norm=8, mlp=4, linear=4)
EXACT, SMALL = LayerChoice(checkpoint=True), LayerChoice(checkpoint=True, input=BYTE, norm=8, mlp=8, linear=8)
PLAN = LayerPlan(
    stages=((KEEP, LOW), (EXACT, SMALL)), rest=(LayerChoice(norm=8), KEEP), group=32,
    made_for={"model.dim": 64, "model.tied": None},
)  # fmt: skip
BITS = {"norm": 8, "mlp": 3, "linear": 16}


def test_what_is_written_is_read(tmp_path: Path):
    for plan in (PLAN, LayerPlan.by_stage((BITS, BITS), layers=(1, 2))):
        plan.write(tmp_path / "plan.json")
        assert LayerPlan.read(tmp_path / "plan.json") == plan
    assert os.listdir(tmp_path) == ["plan.json"]
    assert [str(choice) for stage in PLAN.stages for choice in stage] == [
        "keep", "low-bit 8/4/4", "checkpoint", "checkpoint, input 8, inside 8/8/8",
    ]  # fmt: skip


def test_a_plan_by_stage_has_policies():
    plan = LayerPlan.by_stage((BITS, dict.fromkeys(BITS, 16)), layers=(2, 1), group=32)
    assert plan.is_by_stage
    assert plan.policy(0) == LayerAware(**BITS, attention=16, group=32)
    assert plan.policy(1, rounding="stochastic").rounding == "stochastic"
    with pytest.raises(ValueError, match="stage is 2; allowed: 0 to 1"):
        plan.policy(2)
    assert not PLAN.is_by_stage
    assert not LayerPlan(stages=((LOW,),)).is_by_stage, "modules outside its layers are left as they are"
    with pytest.raises(ValueError, match="stage is 1, whose layers differ; allowed: a stage with the same bits"):
        PLAN.policy(1)
    assert LayerPlan(stages=((KEEP, KEEP),)).policy(0).attention == 16, "nothing is coded"


def test_a_plan_by_stage_codes_what_its_policy_codes():
    ids = tokens()
    found = []
    for by_policy in (True, False):
        model = hugging_face("llama", 2)
        plan = LayerPlan.by_stage((dict.fromkeys(BITS, 8), BITS), layers=(1, 2))
        if by_policy:
            compress_saved_(model, plan.policy(1))
        else:
            applied = plan.apply_(model, stage=1)
            assert applied.bits["model.norm"] == ("norm", 8)
        found.append(gradients(model, loss_of(model, ids)))
    assert distance(*found) == 0


LAYER = {"norm": 16, "mlp": 16, "linear": 16, "attention": None, "checkpoint": True, "input": ""}


def test_other_content_is_one_short_line(tmp_path: Path):
    path = tmp_path / "plan.json"
    PLAN.write(path)
    values = json.loads(path.read_text())
    for changes, says in (
        ({"format": "other"}, "has format 'other'; allowed: 'lowbit plan of saved activations'"),
        ({"format": "\x1b[2J" + "x" * 999}, f"has format '\\x1b[2J{'x' * 50}"),
        ({"version": 2}, "has version 2; allowed: 3"),
        ({"version": [1]}, "has version [1]; allowed"),
        ({"stages": ...}, "it lacks made_for, group, rest or stages"),
        ({"stages": {"0": [LAYER]}}, "it lacks made_for, group, rest or stages"),
        ({"made_for": [1]}, "it lacks made_for"),
        ({"more": 1}, "or has more than these"),
        ({"stages": []}, "stages has 0 stages of 0 layers"),
        ({"stages": [[]]}, "stages has 1 stages of 0 layers"),
        ({"stages": [[LAYER] * 9000]}, "of 9000 layers; allowed"),
        ({"stages": ["keep"]}, "a layer is 'keep'; allowed"),
        ({"stages": [[4]]}, "a layer is 4; allowed: attention, checkpoint, input, linear, mlp, norm"),
        ({"stages": [[{**LAYER, "more": 1}]]}, "a layer is"),
        ({"stages": [[{**LAYER, "norm": 9}]]}, "norm is 9"),
        ({"stages": [[{**LAYER, "norm": [8]}]]}, "norm is [8]"),
        ({"stages": [[{**LAYER, "mlp": 4.0}]]}, "mlp is 4.0; allowed"),
        ({"stages": [[{**LAYER, "mlp": True}]]}, "mlp is True; allowed"),
        ({"stages": [[{**LAYER, "mlp": 10**4000}]]}, "is not a memory plan"),
        ({"stages": [[{**LAYER, "attention": 1}]]}, "attention is 1"),
        ({"stages": [[{**LAYER, "checkpoint": 1}]]}, "checkpoint is 1; allowed: bool"),
        ({"stages": [[{**LAYER, "input": "int3000"}]]}, "codec is 'int3000'"),
        ({"stages": [[{**LAYER, "input": "transform"}]]}, "a format with state; allowed: formats without"),
        ({"stages": [[{**LAYER, "checkpoint": False, "input": "int8"}]]}, "of a layer that is not checkpointed"),
        ({"rest": [LAYER, LAYER]}, "rest is "),
        ({"rest": [{**LAYER, "checkpoint": False}]}, "rest is "),
        ({"group": 12}, "group is 12"),
        ({"group": "64"}, "group is '64'"),
        ({"made_for": {"a": "x" * 999}}, "is not a memory plan: made_for"),
        ({"made_for": {"a": [1]}}, "is not a memory plan: made_for"),
    ):  # fmt: skip
        path.write_text(json.dumps({k: v for k, v in (values | changes).items() if v is not ...}))
        with pytest.raises(ValueError, match=re.escape(says)) as caught:
            LayerPlan.read(path)
        text = str(caught.value)
        assert text.startswith(str(path))
        assert text.isprintable()
        assert len(text) < len(str(path)) + 220


def test_other_bytes_are_one_line(tmp_path: Path):
    for data, says in (
        (b"", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"version": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[]", "does not hold a JSON object"),
        (b" " * (1 << 23), "it has more than 4 MiB"),
    ):
        (tmp_path / "plan.json").write_bytes(data)
        with pytest.raises(ValueError, match=says):
            LayerPlan.read(tmp_path / "plan.json")
    os.mkfifo(tmp_path / "pipe")
    for name, says in (
        ("pipe", "cannot be read: it is not a regular"),
        ("", "is not a regular"),
        ("none", "be read: No such"),
    ):
        with pytest.raises(ValueError, match=says):
            LayerPlan.read(tmp_path / name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_runs_with_a_plan_and_comes_back(family: str):
    model, ids = hugging_face(family, 4), tokens()
    exact = gradients(model, loss_of(model, ids))
    with torch.no_grad():
        loss = loss_of(model, ids)
    plan = LayerPlan(stages=((KEEP, LOW, EXACT, SMALL),), rest=(LayerChoice(norm=8),))
    applied = compress_saved_(model, plan)
    rounded = loss_of(model, ids)
    assert float(rounded.detach()) == pytest.approx(float(loss), rel=1e-5)
    assert 0 < distance(gradients(model, rounded), exact) < 0.05
    kinds = {name.split(".")[2] for name in applied.bits if ".layers." in name or ".h." in name}
    assert kinds == {"1", "3"}
    assert any(name.endswith(("model.norm", "ln_f")) for name in applied.bits)
    assert str(applied).splitlines()[-1].split()[:3] == ["checkpoint", "input", "2"]
    applied.remove()
    assert distance(gradients(model, loss_of(model, ids)), exact) == 0
    compress_saved_(model, plan)
    restore_(model)
    assert distance(gradients(model, loss_of(model, ids)), exact) == 0


def test_a_plan_that_does_not_fit_changes_nothing():
    model, coded = hugging_face("llama", 2), hugging_face("llama", 2)
    compress_saved_(coded.model.layers[1])
    three, other = LayerPlan(stages=((EXACT,) * 3,)), {"layer": "LlamaDecoderLayer", "layer parameters": 7}
    two, seven = (LayerPlan(stages=((SMALL,) * 2,), made_for=settings) for settings in ({}, other))
    for layers, plan, says in (
        (model, three, "the plan is for 3 x LlamaDecoderLayer .*; this model has 2 x LlamaDecoder"),
        (model, seven, "2 x LlamaDecoderLayer of 7 parameters; this model has 2 x LlamaDecoderLayer"),
        (nn.Linear(4, 4), two, "has no list of layers; allowed: models with their layers in an nn.ModuleL"),
        (coded, two, "compressed already"),
    ):
        with pytest.raises(ValueError, match=says):
            compress_saved_(layers, plan)
    assert not any("forward" in vars(each.model.layers[0]) for each in (model, coded))


def test_layers_are_the_largest_list_of_one_class():
    model = hugging_face("llama", 3)
    assert [*layers_of(model)] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    plain = nn.Sequential(nn.Embedding(7, 32), GatedBlock(), GatedBlock(), nn.Linear(32, 7))
    assert [*layers_of(plain)] == ["1", "2"]
