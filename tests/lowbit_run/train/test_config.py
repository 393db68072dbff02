import json

import pytest
import torch
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from lowbit.codecs import Cast, parse
from lowbit_run.train.boundaries import backward_formats, make_codecs
from lowbit_run.train.config import (
    PipelineConfig,
    from_mapping,
)
from lowbit_run.train.layout import make_layout


def test_a_configuration_survives_json():
    config = from_mapping({"pipeline": {"forward": "int4", "schedule": "zbvzerobubble", "warmup_steps": 3}})
    assert (config.pipeline.forward, config.pipeline.schedule) == (("int4",), "ZBVZeroBubble")
    assert from_mapping(json.loads(config.to_json())) == config


@pytest.mark.parametrize(
    ("steps", "given", "pretrained", "expected"),
    [(4000, None, "", 100), (200, None, "", 50), (4000, None, "model", 0), (8, 7, "model", 7)],
)
def test_default_warmup_fits_the_run(steps, given, pretrained, expected):
    pipeline = {} if given is None else {"warmup_steps": given}
    config = from_mapping({"model": {"pretrained": pretrained}, "pipeline": pipeline, "run": {"steps": steps}})
    assert config.codec_warmup_steps == expected


BF16 = Cast(dtype=torch.bfloat16)


def test_one_codec_serves_all_boundaries_and_a_list_each_its_own():
    codecs = make_codecs(PipelineConfig(forward=("int4",), backward=("int6", "bf16", "fp32")), 3)
    assert codecs.forward == (parse("int4"),) * 3
    assert codecs.backward == (parse("int6"), BF16, Cast(dtype=torch.float32))
    assert PipelineConfig().is_auto


def test_gradients_without_a_name_get_what_belongs_to_the_activations():
    mixed = PipelineConfig(forward=("tah-quant", "transform", "bf16"))
    codecs = make_codecs(mixed, 3)
    six = parse("GroupInt(bits=6, group=32, symmetric=True)")
    assert codecs.backward == (six, parse("transform-backward"), BF16)
    assert tuple(map(parse, backward_formats(mixed))) == codecs.backward, "what files tell"
    one = make_codecs(PipelineConfig(forward=("transform",)), 3)
    assert one.backward == (parse("transform-backward"),) * 3


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


def test_layers_and_boundaries_lie_as_the_configuration_says():
    for layers, stages in [(8, 2), (7, 3), (5, 4), (3, 3)]:
        plan = make_layout(PipelineConfig(schedule="GPipe"), ranks=stages, layers=layers)
        held = [list(plan.layers_of(stage)) for stage in range(stages)]
        assert sum(held, []) == list(range(layers))  # noqa: RUF017
        assert max(map(len, held)) - len(held[-1]) <= 1
        assert len(held[-1]) == min(map(len, held))
    plan = make_layout(PipelineConfig(layers=(5, 2, 1)), ranks=3, layers=8)
    assert [list(plan.layers_of(stage)) for stage in range(3)] == [[0, 1, 2, 3, 4], [5, 6], [7]]
    plan = make_layout(PipelineConfig(schedule="ZBVZeroBubble", stages_per_rank=2), ranks=2, layers=4)
    assert [plan.crosses(boundary) for boundary in range(3)] == [True, False, True]
