"""Plans for each layer: files, models that they are for, and gradients with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.activations import LayerChoice, LayerPlan, compress_saved_, restore_
from lowbit.activations.layer_plan import layers_of
from tests.activations.models import GatedBlock, distance, gradients, hugging_face, loss_of, tokens

BYTE = "GroupInt(bits=8, group=64)"
KEEP, LOW = LayerChoice(), LayerChoice(norm=8, mlp=4, linear=4)
EXACT, SMALL = LayerChoice(checkpoint=True), LayerChoice(checkpoint=True, input=BYTE, norm=8, mlp=8, linear=8)
PLAN = LayerPlan(stages=((KEEP, LOW), (EXACT, SMALL)), rest=LayerChoice(norm=8), group=32, made_for={"model.dim": 64})


def test_what_is_written_is_read(tmp_path: Path):
    PLAN.write(tmp_path / "plan.json")
    assert LayerPlan.read(tmp_path / "plan.json") == PLAN
    assert [str(choice) for stage in PLAN.stages for choice in stage] == [
        "keep", "low-bit 8/4/4", "checkpoint", "checkpoint, input 8, inside 8/8/8",
    ]  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    PLAN.write(folder / "plan.json")
    values = json.loads((folder / "plan.json").read_text()) | changes
    (folder / "plan.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return folder / "plan.json"


LAYER = {"norm": 16, "mlp": 16, "linear": 16, "checkpoint": True, "input": ""}


@pytest.mark.parametrize(("changes", "says"), [
    ({"format": "other"}, "has format 'other'; allowed: 'lowbit plan of saved activations'"),
    ({"version": 1}, "has version 1; this lowbit reads version 2 here"),
    ({"stages": ...}, "it lacks made_for, group, rest or stages"),
    ({"more": 1}, "or has more than these"),
    ({"stages": []}, "stages has 0 stages of 0 layers"),
    ({"stages": [[]]}, "stages has 1 stages of 0 layers"),
    ({"stages": [[LAYER] * 9000]}, "of 9000 layers; allowed"),
    ({"stages": ["keep"]}, "stages has what is no list"),
    ({"stages": [[4]]}, "a layer is 4; allowed: checkpoint, input, linear, mlp, norm"),
    ({"stages": [[{**LAYER, "more": 1}]]}, "a layer is"),
    ({"stages": [[{**LAYER, "norm": 9}]]}, "norm is 9"),
    ({"stages": [[{**LAYER, "checkpoint": 1}]]}, "checkpoint is 1; allowed: bool"),
    ({"stages": [[{**LAYER, "input": "int3000"}]]}, "codec is 'int3000'"),
    ({"stages": [[{**LAYER, "input": "subspace"}]]}, "is not a memory plan"),
    ({"stages": [[{**LAYER, "checkpoint": False, "input": "int8"}]]}, "is not a memory plan"),
    ({"rest": LAYER}, "rest is checkpointed; allowed: bits alone"),
    ({"group": 12}, "group is 12"),
    ({"made_for": {"a": [1]}}, "made_for"),
])  # fmt: skip
def test_other_content_is_one_short_line(tmp_path: Path, changes: dict[str, Any], says: str):
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=says) as caught:
        LayerPlan.read(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert text.isprintable()
    assert len(text) < len(str(path)) + 220


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_runs_with_a_plan_and_comes_back(family: str):
    model, ids = hugging_face(family, 4), tokens()
    exact = gradients(model, loss_of(model, ids))
    with torch.no_grad():
        loss = loss_of(model, ids)
    plan = LayerPlan(stages=((KEEP, LOW, EXACT, SMALL),), rest=LayerChoice(norm=8))
    applied = compress_saved_(model, plan)
    rounded = loss_of(model, ids)
    assert float(rounded.detach()) == pytest.approx(float(loss), rel=1e-5)
    assert 0 < distance(gradients(model, rounded), exact) < 0.05
    kinds = {name.split(".")[2] for name in applied.bits if ".layers." in name or ".h." in name}
    assert kinds == {"1", "3"}
    assert "2 x checkpoint" in repr(applied)
    applied.remove()
    assert distance(gradients(model, loss_of(model, ids)), exact) == 0
    compress_saved_(model, plan)
    restore_(model)
    assert distance(gradients(model, loss_of(model, ids)), exact) == 0


def test_a_plan_for_another_model_is_one_line():
    plan = LayerPlan(stages=((EXACT,) * 3,))
    with pytest.raises(ValueError, match="the plan is for 3 x LlamaDecoderLayer .*; this model has 2 x LlamaDecoder"):
        compress_saved_(hugging_face("llama", 2), plan)
    settings = {"layer": "LlamaDecoderLayer", "layer parameters": 7}
    plan = LayerPlan(stages=((EXACT,) * 2,), made_for=settings)
    with pytest.raises(ValueError, match="2 x LlamaDecoderLayer of 7 parameters; this model has 2 x LlamaDecoderLayer"):
        compress_saved_(hugging_face("llama", 2), plan)
    with pytest.raises(ValueError, match="has no list of layers; allowed: models with their layers in an nn.ModuleL"):
        compress_saved_(nn.Linear(4, 4), plan)


def test_a_model_that_is_compressed_already_stays_as_it_is():
    model = hugging_face("llama", 2)
    compress_saved_(model.model.layers[1], report=False)
    with pytest.raises(ValueError, match="compressed already"):
        compress_saved_(model, LayerPlan(stages=((SMALL, SMALL),)))
    assert "forward" not in vars(model.model.layers[0])


def test_layers_are_the_largest_list_of_one_class():
    model = hugging_face("llama", 3)
    assert [*layers_of(model)] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    plain = nn.Sequential(nn.Embedding(7, 32), GatedBlock(), GatedBlock(), nn.Linear(32, 7))
    assert [*layers_of(plain)] == ["1", "2"]


@pytest.mark.parametrize(("wrong", "says"), [
    ({"norm": 1}, "norm is 1"),
    ({"input": BYTE}, "of a layer that is not checkpointed; allowed: checkpoint=True"),
    ({"checkpoint": "yes"}, "checkpoint is 'yes'; allowed: bool"),
    ({"checkpoint": True, "input": "aq-sgd"}, "a format with state; allowed: formats without"),
])  # fmt: skip
def test_wrong_choices_are_refused(wrong: dict[str, Any], says: str):
    with pytest.raises((TypeError, ValueError), match=says):
        LayerChoice(**wrong)
