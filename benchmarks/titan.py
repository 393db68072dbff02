"""`python -m benchmarks titan`: training speed of TorchTitan's pipeline over emulated slow links, by boundary format.

TorchTitan's Llama is cut by its own pipelining function and parallelized by its own parallelize function; its stages
are PyTorch's or lowbit's. The model has the sizes of `lowbit bench pipeline`, so that the ratios can be compared. All
formats train in the same processes and take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from lowbit.codecs import parse
from lowbit.codecs.names import pair_name
from lowbit.config import ConfigError, Positive, section
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit_lab.bench.recipes import MANY_STAGES, THIN_MODEL
from lowbit_lab.bench.settings import LINK, Links, Names
from lowbit_lab.bench.workers import set_link, started
from lowbit_lab.charts.style import row_name
from lowbit_lab.network import Link

OWN = "stock-fp32"


@section()
class TitanBenchmark:
    """Boundary formats and links."""

    links: Links = (Link(100.0),)
    """Links to emulate: a rate, with a round trip if there is a distance, such as 25mbit, 100mbit/40ms or unlimited."""
    boundaries: Names = (OWN, "fp32", "int4", "transform")
    """Formats of activations, by name or in full. stock-fp32 is PyTorch's own stage, which TorchTitan uses."""
    layers: Positive = THIN_MODEL.layers
    """Decoder layers, one for each stage; a multiple of the two ranks."""
    batch: Positive = 32
    """Samples of a step, in 4 micro-batches."""
    sequence: Positive = 128
    """Tokens of a sample."""
    rounds: Positive = 3
    """Turns of each format on each link."""
    steps: Positive = 2
    """Timed steps of a turn. One more comes first and is not timed."""

    def __post_init__(self) -> None:
        for name, factor in (("layers", MANY_STAGES.ranks), ("batch", MANY_STAGES.microbatches)):
            if (value := getattr(self, name)) % factor:
                raise ConfigError(f"{name} is {value}; allowed: multiples of {factor}")
        for boundary in set(self.boundaries) - {OWN}:
            parse(boundary)


def measure(settings: TitanBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every boundary on every link.

    Yields:
        Rows, one for each link and boundary: `boundary`, the fields of `set_link`, `tokens_per_second` (median of the
        timed steps) with `tokens_per_second_low` and `_high`, `speedup_stock_fp32`, `bits_forward`, `bits_backward`,
        `loss` (of the last step), `steps`.

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with started("benchmarks.titan_rank", MANY_STAGES.ranks, settings.links) as (network, ranks):
        sizes: dict[str, Any] = {"layers": settings.layers, "batch": settings.batch, "sequence": settings.sequence}
        for boundary in settings.boundaries:
            ranks.ask("open", boundary=boundary, **sizes)
        for link in settings.links:
            about, speeds = set_link(network, link), {boundary: [] for boundary in settings.boundaries}
            for _ in range(settings.rounds):
                for boundary in settings.boundaries:
                    for step in range(1 + settings.steps):
                        answers = ranks.ask("step", boundary=boundary)
                        if step:
                            seconds = max(answer["seconds"] for answer in answers)
                            speeds[boundary].append(settings.batch * settings.sequence / seconds)
                    rows[about["link"], boundary] = _row(boundary, about, speeds[boundary], answers)
                    yield list(rows.values())


def _row(boundary: str, about: dict[str, Any], speeds: list[float], answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "boundary": boundary,
        **about,
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_low": min(speeds),
        "tokens_per_second_high": max(speeds),
        **{name: statistics.mean(answer[name] for answer in answers) for name in ("bits_forward", "bits_backward")},
        "loss": answers[-1]["loss"],
        "steps": len(speeds),
    }


def _shown(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "name": pair_name(row["boundary"])} for row in rows]


def _spread(row: Row) -> float:
    return (row["tokens_per_second_high"] - row["tokens_per_second_low"]) / row["tokens_per_second"]


COMMAND = Command(
    name="titan",
    summary="Training speed of TorchTitan's pipeline over emulated slow links, by boundary format.",
    examples=("python -m benchmarks titan --link 100mbit --boundary stock-fp32,transform",),
    settings=TitanBenchmark,
    measure=measure,
    baselines=[
        Baseline(field="speedup_stock_fp32", value="tokens_per_second", to={"boundary": OWN}, alike=("link",)),
    ],
    tables=[
        Table(
            title="Training speed of TorchTitan's pipeline",
            rows=_shown,
            gap="link",
            columns=[
                LINK,
                Column("boundary", "name", row_name),
                Column("tokens/s", "tokens_per_second", "{:,.0f}"),
                Column("spread", _spread, "{:.0%}"),
                Column("over its\nown stage", "speedup_stock_fp32", "{:.2f}x"),
                Column("bits\nfwd", "bits_forward", "{:.2f}"),
                Column("bits\nbwd", "bits_backward", "{:.2f}"),
                Column("loss", "loss", "{:.3f}"),
            ],
        )
    ],
    charts=[],
)
