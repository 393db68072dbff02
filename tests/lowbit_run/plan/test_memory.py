"""`lowbit plan memory`, and a run with its bits; that its bytes are real is checked in test_held.py."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lowbit.activations import LayerAware, LayerPlan, compress_saved_
from lowbit.activations.layer_plan import PLANNED
from lowbit_run.config import build
from lowbit_run.plan.memory import COMMAND, MemorySettings, StageMeter, sample_model
from lowbit_run.plan.sizes import parse_bytes
from lowbit_run.report import execute, run
from lowbit_run.train import TrainConfig
from lowbit_run.train.activations import planned_settings
from lowbit_run.train.config import GradientsConfig, OptimizerConfig
from lowbit_run.train.footprint import model_bytes
from lowbit_run.train.model import StageModule, build_model
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from tests.command_line import invoke
from tests.lowbit_run.train import runs
from tests.lowbit_run.train.test_footprint import saved
from tests.processes import Ranks
from tests.refused import refused

TINY: dict[str, Any] = {
    "pipeline": {"ranks": 2, "microbatches": 2},
    "data": {"sequence": 32, "batch": 2, "max_bytes": 20_000},
    "model": {"dim": 64, "layers": 5, "heads": 2},
    "error_tokens": 32,
    "error_steps": 1,
}


def tiny(**changes: Any) -> MemorySettings:
    nested = {key: {**TINY.get(key, {}), **value} for key, value in changes.items() if isinstance(value, dict)}
    return build(MemorySettings, TINY | changes | nested)


def test_a_plan_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, bits = tmp_path / "rows.json", tmp_path / "plan.json"
    execute(COMMAND, tiny(out=str(bits)), json=file)
    assert "relative error of the gradient" in capsys.readouterr().out
    report = json.loads(file.read_text())
    first, last = report["rows"]
    assert (report["command"], first["layers"], last["layers"]) == ("plan memory", 3, 2)
    assert (first["held"], last["held"]) == (2, 1)
    assert first["saved_bytes"] <= first["int4_bytes"] < first["bf16_bytes"] / 2
    assert last["mlp"] >= first["mlp"]
    activation, logits = 4 * 32 * 64, 2 * 32 * 256  # float32 between stages, bfloat16 from the output matrix
    assert first["pipeline_bytes"] == 2 * activation  # outputs held
    assert last["pipeline_bytes"] == logits + activation  # and its inputs
    for row in (first, last):
        assert row["device_bytes"] == sum(row[f"{what}_bytes"] for what in ("fixed", "saved", "pipeline"))
    assert max(first["device_bytes"], last["device_bytes"]) <= first["budget"]
    assert first["error_all"] < first["error_int4"]
    plan = LayerPlan.read(bits)
    of_stages = LayerPlan.by_stage([{kind: row[kind] for kind in PLANNED} for row in (first, last)], layers=(3, 2))
    assert (plan.stages, plan.rest) == (of_stages.stages, of_stages.rest)
    assert plan.made_for["pipeline.ranks"] == 2
    with pytest.raises(ValueError, match="cannot be written: it is a folder"):
        run(COMMAND, tiny(out=str(tmp_path)))
    for name, given in {"out": {"out": str(file)}, "file": {}}.items():
        file.write_text("{}")
        with pytest.raises(ValueError, match="holds no plan; allowed: a new file" if name == "out" else "rows.json"):
            execute(COMMAND, tiny(**given), json=None if name == "out" else file)
        assert file.read_text() == "{}", "what is not lowbit's stays"


@pytest.mark.slow
def test_each_layer_is_planned_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, out = tmp_path / "rows.json", tmp_path / "plan.json"
    settings = tiny(by="layer", repeats=1, out=str(out))
    execute(COMMAND, settings, json=file)
    assert "What each layer keeps" in capsys.readouterr().out
    plan = LayerPlan.read(out)
    rows = json.loads(file.read_text())["rows"]
    assert [row["layers"] for row in rows] == [len(stage) for stage in plan.stages] == [3, 2]
    assert max(row["device_bytes"] for row in rows) <= rows[0]["budget"]
    assert all(row["error"] <= settings.max_error for row in rows)
    model = build_model(settings.model, vocab=settings.vocab, sequence=32, seed=0)
    stage = StageModule(model, layers=range(3), first=True, last=False).train()
    compress_saved_(stage, LayerPlan(stages=plan.stages[:1], made_for=plan.made_for))
    stage(torch.zeros(1, 32, dtype=torch.int64)).sum().backward()


def test_stages_of_bfloat16_weights_can_be_planned():
    rows = run(COMMAND, tiny(weights="bf16", group=32, model={"layers": 2})).rows
    activation, logits = 2 * 32 * 64, 2 * 32 * 256
    assert [row["pipeline_bytes"] for row in rows] == [2 * activation, logits + activation]


def test_gradients_and_optimizer_in_8_bits_take_less():
    small = tiny(gradients={"storage": "fp8"}, optimizer="adamw-8bit")
    wide, narrow = (StageMeter(s).stage(s.layout, 0)[0].fixed for s in (tiny(), small))
    assert narrow / wide == pytest.approx((4 + 1.01 + 2.03) / 16, rel=0.02)


def test_frozen_weights_have_no_gradients_and_no_states(tmp_path: Path):
    folder = saved("llama", tmp_path, vocab_size=256)
    settings = tiny(model={"pretrained": folder}, lora={"rank": 2})
    layout, meter = settings.layout, StageMeter(settings)
    kept = [model_bytes(settings.recipe, vocab=256, autocast=torch.bfloat16).rank(layout, rank) for rank in range(2)]
    fixed = [meter.stage(layout, stage)[0].fixed for stage in range(2)]
    assert fixed == [one.weights + 4 * one.adapters for one in kept]


def test_agoq_by_name_is_8_bits_for_both_and_a_plan_that_its_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = str(tmp_path / "plan.json")
    by_name, by_hand = tiny(method="agoq", out=out), tiny(gradients={"storage": "fp8"}, optimizer="adamw-8bit")
    assert (by_name.gradients, by_name.optimizer) == (by_hand.gradients, by_hand.optimizer)
    run(COMMAND, by_name)
    same = {name: TINY[name] for name in ("pipeline", "data")} | {"model": TINY["model"] | {"ffn": 0}}
    config = runs.tiny(tmp_path, **same, activations={"plan": out}, run={"method": "agoq"})
    monkeypatch.setattr("lowbit_run.train.prepare.check_torchao", lambda: None)
    policies = prepare(config, ranks=2).activations
    assert all(policy is None or (isinstance(policy, LayerAware) and policy.attention == 16) for policy in policies)
    plain = {"run": replace(config.run, method="none"), "gradients": GradientsConfig(), "optimizer": OptimizerConfig()}
    with pytest.raises(ValueError, match="activations.plan: .* was made for gradients.storage|for optimizer"):
        prepare(replace(config, **plain), ranks=2)


@pytest.mark.slow
def test_dropout_saves_masks_but_does_not_blur_errors():
    gpt2 = {"family": "gpt2", "layers": 2}
    plain, dropping = (run(COMMAND, tiny(model={**gpt2, "dropout": p})).rows[0] for p in (0.0, 0.1))
    assert dropping["int4_bytes"] > plain["int4_bytes"]
    assert dropping["error_int4"] == plain["error_int4"]


def test_errors_are_of_one_short_sample():
    with mock.patch("lowbit_run.plan.memory.model_loss") as loss:
        sample_model(tiny())[1]()
    assert loss.call_args.args[1].shape == (1, 32)


def test_budgets_are_written_with_their_unit():
    texts = {"24gb": 24 * 10**9, "1.5 GiB": 3 << 29, "800mb": 8 * 10**8, "123": 123}
    assert {text: parse_bytes(text) for text in texts} == texts


def test_wrong_settings_are_refused():
    rows: list[tuple[dict[str, Any], str]] = [
        ({"budget": "much"}, "budget is 'much'; allowed: bytes, such as 24gb"),
        ({"budget": "1.2.3gb"}, "budget is '1.2.3gb'"),
        ({"pipeline": {"ranks": 16, "microbatches": 16}, "data": {"batch": 16}}, "the pipeline has 16 stages"),
        ({"pipeline": {"schedule": "2F2B"}}, "pipeline.schedule is '2F2B'"),
        ({"data": {"batch": 3}}, "data.batch is 3; allowed: a multiple of pipeline.microbatches"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; allowed: adamw, adamw-8bit"),
        ({"method": "agoc"}, "method is 'agoc'; allowed: none, agoq"),
        ({"method": "agoq", "by": "layer"}, "by is 'layer', .* and method is 'agoq'; allowed: stage"),
        ({"method": "agoq", "gradients": {"storage": "int8"}}, "gradients.storage is 'int8' and run.method is 'agoq'"),
        ({"weights": "fp16"}, "weights is 'fp16'; allowed: fp32, bf16"),
        ({"gradients": {"storage": "fp7"}}, "codec is 'fp7'"),
        ({"data": {"sequence": 0}}, "data.sequence is 0; allowed: at least 1"),
        ({"error_tokens": 1}, "error_tokens is 1; allowed: at least 2"),
    ]
    refused(*((partial(build, MemorySettings, wrong), ValueError, message) for wrong, message in rows))


def test_a_plan_is_for_the_layers_of_each_stage():
    uneven, even, by_default = (tiny(pipeline={"layers": layers}) for layers in ([2, 3], [3, 2], []))
    assert uneven.layout.layer_counts == (2, 3)
    recorded = [planned_settings(each.recipe, each.layout, 256) for each in (uneven, even, by_default)]
    assert [each["pipeline.layers"] for each in recorded] == ["2, 3", None, None]


def trained_with(config: TrainConfig) -> tuple[list[float], set[tuple[str, int]]]:
    """Losses of a rank, and the bits of its modules by layer type."""
    (module,) = Trainer(prepare(config, ranks=2)).model.modules.values()
    layers = [vars(m)["_lowbit_saved"] for m in module.modules() if "_lowbit_saved" in vars(m)]
    codecs = [(layer.kind, layer.shared.codec(layer.kind, layer.name)) for layer in layers if layer.kind]
    return runs.losses(config), {(kind, codec.bits if codec else 16) for kind, codec in codecs}


def test_a_run_has_the_bits_that_were_planned(ranks: Ranks, tmp_path: Path):
    file, config = tmp_path / "plan.json", runs.tiny(tmp_path)
    words = "--pipeline.ranks 2 --pipeline.microbatches 4 --model.dim 32 --model.layers 4 --model.heads 2"
    words += f" --model.ffn 64 --data.sequence 16 --data.batch 8 --data.text {config.data.text[0]} --out {file}"
    result = invoke("plan", "memory", *words.split(), "--error-tokens", "32", "--error-steps", "1")
    assert result.exit_code == 0, result.output
    plan = LayerPlan.read(file)
    assert plan.rest[0] != plan.rest[1]
    config = runs.again(config, activations={"plan": str(file)})
    written_out = {kind: [choice.bits[kind] for choice in plan.rest] for kind in PLANNED}
    by_hand = runs.again(config, activations={"plan": "", "attention": 16, **written_out})
    results = zip(ranks.run(trained_with, config), ranks.run(trained_with, by_hand), strict=True)
    for stage, ((planned, bits), (expected, _)) in enumerate(results):
        assert planned == expected
        assert bits <= set(plan.rest[stage].bits.items())
        assert {kind for kind, _ in bits} >= {"norm", "mlp"}
