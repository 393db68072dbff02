import dataclasses
import json

import pytest
import torch
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from lowbit.codecs import Cast, parse
from lowbit.config import ConfigError
from lowbit.train.boundaries import backward_formats, make_codecs
from lowbit.train.config import (
    SCHEDULES,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
    from_mapping,
)
from lowbit.train.layout import make_layout


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


BF16 = Cast(dtype=torch.bfloat16)


def test_one_codec_serves_all_boundaries_and_a_list_each_its_own():
    codecs = make_codecs(PipelineConfig(forward=("int4",), backward=("int6", "bf16", "fp32")), 3)
    assert codecs.forward == (parse("int4"),) * 3
    assert codecs.backward == (parse("int6"), BF16, Cast(dtype=torch.float32))


def test_gradients_without_a_name_get_what_belongs_to_the_activations():
    mixed = PipelineConfig(forward=("tah-quant", "transform", "bf16"), backward="")  # pyright: ignore[reportArgumentType]
    codecs = make_codecs(mixed, 3)
    six = parse("GroupInt(bits=6, group=32, symmetric=True)")
    assert codecs.backward == (six, parse("transform-backward"), BF16)
    assert tuple(map(parse, backward_formats(mixed))) == codecs.backward, "what files tell"
    one = make_codecs(PipelineConfig(forward=("transform",)), 3)
    assert one.backward == (parse("transform-backward"),) * 3
    with pytest.raises(ConfigError, match=r"^pipeline\.forward: codec is 'int9'"):
        make_codecs(PipelineConfig(forward=("int9",)), 1)


def test_stock_boundaries_have_their_dtype_whatever_the_codecs():
    codecs = make_codecs(PipelineConfig(boundary="stock-bf16", forward=("int2",)), 2)
    assert codecs.forward == codecs.backward == (BF16, BF16)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("schedule", "per_rank", "style"), [
    ("Interleaved1F1B", 3, "loop"), ("GPipe", 1, "loop"), ("ZBVZeroBubble", 2, "v"),
])  # fmt: skip
def test_stages_lie_where_the_schedules_expect_them(ranks, schedule, per_rank, style):
    pipeline = PipelineConfig(schedule=schedule, stages_per_rank=per_rank, microbatches=ranks)
    plan = make_layout(pipeline, ranks=ranks, layers=20)
    expected = generate_stage_to_rank_mapping(ranks, ranks * per_rank, style)
    assert {stage: plan.rank_of(stage) for stage in range(plan.stages)} == expected
    assert [plan.stages_of(rank) for rank in range(ranks)] == [
        [stage for stage, owner in expected.items() if owner == rank] for rank in range(ranks)
    ]


@pytest.mark.parametrize(("layers", "stages"), [(8, 2), (7, 3), (5, 4), (3, 3)])
def test_every_layer_has_one_stage_and_shares_differ_by_one_at_most(layers, stages):
    plan = make_layout(PipelineConfig(schedule="GPipe"), ranks=stages, layers=layers)
    held = [list(plan.layers_of(stage)) for stage in range(stages)]
    assert sum(held, []) == list(range(layers))  # noqa: RUF017
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert len(held[-1]) == min(map(len, held))


def test_layers_lie_as_the_configuration_says():
    plan = make_layout(PipelineConfig(layers=(5, 2, 1)), ranks=3, layers=8)
    assert [list(plan.layers_of(stage)) for stage in range(3)] == [[0, 1, 2, 3, 4], [5, 6], [7]]


def test_boundaries_inside_a_rank_do_not_cross():
    pipeline = PipelineConfig(schedule="ZBVZeroBubble", stages_per_rank=2)
    plan = make_layout(pipeline, ranks=2, layers=4)
    assert [plan.crosses(boundary) for boundary in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("values", "ranks", "layers", "message"),
    [
        ({}, 3, 2, r"3 stages \(3 ranks x 1\), the model 2 layers; allowed: at most one stage"),
        ({"stages_per_rank": 2}, 2, 8, "stages_per_rank is 2; allowed with 1F1B: 1"),
        ({"schedule": "ZBVZeroBubble"}, 2, 8, "is 1; allowed with ZBVZeroBubble: 2"),
        ({"microbatches": 2}, 4, 8, r"microbatches is 2; allowed with 1F1B: at least .* \(4 on 4 ranks\)"),
        (
            {"schedule": "Interleaved1F1B", "stages_per_rank": 2, "microbatches": 5},
            2, 8, "microbatches is 5; allowed with Interleaved1F1B on 2 ranks: a multiple of 2",
        ),
        *(({"layers": layers}, 2, 8, r"layers is \[.*; allowed: a number for each of the 2 stages, 8 together, as the")
          for layers in ((5, 4), (4, 2, 2), (8,))),
        ({"layers": (8, 0)}, 2, 8, r"pipeline.layers is \(8, 0\); allowed: at least 1"),
        ({"forward": ("int4", "int4")}, 2, 8, "pipeline.forward lists 2 codecs; allowed: one for"),
    ],
)  # fmt: skip
def test_what_a_schedule_refuses_is_said_beforehand(values, ranks, layers, message):
    with pytest.raises(ConfigError, match=message):
        make_layout(PipelineConfig(**values), ranks=ranks, layers=layers)


def test_schedules_exist_in_this_torch():
    from torch.distributed.pipelining.schedules import get_schedule_class

    for name in SCHEDULES.values():
        assert get_schedule_class(name)
