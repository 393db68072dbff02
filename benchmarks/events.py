"""`python -m benchmarks events`: seconds that the simulator takes for large pipelines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from lowbit.config import Positive, section
from lowbit.report import Column, Command, Row, Table
from lowbit.simulate import Channel, Network, StageTimes, actions, simulate


@section()
class EventsBenchmark:
    """Sizes of pipelines."""

    sizes: tuple[Positive, ...] = (10, 100, 1000)
    """Stages, and as many micro-batches."""


def measure(settings: EventsBenchmark, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Simulate 1F1B, with a link between each two stages that is as busy as they are.

    Yields:
        Rows: `size`, `actions`, `seconds` (in all: layout, messages, events), `processor_seconds`, `step` (simulated).
    """
    _simulate(70)  # compiles
    rows = []
    for size in settings.sizes:
        start, processor = time.perf_counter(), time.process_time()
        count, seconds = _simulate(size)
        rows.append(
            {
                "size": size,
                "actions": count,
                "seconds": time.perf_counter() - start,
                "processor_seconds": time.process_time() - processor,
                "step": seconds,
            }
        )
        yield rows


def _simulate(size: int) -> tuple[int, float]:
    order = actions("1F1B", ranks=size, microbatches=size)
    neighbours = [pair for rank in range(size - 1) for pair in ((rank, rank + 1), (rank + 1, rank))]
    network = Network(
        channels=[Channel(bytes_per_second=1e6, latency=1e-4)] * len(neighbours),
        routes={pair: index for index, pair in enumerate(neighbours)},
    )
    times = StageTimes(forward=1e-3, backward=2e-3, forward_bytes=3000, backward_bytes=3000)
    return len(order.stage), simulate(order, [times] * size, network).seconds


COMMAND = Command(
    name="events",
    summary="Seconds that the simulator takes for large pipelines.",
    examples=("python -m benchmarks events --size 1000",),
    settings=EventsBenchmark,
    measure=measure,
    tables=(
        Table(
            title="Simulation of 1F1B",
            columns=(
                Column("stages, micro-batches", "size"),
                Column("actions", "actions", "{:,}"),
                Column("seconds", "seconds", "{:.2f}"),
                Column("of the processor", "processor_seconds", "{:.2f}"),
            ),
        ),
    ),
    charts=(),
)
