from __future__ import annotations

import dataclasses
import json

import pytest

from lowbit.config import ConfigError
from lowbit.train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
    from_mapping,
)


def test_values_are_taken_as_annotated():
    pipeline = PipelineConfig(forward="int4", schedule="zbvzerobubble")  # pyright: ignore[reportArgumentType]
    assert pipeline.forward == ("int4",)
    assert pipeline.schedule == "ZBVZeroBubble"
    rate = OptimizerConfig(lr=1).lr
    assert rate == 1.0
    assert isinstance(rate, float)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (ModelConfig, {"dim": 30, "heads": 4}, "model.dim is 30; allowed: a multiple"),
        (ModelConfig, {"dim": 12, "heads": 4}, "even width"),
        (ModelConfig, {"heads": 4, "kv_heads": 3}, "model.kv_heads is 3; allowed: a divisor"),
        (ModelConfig, {"tied": "yes"}, "model.tied is 'yes'; allowed: true, false or nothing"),
        (DataConfig, {"text": "a", "dataset": "b"}, "allowed: one of the two"),
        (PipelineConfig, {"schedule": "2F2B"}, "pipeline.schedule is '2F2B'; allowed: GPipe,"),
        (OptimizerConfig, {"lr": float("nan")}, "optimizer.lr is nan; allowed: a finite number"),
        (RunConfig, {"timeout_seconds": 1e9}, r"is 10{9}\.0; allowed: at least 1 and at most 1000000"),
        (RunConfig, {"steps": 2**63}, "run.steps takes 65 bits; allowed: integers of 64 bits"),
        (OptimizerConfig, {"lr": 10**400}, "optimizer.lr takes 1330 bits; allowed: integers of 64"),
        (RunConfig, {"resume": True, "overwrite": True}, "allowed: one of the two"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(section, values, message):
    with pytest.raises(ConfigError, match=message):
        section(**values)


def test_a_configuration_is_frozen_and_survives_json():
    config = TrainConfig(pipeline=PipelineConfig(forward=("int4",), warmup_steps=3))
    assert from_mapping(json.loads(config.to_json())) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run = RunConfig()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("steps", "given", "pretrained", "expected"),
    [(4000, None, "", 100), (200, None, "", 50), (4000, None, "model", 0), (8, 7, "model", 7)],
)
def test_default_warmup_fits_the_run(steps, given, pretrained, expected):
    config = TrainConfig(
        model=ModelConfig(pretrained=pretrained),
        pipeline=PipelineConfig(warmup_steps=given),
        run=RunConfig(steps=steps),
    )
    assert config.codec_warmup_steps == expected
