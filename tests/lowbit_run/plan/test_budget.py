"""Micro-batches in flight, and bits within a budget, compared with all combinations there are."""

import itertools
import math
import random
from typing import Any

import pytest

from lowbit.activations.layer_plan import PLANNED
from lowbit_run.plan import in_flight, order_of
from lowbit_run.plan.budget import WIDTHS, MemoryPlan, Moment, Option, StageCost, fastest_fitting, plan_bits
from tests.refused import refused

SCALES = dict(zip(PLANNED, (3, 1, 2), strict=True))
ERRORS = {kind: {bits: scale * 2.0**-bits for bits in WIDTHS[:-1]} for kind, scale in SCALES.items()}


def cost(norm: int = 100, mlp: int = 300, linear: int = 50, **fields: int) -> StageCost:
    sizes = dict(zip(PLANNED, (norm, mlp, linear), strict=True))
    saved = {kind: {bits: size * bits for bits in WIDTHS} for kind, size in sizes.items()}
    return StageCost(**{"layers": 2, "other": 1000, "fixed": 5000} | fields, saved=saved)


def unsaved(**fields: int) -> StageCost:
    """A stage of which autograd saves nothing."""
    return cost(0, 0, 0, **{"other": 0, "fixed": 0} | fields)


def held(schedule: str, ranks: int, each: int = 1, microbatches: int = 0):
    return in_flight(order_of(schedule, ranks=ranks, stages_per_rank=each, microbatches=microbatches or 2 * ranks))


def planned(flight: Any, costs: list[StageCost], limit: int = 1 << 40, **errors: dict[int, float]) -> MemoryPlan:
    return plan_bits(flight, costs, ERRORS | errors, device_bytes=limit)


def test_nothing_that_fits_loses_less():
    flight, costs = held("1F1B", 2), [cost(), cost(norm=70, fixed=9000)]
    for limit in (10_840, 12_345, 20_000, 10**6):
        plan = planned(flight, costs, limit)
        for stage, one in enumerate(costs):
            errors = [
                sum((ERRORS[kind] | {16: 0})[b] ** 2 for kind, b in zip(PLANNED, bits, strict=True)) / 2
                for bits in itertools.product(WIDTHS, repeat=3)
                if one.fixed + flight.peak(stage) * one.per_microbatch(dict(zip(PLANNED, bits, strict=True))) <= limit
            ]
            choice = plan.stages[stage]
            assert choice.error == pytest.approx(math.sqrt(min(errors)), rel=1e-12)
            assert plan.device_bytes[stage] == one.fixed + choice.saved_bytes <= limit
            assert choice.saved_bytes == choice.held * one.per_microbatch(choice.bits)


