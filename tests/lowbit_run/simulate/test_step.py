"""The simulation of a step: orders of PyTorch, steps by hand, and every moment of a slow simulator."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_run.simulate import Channel, Network, StageTimes, actions, actions_from, simulate
from lowbit_run.simulate.predict import predicted_step
from tests.lowbit_run.simulate.reference import seconds_of
from tests.refused import refused

FREE = Channel()
TIMES = StageTimes(forward=1.0, backward=2.0)


def chain(ranks: int, forward: Channel = FREE, backward: Channel = FREE) -> Network:
    routes = {(rank, rank + 1): 2 * rank for rank in range(ranks - 1)}
    routes |= {(there, here): channel + 1 for (here, there), channel in routes.items()}
    return Network(channels=[forward, backward] * (ranks - 1), routes=routes)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (4, 4), (4, 9), (7, 20)])
def test_free_links_leave_the_bubble_alone(schedule: str, ranks: int, count: int):
    step = simulate(actions(schedule, ranks=ranks, microbatches=count), [TIMES] * ranks, chain(ranks))
    assert step.seconds == 3 * (count + ranks - 1)
    assert step.waiting_share == pytest.approx((ranks - 1) / (count + ranks - 1))
    assert step.waiting.tolist() == [3 * (ranks - 1)] * ranks


def test_one_slow_link_carries_everything_behind_the_first_forward():
    """Two ranks, a message of 5 seconds: the link is busy from the first forward to the last one's arrival."""
    times = [StageTimes(forward=1.0, backward=2.0, forward_bytes=5), TIMES]
    network = chain(2, Channel(bytes_per_second=1.0))
    step = simulate(actions("GPipe", ranks=2, microbatches=4), times, network)
    assert step.seconds == 1 + 4 * 5 + 1 + 4 * 2 + 2  # link, last forward, all backwards there, the last one here
    assert step.busy.tolist() == [20, 0]
    assert step.nbytes.tolist() == [20, 0]


def test_coding_takes_the_rank_on_a_cpu_and_delays_messages_on_a_gpu():
    times = [
        StageTimes(forward=1.0, backward=2.0, encode_forward=0.5, decode_backward=0.25),
        StageTimes(forward=1.0, backward=2.0, decode_forward=0.5, encode_backward=0.25),
    ]
    order = actions("1F1B", ranks=2, microbatches=6)
    cpu, gpu = (simulate(order, times, chain(2), overlaps_coding=overlaps_coding) for overlaps_coding in (False, True))
    assert cpu.coding.tolist() == [4.5, 4.5]
    assert gpu.waiting.tolist() == [gpu.seconds - 18] * 2, "coding that overlaps takes none of a rank's time"
    assert cpu.seconds > gpu.seconds > simulate(order, [TIMES] * 2, chain(2)).seconds
    first = cpu.timeline
    assert (first.end - first.begin - first.decode - first.encode).sum() == pytest.approx(2 * 6 * 3)


def test_optimizer_and_averages_belong_to_the_step():
    order = actions("1F1B", ranks=2, microbatches=4)
    bare = simulate(order, [TIMES] * 2, chain(2))
    step = simulate(order, [TIMES] * 2, chain(2), optimizer=[5.0, 1.0], averaging=3.0)
    assert step.seconds == bare.seconds + 5 + 3
    assert step.finish.tolist() == [5, 1]
    assert step.waiting.tolist() == [bare.waiting[0] + 3, bare.waiting[1] + 3 + 4], "averages are waited for"


def test_messages_of_the_timeline_leave_after_their_action_and_arrive_before_the_next():
    times = [StageTimes(forward=1.0, backward=2.0, forward_bytes=3, backward_bytes=1)] * 3
    slow = Channel(bytes_per_second=2.0, latency=0.5)
    line = simulate(actions("1F1B", ranks=3, microbatches=4), times, chain(3, slow, slow)).timeline
    ends = {line.actions.name(i): (line.begin[i], line.end[i]) for i in range(len(line.end))}
    assert len(line.leaves) == 2 * 2 * 4
    for i, boundary in enumerate(line.boundary):
        kind, low, high = ("B", boundary + 1, boundary) if line.backward[i] else ("F", boundary, boundary + 1)
        assert line.leaves[i] >= ends[f"{low}{kind}{line.micro_batch[i]}"][1]
        assert line.arrives[i] <= ends[f"{high}{kind}{line.micro_batch[i]}"][0]
        assert line.arrives[i] - line.leaves[i] == pytest.approx((0.5 if line.backward[i] else 1.5) + 0.5)


