"""`python -m benchmarks simulate`: predicted seconds of a step beside measured ones, on really limited links.

Each setting trains over a link, and its ranks time their actions: computing, encoding, decoding, and what comes between
two steps. The simulator gets these times, the sizes of the messages, and the rate and round trip that plain sockets
measure on the link. It gets neither the seconds of the step nor those of waiting, which it predicts.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowbit.codecs import parse_pair
from lowbit.codecs.names import pair_name
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.report import Column, Command, Row, Table
from lowbit.simulate import Channel, Hosts, Network, StageTimes, Step, actions, simulate
from lowbit.train.config import DataConfig, ModelConfig, PipelineConfig, TrainConfig
from lowbit.train.layout import make_layout
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit_lab.bench.recipes import THIN_MODEL, Split, as_mapping, recipe
from lowbit_lab.bench.settings import LINK, Device
from lowbit_lab.bench.workers import UNLIMITED, Workers, set_link, started
from lowbit_lab.network import Link
from lowbit_lab.network.shape import burst_bytes

PROGRAM = "benchmarks.simulate_rank"


@dataclass(frozen=True)
class Case:
    """A setting: `2:1F1B/1/8:fp32:100mbit/40ms` has 2 ranks, a split, a format and a link."""

    ranks: int
    split: Split
    boundary: str
    link: Link

    @classmethod
    def parse(cls, text: str) -> Case:
        """A setting from its text.

        Raises:
            ValueError: it is not one.
        """
        match text.split(":"):
            case [ranks, split, boundary, link] if ranks.isdecimal() and int(ranks) > 1:
                return cls(int(ranks), Split.parse(split), boundary, Link.parse(link))
        raise ValueError(f"case is {text!r}; allowed: ranks:split:format:link, such as 2:1F1B/1/8:fp32:100mbit/40ms")

    def __str__(self) -> str:
        return f"{self.ranks}:{self.split}:{self.boundary}:{self.link}"


CASES = tuple(
    Case.parse(f"{ranks}:{split}:{boundary}:{link}")
    for ranks, split, link in (
        (2, "1F1B/1/8", "25mbit"), (2, "1F1B/1/8", "100mbit/40ms"), (2, "GPipe/1/8", "100mbit"),
        (2, "Interleaved1F1B/4/4", "100mbit"), (2, "ZBVZeroBubble/2/8", "25mbit/20ms"),
        (4, "1F1B/1/8", "100mbit"), (4, "1F1B/1/8", "100mbit/40ms"), (4, "Interleaved1F1B/2/8", "500mbit"),
    )
    for boundary in ("fp32", "int4")
)  # fmt: skip


@section()
class SimulateBenchmark:
    """Settings to measure and to predict."""

    cases: tuple[Case, ...] = CASES
    """Settings, as ranks:split:format:link, such as 2:1F1B/1/8:fp32:100mbit/40ms."""
    model: ModelConfig = THIN_MODEL
    """Model to train."""
    data: DataConfig = DataConfig(batch=32, sequence=128)
    """Text to train on, and the size of a batch."""
    steps: Positive = 6
    """Timed steps of each setting. Another one comes first and is not timed."""
    device: Device = "cpu"
    """cuda: ranks share the GPUs of the machine."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Data type of matrix products."""
    backward: str = ""
    """Format of gradients, as for `lowbit bench pipeline`."""
    seed: NonNegative = 0
    """Seed of weights and data order."""

    def __post_init__(self) -> None:
        if not self.cases or len(set(self.cases)) < len(self.cases):
            raise ConfigError("cases is empty or has one twice; allowed: one or more, each once")


