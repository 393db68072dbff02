"""The table of schedules states what PyTorch's schedules do."""

import contextlib
from typing import Any, get_args

import pytest

from lowbit_run.simulate.step import ACTION, order_of
from lowbit_run.train.config import from_mapping
from lowbit_run.train.layout import make_layout
from lowbit_run.train.schedules import SCHEDULES, Schedule

assert get_args(Schedule) == tuple(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_facts_are_those_of_the_schedule(name: Schedule):
    facts = SCHEDULES[name]
    each = facts.stages_per_rank or 2

    def order(microbatches: int) -> Any:
        return order_of(name, ranks=2, stages_per_rank=each, microbatches=microbatches)

    found = [ACTION.findall(" ".join(map(str, actions))) for actions in order(4).values()]
    assert any(kind in "IW" for actions in found for _, kind, _ in actions) == facts.splits
    layout = make_layout(
        from_mapping({"pipeline": {"schedule": name.lower(), "stages_per_rank": each}}).pipeline, ranks=2, layers=8
    )
    assert layout.v_shaped == facts.v_shaped
    for rank, actions in enumerate(found):
        assert {int(stage) for stage, _, _ in actions} == set(layout.stages_of(rank))
    with contextlib.suppress(ValueError):
        order(2 * each - 1)
        assert not facts.fills or name == "1F1B"  # which raises when it runs
    with contextlib.suppress(ValueError, AssertionError):
        order(5)
        assert not facts.in_rounds