SCHEDULES = st.sampled_from([
    ("GPipe", 1, 3), ("1F1B", 1, 3), ("Interleaved1F1B", 2, 4), ("InterleavedZeroBubble", 2, 4),
    ("ZBVZeroBubble", 2, 4), ("DualPipeV", 2, 6), ("LoopedBFS", 3, 2),
])  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(schedule=SCHEDULES, ranks=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_every_moment_is_that_of_a_slow_simulator(schedule, ranks: int, seed: int):
    name, each, count = schedule
    order = actions(name, ranks=ranks, stages_per_rank=each, microbatches=count)
    draw = random.Random(seed)
    stages = [
        StageTimes(
            **{field: draw.random() for field in ("forward", "backward")},
            **{f"{code}_{way}": draw.random() / 9 for code in ("encode", "decode") for way in ("forward", "backward")},
            forward_bytes=draw.randrange(1, 999), backward_bytes=draw.randrange(1, 999),
        )
        for _ in range(ranks * each)
    ]  # fmt: skip
    channels = [
        Channel(bytes_per_second=10 ** draw.uniform(1, 4), latency=draw.random()) for _ in range(draw.randrange(1, 4))
    ]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    network = Network(channels=channels, routes={pair: draw.randrange(len(channels)) for pair in pairs})
    step = simulate(order, stages, network, optimizer=0.3)
    seconds, spans = seconds_of(order, stages, network, 0.3)
    line = step.timeline
    assert {order.name(i): (line.begin[i], line.end[i]) for i in range(len(line.end))} == spans
    assert step.seconds == seconds
    assert sum("F" in name for name in spans) == ranks * each * count


def test_lists_that_are_no_step_and_wrong_numbers_are_refused():
    order = actions("1F1B", ranks=2, microbatches=2)
    waiting = actions_from({0: ["0F0", "0B0", "0F1", "0B1"], 1: ["1F1", "1B1", "1F0", "1B0"]})
    lists = (
        ({0: ["0F0", "0B0"]}, 2, r"stages has 2 entries, and the actions have stages \[0\]"),
        ({0: ["0F0", "0B0", "0B1"]}, 1, "not one step; allowed: F once"),
        ({0: ["0F0", "0B0", "0W0"]}, 1, "not one step; allowed: F once"),
        ({0: ["0F0"], 1: ["0B0"]}, 1, "a stage has actions on several ranks"),
        ({0: ["0B0", "0F0"]}, 1, "rank 0 has actions of stage 0, micro-batch 0, in an order that cannot run"),
        ({0: ["1F0", "0F0", "1B0", "0B0"]}, 2, "in an order that cannot run"),
        ({0: ["0F0", "0W0", "0I0"]}, 1, "in an order that cannot run"),
    )
    calls = (
        *((partial(simulate, actions_from(names), [TIMES] * n, chain(2)), message) for names, n, message in lists),
        (
            lambda: simulate(waiting, [TIMES] * 2, chain(2)),
            "wait for each other forever: rank 0 cannot begin 0B0, because rank 1 never",
        ),
        (lambda: Channel(bytes_per_second=0), "bytes_per_second is 0"),
        (lambda: Channel(latency=-1), "latency is -1"),
        (lambda: StageTimes(forward=-1, backward=0), "forward is -1"),
        (lambda: simulate(order, [TIMES] * 2, Network(channels=[], routes={})), "rank 0 sends to rank 1"),
        (lambda: simulate(order, [TIMES] * 2, chain(2), optimizer=-1), "optimizer and averaging have -1"),
        (lambda: actions("1F1B", ranks=2, stages_per_rank=2, microbatches=4), "stages_per_rank is 2; allowed .*: 1"),
        (lambda: actions("GPipe", ranks=2, microbatches=0), "microbatches"),
        (lambda: actions("1F1B", ranks=0, microbatches=4), "ranks is 0"),
        (lambda: actions("2F2B", ranks=2, microbatches=4), "Unknown schedule name '2F2B'"),
    )
    refused(*((call, ValueError, message) for call, message in calls))


def test_each_end_codes_and_each_way_takes_its_own_bytes():
    network = Network(channels=[Channel(bytes_per_second=1000.0)] * 2, routes={(0, 1): 0, (1, 0): 1})
    coding = {0: (0.1, 9.0, 9.0, 0.4), 1: (9.0, 0.2, 0.3, 9.0)}
    step = predicted_step(
        actions("GPipe", ranks=2, microbatches=1), [3.0, 3.0], [0, 1], network, formats=["x"],
        sizes=lambda text: (1000, 500), coding=lambda rank, text: coding[rank], checksum=100,
    )  # fmt: skip
    assert step.nbytes.tolist() == [1100, 600]
    assert step.seconds == pytest.approx(1 + 0.1 + 1.1 + 0.2 + 1 + 2 + 0.3 + 0.6 + 0.4 + 2)