def measure(settings: SimulateBenchmark, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Measure every setting, and predict it.

    Yields:
        Rows, one for each setting: `ranks`, `split`, `boundary`, the fields of `set_link`, `seconds` (of the median
        step), `seconds_low`, `seconds_high`, `predicted`, `error` (predicted / measured - 1), `compute_seconds`,
        `codec_seconds` (of the busiest rank, measured), `waiting_share` and `link_share` (predicted).
    """
    rows: list[dict[str, Any]] = []
    for count in sorted({case.ranks for case in settings.cases}):
        cases = [case for case in settings.cases if case.ranks == count]
        links = [case.link for case in cases]
        with tempfile.TemporaryDirectory() as folder, started(PROGRAM, count, links) as (network, ranks):
            for number, case in enumerate(cases):
                config = config_of(settings, case, f"{folder}/{number}")
                ranks.ask("open", name=str(case), config=as_mapping(config), samples=0)
                about = set_link(network, case.link)
                rows.append(_row(case, config, about, _profiles(ranks, case, settings.steps)))
                yield rows


def config_of(settings: SimulateBenchmark, case: Case, output: str) -> TrainConfig:
    """The training run of a setting."""
    pipeline = replace(PipelineConfig(ranks=case.ranks), **vars(case.split))
    return recipe(settings, case.boundary, pipeline=pipeline, output=output)


def predict(config: TrainConfig, profiles: Sequence[Mapping[str, Any]], channel: Channel, cores: int) -> Step:
    """Simulate a step with the measured seconds of its parts.

    Args:
        profiles: of each rank. channel: of each rank to all others. cores: that the ranks share.
    """
    pipeline, ranks = config.pipeline, config.pipeline.ranks
    layout = make_layout(pipeline, ranks=ranks, layers=config.model.layers)
    order = actions(
        pipeline.schedule, ranks=ranks, stages_per_rank=pipeline.stages_per_rank, microbatches=pipeline.microbatches
    )
    forward, backward = parse_pair(f"{pipeline.forward[0]} / {pipeline.backward[0]}")
    shape = (config.rows, config.data.sequence, config.model.dim)
    times = [profile["times"] for profile in profiles]
    stages = []
    for stage in range(layout.stages):
        of = times[layout.rank_of(stage)]
        share = of["rest"] / sum(order.rank == layout.rank_of(stage))  # the schedule's own work, for each action
        seconds = {name.partition(" ")[2]: value for name, value in of.items() if name.startswith(f"{stage} ")}
        computed = {name: value + share for name, value in seconds.items() if "code_" not in name}
        both = computed.get("inputs", 0.0) + computed.get("weights", 0.0)
        stages.append(
            StageTimes(
                **{"backward": both, **computed, **{k: v for k, v in seconds.items() if "code_" in k}},
                forward_bytes=forward.nbytes(shape) + CHECKSUM_BYTES,
                backward_bytes=backward.nbytes(shape) + CHECKSUM_BYTES,
            )
        )
    routes = {(a, b): a for a in range(ranks) for b in range(ranks) if a != b}
    return simulate(
        order, stages, Network(channels=[channel] * ranks, routes=routes),
        hosts=Hosts(of=[0] * ranks, cores=[min(ranks, cores)]),
        optimizer=[each["optimizer"] for each in times], averaging=[each["averaging"] for each in times],
    )  # fmt: skip


def _profiles(ranks: Workers, case: Case, steps: int) -> list[dict[str, Any]]:
    return ranks.ask("profile", name=str(case), count=steps)


def _row(
    case: Case, config: TrainConfig, about: Mapping[str, Any], profiles: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    rate = about["goodput_mbit"]
    channel = Channel(
        bytes_per_second=rate * 1e6 / 8 if rate and case.link != UNLIMITED else math.inf,
        latency=(about["rtt_ms"] or 0.0) / 2000,
        # Distant links have no token bucket.
        burst=burst_bytes(case.link.rate_mbit) if case.link.rate_mbit and not case.link.far else 0,
    )
    step = predict(config, profiles, channel, len(os.sched_getaffinity(0)))
    steps = [max(each) for each in zip(*(profile["seconds"] for profile in profiles), strict=True)]
    measured = statistics.median(steps)
    return {
        "ranks": case.ranks,
        "split": str(case.split),
        "boundary": case.boundary,
        **about,
        "seconds": measured,
        "seconds_low": min(steps),
        "seconds_high": max(steps),
        "predicted": step.seconds,
        "error": step.seconds / measured - 1,
        "compute_seconds": float(step.compute.max()),
        "codec_seconds": float(step.coding.max()),
        "waiting_share": step.waiting_share,
        "link_share": float(step.busy.max()) / step.seconds,
    }


def ranked_right(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs of formats with the same ranks, split and link whose order is predicted right, and all pairs."""
    right = pairs = 0
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            if all(a[key] == b[key] for key in ("ranks", "split", "link")):
                pairs += 1
                right += (a["seconds"] < b["seconds"]) == (a["predicted"] < b["predicted"])
    return right, pairs


def _title(rows: Sequence[Row]) -> str:
    errors = [abs(row["error"]) for row in rows]
    right, pairs = ranked_right(rows)
    return (
        f"Predicted seconds of a step: off by {statistics.median(errors):.1%} (median), at most {max(errors):.1%}; "
        f"{right} of {pairs} pairs of formats in the right order"
    )


COMMAND = Command(
    name="simulate",
    summary="Predicted seconds of a step beside measured ones, on really limited links.",
    examples=(
        "python -m benchmarks simulate --json simulate.json",
        "python -m benchmarks simulate --case 2:1F1B/1/8:fp32:100mbit/40ms",
    ),
    settings=SimulateBenchmark,
    measure=measure,
    tables=(
        Table(
            title=_title,
            columns=(
                Column("ranks", "ranks"),
                Column("split", "split"),
                LINK,
                Column("format", lambda row: pair_name(row["boundary"])),
                Column("measured", "seconds", "{:.3f} s"),
                Column("predicted", "predicted", "{:.3f} s"),
                Column("error", "error", "{:+.1%}"),
                Column("com-\npute", "compute_seconds", "{:.3f}"),
                Column("codec", "codec_seconds", "{:.3f}"),
                Column("wait", "waiting_share", "{:.0%}"),
                Column("link\nbusy", "link_share", "{:.0%}"),
            ),
        ),
    ),
    charts=(),
)