@pytest.mark.parametrize(("schedule", "ranks", "each"), [("1F1B", 4, 1), ("InterleavedZeroBubble", 2, 2)])
def test_more_bytes_never_lose_more_and_late_stages_get_more_bits(schedule: str, ranks: int, each: int):
    flight = held(schedule, ranks, each)
    costs = [cost() for _ in flight.stages]
    everything = planned(flight, costs)
    assert {bits for stage in everything.stages for bits in stage.bits.values()} == {16}
    errors = []
    for limit in range(everything.least, 4 * everything.least, everything.least // 3):
        plan = planned(flight, costs, limit)
        assert max(plan.device_bytes.values()) <= limit
        errors.append(plan.error)
        if each == 1:
            bits = [sum(stage.bits.values()) for stage in plan.stages]
            assert bits == sorted(bits)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[-1] >= everything.error == 0


def test_too_little_says_how_much_would_do():
    flight, costs = held("1F1B", 2), [cost(), cost()]
    least = 5000 + 2 * (1000 + 2 * 450)
    with pytest.raises(ValueError, match=rf"device_bytes is 8,000; allowed: at least {least:,}, which rank 0 needs"):
        planned(flight, costs, 8000)
    plan = planned(flight, costs, least)
    assert plan.least == least == plan.device_bytes[0]
    assert dict(plan.stages[0].bits) == dict.fromkeys(PLANNED, 2)


def test_the_worst_moment_counts_and_not_the_sum_of_peaks():
    plan = planned(in_flight({0: ["0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1"]}), [cost(fixed=0)] * 2)
    assert plan.device_bytes[0] == max(stage.saved_bytes for stage in plan.stages)


def test_what_the_pipeline_holds_counts():
    flight = in_flight({0: ["1F0", "1F1", "1I0", "1W0", "1B1"], 1: ["0F0", "0F1", "0B0", "0B1"]})
    plan = planned(flight, [cost(output=10, gradients=each, received=100) for each in (10**6, 300_000)])
    first, last = (5000 + 2 * (100 + 10) + stage.saved_bytes for stage in plan.stages)
    assert plan.device_bytes == {1: first, 0: last + 300_000}


def test_what_goes_with_the_inputs_pass_and_what_comes_with_it():
    flight = in_flight({0: ["0F0", "0B0", "1F0", "1F1", "1I0", "1W0", "1I1", "1W1"]})
    for fields, peak in (
        ({"output": 1000, "early": 1000}, 2000),  # before any pass
        ({"gradients": 300}, 300),
        ({"output": 1000, "early": 1000, "gradients": 1200}, 2000 - 1000 + 1200),
        ({"inputs": 70}, 70),
    ):
        assert planned(flight, [unsaved(**fields)] * 2).device_bytes == {0: peak}, fields


def test_what_stays_on_a_rank_counts_once():
    ends = in_flight({0: ["0F0", "3F0", "3I0", "3W0", "0B0"], 1: ["1F0", "2F0", "2I0", "2W0", "1B0"]})
    assert [ends.stays(stage) for stage in range(4)] == [False, True, False, False]
    assert planned(ends, [unsaved(output=10, inputs=7)] * 4).device_bytes == dict.fromkeys((0, 1), 10 + 10 + 7)


def test_the_fastest_that_fit_are_chosen_and_of_equally_fast_ones_the_most_exact():
    options = [
        Option(what="fast", held=900, extra=50, seconds=1.0, loss=0.3),
        Option(what="exact", held=800, extra=50, seconds=1.005, loss=0.1),
        Option(what="slow", held=100, extra=10, seconds=2.0, loss=0.0),
    ]

    def chosen(limit: int) -> tuple[list[str], dict[int, int]]:
        found = fastest_fitting(held("1F1B", 2), [cost()] * 2, [options] * 2, device_bytes=limit, least_with="here")
        return [option.what for option in found.options], dict(found.device_bytes)

    assert chosen(10_000) == (["exact", "exact"], {0: 5000 + 2 * 800 + 50, 1: 5000 + 800 + 50})
    assert chosen(6649) == (["slow", "exact"], {0: 5210, 1: 5850})
    with pytest.raises(ValueError, match="device_bytes is 5,000; allowed: at least 5,210, which rank 0 needs here"):
        chosen(5000)


def test_many_stages_on_a_rank_are_thinned():
    draw = random.Random(0)
    flight = held("LoopedBFS", 1, 6, 2)
    costs = [cost(norm=draw.randrange(50, 200), mlp=draw.randrange(50, 200)) for _ in range(6)]
    full = planned(flight, costs)
    half = (full.least + full.device_bytes[0]) // 2
    plan = planned(flight, costs, half)
    assert full.error == 0 < plan.error
    assert 0.8 * half < plan.device_bytes[0] <= half


def test_bits_that_change_nothing_are_not_taken_away():
    bits = planned(held("1F1B", 1), [cost(linear=0)], 8000, linear=dict.fromkeys(WIDTHS, 0.0)).stages[0].bits
    assert bits["linear"] == 16 > bits["mlp"]


@pytest.mark.parametrize(
    ("schedule", "ranks", "each", "microbatches", "expected"),
    [
        *(("1F1B", ranks, 1, count, list(range(ranks, 0, -1))) for ranks in (1, 2, 4) for count in (4, 7)),
        *(("GPipe", ranks, 1, count, [count] * ranks) for ranks in (1, 2, 4) for count in (4, 7)),
        ("Interleaved1F1B", 2, 2, 4, [4, 3, 2, 1]),
        ("LoopedBFS", 2, 2, 4, [4, 4, 4, 4]),
        ("InterleavedZeroBubble", 2, 2, 4, [4, 4, 2, 2]),
        ("zbvzerobubble", 4, 2, 16, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("DualPipeV", 2, 2, 4, [4, 3, 2, 1]),
    ],
)
def test_stages_hold_what_is_known_of_a_schedule(schedule, ranks, each, microbatches, expected: list[int]):
    flight = held(schedule, ranks, each, microbatches)
    assert [flight.peak(stage) for stage in flight.stages] == expected


def test_a_list_by_hand():
    flight = in_flight({3: ["0F0", None, "1F0", "0F1", "0B0", "1SEND_B0", "1I0", "1F1", "1W0", "1B1", "0B1"]})
    first = Moment(held={0: 2, 1: 1}, halfway={0: 0, 1: 0})
    assert flight.moments == {3: (first, Moment(held={0: 1, 1: 2}, halfway={0: 0, 1: 1}))}
    assert (flight.stages, flight.peak(0), flight.peak(1), flight.rank_of(1)) == ([0, 1], 2, 2, 3)


def test_gradients_wait_between_the_passes_for_inputs_and_weights():
    flight = in_flight({0: ["1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1B2", "1W1"]})
    assert flight.moments == {0: tuple(Moment(held={1: 2}, halfway={1: halfway}) for halfway in (1, 2))}
    assert flight.splits
    assert not in_flight({0: ["0F0", "0I0", "0W0"]}).splits, "on the first stage I does nothing"
    assert [held(*each).splits for each in (("1F1B", 2, 1, 8), ("ZBVZeroBubble", 2, 2, 8))] == [False, True]


def test_inputs_and_weights_apart_end_with_the_weights():
    for order, peak in (
        (["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"], 2),
        (["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"], 1),
        (["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], 2),
    ):
        assert in_flight({0: order}).peak(0) == peak, order


def test_wrong_input_is_refused():
    flight, two, nan = held("1F1B", 2), [cost()] * 2, ERRORS["norm"] | {2: math.nan}
    rows = [
        (lambda: planned(flight, [cost()]), "costs has 1 stages; allowed: 2"),
        (lambda: planned(flight, two, mlp={}), "sensitivities has no error for 'mlp' at 2, 3, 4, 5, 6, 7, 8 bits"),
        (lambda: planned(flight, two, norm=nan), "sensitivities is nan for 'norm' at 2 bits"),
        (lambda: StageCost(layers=1, saved={"norm": {4: 1}}), "saved has norm; allowed"),
        (lambda: cost(fixed=-1), "fixed is -1"),
        (lambda: cost(other=0, output=10, early=11), "early is 11; allowed: at most other and output together"),
        (lambda: flight.rank_of(5), "stage is 5; allowed: 0, 1"),
        (lambda: in_flight({0: ["0F0"]}), "leaves 1 micro-batches of stage 0 without backward"),
        (lambda: in_flight({0: ["0F0", "0B0", "0B1"]}), "order of rank 0 ends more micro-batches of stage 0"),
        (lambda: in_flight({0: ["0F0", "0B0"], 1: ["0F0", "0B0"]}), r"order has stages \[0, 0\]; allowed: each on one"),
        (lambda: in_flight({0: [None]}), r"order has stages \[\]"),
    ]
    refused(*((call, ValueError, message) for call, message in rows))
