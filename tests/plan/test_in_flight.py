"""Micro-batches in flight, from action lists; what real schedules hold is in test_held.py."""

import pytest

from lowbit.plan.budget import Moment, in_flight
from lowbit.simulate.orders import order_of


def peaks(schedule: str, ranks: int, each: int, microbatches: int) -> list[int]:
    order = order_of(schedule, ranks=ranks, stages_per_rank=each, microbatches=microbatches)
    held = in_flight(order)
    return [held.peak(stage) for stage in held.stages]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 7])
def test_schedules_that_are_known_by_heart(ranks: int, microbatches: int):
    assert peaks("1F1B", ranks, 1, microbatches) == [ranks - stage for stage in range(ranks)]
    assert peaks("GPipe", ranks, 1, microbatches) == [microbatches] * ranks


@pytest.mark.parametrize(
    ("schedule", "ranks", "each", "microbatches", "expected"),
    [
        ("Interleaved1F1B", 2, 2, 4, [4, 3, 2, 1]),
        ("LoopedBFS", 2, 2, 4, [4, 4, 4, 4]),
        ("InterleavedZeroBubble", 2, 2, 4, [4, 4, 2, 2]),
        ("zbvzerobubble", 4, 2, 16, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("DualPipeV", 2, 2, 4, [4, 3, 2, 1]),
    ],
)
def test_schedules_of_several_stages(schedule: str, ranks: int, each: int, microbatches: int, expected: list[int]):
    assert peaks(schedule, ranks, each, microbatches) == expected


def test_a_list_by_hand():
    held = in_flight({3: ["0F0", None, "1F0", "0F1", "0B0", "1SEND_B0", "1I0", "1F1", "1W0", "1B1", "0B1"]})
    none = {0: 0, 1: 0}
    first, last = (Moment(held={0: 2, 1: 1}, halfway=none), Moment(held={0: 1, 1: 2}, halfway={0: 0, 1: 1}))
    assert held.moments == {3: (first, last)}
    assert (held.stages, held.peak(0), held.peak(1), held.rank_of(1)) == ([0, 1], 2, 2, 3)


def test_gradients_wait_between_the_passes_for_inputs_and_weights():
    held = in_flight({0: ["1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1B2", "1W1"]})
    both, later = (Moment(held={1: 2}, halfway={1: halfway}) for halfway in (2, 1))
    assert held.moments == {0: (later, both)}
    assert held.splits
    first = in_flight({0: ["0F0", "0I0", "0W0"]})  # where I does nothing
    assert not first.splits
    assert not in_flight(order_of("1F1B", ranks=2, stages_per_rank=1, microbatches=4)).splits
    zero_bubble = order_of("ZBVZeroBubble", ranks=2, stages_per_rank=2, microbatches=8)
    assert in_flight(zero_bubble).splits


def test_inputs_and_weights_apart_end_with_the_weights():
    assert in_flight({0: ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]}).peak(0) == 2
    assert in_flight({0: ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]}).peak(0) == 1
    assert in_flight({0: ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]}).peak(0) == 2


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({0: ["0F0"]}, "leaves 1 micro-batches of stage 0 without backward"),
        ({0: ["0F0", "0B0", "0B1"]}, "order of rank 0 ends more micro-batches of stage 0"),
        ({0: ["0F0", "0B0"], 1: ["0F0", "0B0"]}, r"order has stages \[0, 0\]; allowed: each on one"),
        ({0: [None]}, r"order has stages \[\]"),
    ],
)
def test_wrong_lists_are_refused(order: dict, message: str):
    with pytest.raises(ValueError, match=message):
        in_flight(order)


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="stage is 5; allowed: 0, 1"):
        in_flight(order_of("1F1B", ranks=2, stages_per_rank=1, microbatches=4)).rank_of(5)
