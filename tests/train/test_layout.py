from __future__ import annotations

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from lowbit.config import ConfigError
from lowbit.train.config import SCHEDULES, PipelineConfig
from lowbit.train.layout import make_layout


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
