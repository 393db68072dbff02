"""`python -m benchmarks grid` and `arena`: predicted training speed by boundary format; only sizes are measured.

`grid`: a model on equal machines, by link and format. With the defaults it has the size of GPT-2 XL, in 8 stages, on
links from 100 Mbit/s to 10 Gbit/s.

`arena`: seconds of a step under the rules of the Protocol NanoGPT speedrun. The rules and the two published entries are
those of https://github.com/PluralisResearch/ProtocolNanoGPT at 0551bc3: a GPT of 203.8 million parameters and width
1024, 8 stages, 512 windows of 1024 tokens a step. Each stage receives over one link of 200 Mbit/s, which serves both
neighbours and which a message occupies for 50 ms longer than its bytes take. Score: steps to a held-out loss of 3.276,
times seconds of a step. The loss is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from lowbit.codecs import parse, parse_pair
from lowbit.codecs.names import pair_name
from lowbit.config import ConfigError, Positive, section
from lowbit.plan.cluster import Cluster, ClusterLink, Machine
from lowbit.plan.predict import PipelineChoice, Predictor
from lowbit.plan.sizes import measure_sizes
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit.simulate import Channel, Network, StageTimes, actions, simulate
from lowbit.train.config import ModelConfig, Schedule
from lowbit_lab.bench.settings import LINK, Links, Names
from lowbit_lab.network import Link

XL = ModelConfig(family="gpt2", dim=1600, layers=48, heads=25, vocab=50257, tied=False)
"""GPT-2 XL without a tied embedding, whose rows would have to cross the link."""


@section()
class GridSettings:
    """Equal machines, a model, links and formats."""

    links: Links = (Link(100.0), Link(500.0), Link(1000.0), Link(10_000.0))
    """Links between neighbours: a rate, with a round trip if there is a distance, such as 200mbit/50ms."""
    boundaries: Names = ("fp32", "bf16", "tah-quant-published", "tah-quant", "transform")
    """Formats of activations, by name or in full, or of both ways, such as "int4 / int6"."""
    model: ModelConfig = XL
    """The model."""
    stages: Positive = 8
    """Machines, each with a stage."""
    sequence: Positive = 1024
    """Tokens of a window."""
    batch: Positive = 32
    """Windows of a step."""
    microbatches: Positive = 32
    """Micro-batches of a step."""
    schedule: Schedule = "1F1B"
    """Schedule, with one stage on each machine."""
    tflops: Annotated[float, Field(gt=0)] = 60.0
    """Floating-point operations per second that a machine reaches, in 10^12."""
    coding_gb_s: Annotated[float, Field(gt=0)] = 100.0
    """Speed of encoding and of decoding with every format, in 10^9 bytes of float32 a second, during computing."""
    optimizer_ns: Annotated[float, Field(gt=0)] = 0.05
    """Nanoseconds that the optimizer takes for each parameter."""

    def __post_init__(self) -> None:
        if self.batch % self.microbatches:
            raise ConfigError(f"batch is {self.batch}; allowed: a multiple of microbatches ({self.microbatches})")


def measure_grid(settings: GridSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Predict every format on every link.

    Yields:
        Rows: `link`, `link_mbit`, `link_rtt_ms`, `boundary`, `seconds_per_step`, `tokens_per_second`, `speedup_fp32`,
        `waiting_share`, `link_share`, `bytes_per_step`.
    """
    sizes = measure_sizes(settings.model, vocab=settings.model.vocab, sequence=settings.sequence, precision="bf16")
    rows: list[dict[str, Any]] = []
    speed = settings.coding_gb_s
    for link in settings.links:
        between = ClusterLink(mbit=link.rate_mbit or 1e9, back_mbit=link.back_mbit, rtt_ms=link.rtt_ms)
        for boundary in settings.boundaries:
            coding = tuple({f"{codec!r}={speed}/{speed}" for codec in parse_pair(boundary)})
            machines = tuple(
                Machine(
                    name=f"machine {i}", gpus=1, tflops=settings.tflops, coding=coding,
                    optimizer_ns=settings.optimizer_ns,
                )
                for i in range(settings.stages)
            )  # fmt: skip
            predictor = Predictor(
                Cluster(machines, (between,)), sizes, sequence=settings.sequence, batch=settings.batch,
                all_reduce=parse("fp8"),
            )  # fmt: skip
            found = predictor.predict(
                PipelineChoice(
                    replicas=1, schedule=settings.schedule, stages_per_rank=1, microbatches=settings.microbatches,
                    formats=(boundary,),
                )
            )  # fmt: skip
            rows.append(
                {
                    "link": str(link),
                    "link_mbit": link.rate_mbit,
                    "link_rtt_ms": link.rtt_ms,
                    "boundary": boundary,
                    "seconds_per_step": found.seconds,
                    "tokens_per_second": settings.batch * settings.sequence / found.seconds,
                    "waiting_share": found.waiting_share,
                    "link_share": float(found.steps[0].busy.max()) / found.seconds,
                    "bytes_per_step": found.nbytes,
                }
            )
            yield rows


GRID = Command(
    name="grid",
    summary="Predicted training speed of a model by link and boundary format, on equal machines.",
    examples=(
        "python -m benchmarks grid --json grid.json",
        "python -m benchmarks grid --link 200mbit/50ms --boundary bf16,transform",
    ),
    settings=GridSettings,
    measure=measure_grid,
    baselines=[Baseline(field="speedup_fp32", value="tokens_per_second", to={"boundary": "fp32"}, alike=("link",))],
    tables=(
        Table(
            title="Predicted training speed",
            gap="link",
            columns=(
                LINK,
                Column("format", lambda row: pair_name(row["boundary"])),
                Column("a step", "seconds_per_step", "{:.2f} s"),
                Column("tokens/s", "tokens_per_second", "{:,.0f}"),
                Column("over\nfp32", "speedup_fp32", "{:.2f}x"),
                Column("wait", "waiting_share", "{:.0%}"),
                Column("link\nbusy", "link_share", "{:.0%}"),
            ),
        ),
    ),
)  # fmt: skip

_STAGES, _WINDOWS, _SEQUENCE, _WIDTH = 8, 512, 1024, 1024
_BYTES_PER_SECOND, _LATENCY = 25e6, 0.05
_STAMP_BYTES = 8  # the sender's clock, with every message


@dataclass(frozen=True)
class Entry:
    """A published entry.

    Args:
        token_bytes: bytes of a token, each way. rows: windows of a micro-batch.
        fast: seconds of a step without the slow links. slow: with them. steps: number of steps to the loss.
    """

    token_bytes: int
    rows: int
    fast: float
    slow: float
    steps: int

    @property
    def window_seconds(self) -> float:
        """Return the seconds of a window's forward and backward on a stage."""
        return self.fast / (_WINDOWS // self.rows + _STAGES - 1) / self.rows


ENTRIES = {
    "dense": Entry(2048, 8, 0.5385, 100.475, 2925),
    "ReparamSSN": Entry(322, 16, 0.6550, 19.889, 9125),
}
"""From the records of 2026-09-17 and 2026-09-18: the median `step_avg` of the loss run, and that of the timing run."""


@section()
class ArenaSettings:
    """What to compare with the published entries."""

    boundaries: Names = (
        "bf16", "tah-quant-published", "tah-quant", "int4", "transform",
        "TransformQuant(bits=2) / TransformQuant(bits=1.5, step='message')",
    )  # fmt: skip
    """Formats of activations, or of both ways."""
    rows: tuple[Positive, ...] = (4, 8, 16, 32, 64)
    """Numbers of windows in a micro-batch to choose among; the fastest is shown."""
    coding_gb_s: Annotated[float, Field(gt=0)] = 100.0
    """Speed of encoding and of decoding, in 10^9 bytes of float32 a second. Not measured: it is a setting."""


def measure_arena(settings: ArenaSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Predict the published entries and every format.

    Yields:
        Rows: `boundary`, `rows` (windows of a micro-batch), `forward`, `backward` (bits per element), `seconds`,
        `published` (seconds, or None), `steps` (of the published entry; for a format, of the dense one), `score`.
    """
    rows: list[dict[str, Any]] = []
    for name, entry in ENTRIES.items():
        row = _row(f"{name}, published", entry, entry.rows, [entry.token_bytes * entry.rows * _SEQUENCE] * 2)
        rows.append(row | {"published": entry.slow})
    for boundary in settings.boundaries:
        options = []
        for count in settings.rows:
            sizes = [codec.nbytes((count, _SEQUENCE, _WIDTH)) for codec in parse_pair(boundary)]
            seconds = 4.0 * count * _SEQUENCE * _WIDTH / (1e9 * settings.coding_gb_s)
            options.append(_row(boundary, ENTRIES["dense"], count, sizes, 0.0 if boundary == "bf16" else seconds))
        rows.append(min(options, key=lambda row: row["seconds"]))
    yield rows


def _row(boundary: str, entry: Entry, rows: int, sizes: Sequence[int], coding: float = 0.0) -> dict[str, Any]:
    """Simulate a step with the computing of `entry`, in micro-batches of `rows` windows.

    Args:
        sizes: bytes of a message forward and back. coding: seconds of encoding or of decoding one.
    """
    order = actions("1F1B", ranks=_STAGES, microbatches=_WINDOWS // rows)
    passing, longer = entry.window_seconds * rows, _STAMP_BYTES + round(_LATENCY * _BYTES_PER_SECOND)
    stage = StageTimes(
        forward=passing / 3, backward=2 * passing / 3, encode_forward=coding, decode_forward=coding,
        encode_backward=coding, decode_backward=coding,
        forward_bytes=sizes[0] + longer, backward_bytes=sizes[1] + longer,  # the latency occupies the link
    )  # fmt: skip
    into = [Channel(bytes_per_second=_BYTES_PER_SECOND)] * _STAGES
    routes = {(a, b): b for a in range(_STAGES) for b in range(_STAGES) if a != b}
    seconds = simulate(order, [stage] * _STAGES, Network(channels=into, routes=routes)).seconds
    bits = [8 * size / (rows * _SEQUENCE * _WIDTH) for size in sizes]
    return {
        "boundary": boundary, "rows": rows, "forward": bits[0], "backward": bits[1], "seconds": seconds,
        "published": None, "steps": entry.steps, "score": entry.steps * seconds,
    }  # fmt: skip


def _title(rows: Sequence[Row]) -> str:
    errors = [f"{row['seconds'] / row['published'] - 1:+.1%}" for row in rows if row["published"]]
    return f"Predicted seconds of a step by the rules of the speedrun; published entries off by {', '.join(errors)}"


ARENA = Command(
    name="arena",
    summary="Predicted seconds of a step under the rules of the Protocol NanoGPT speedrun.",
    examples=(
        "python -m benchmarks arena --json arena.json",
        "python -m benchmarks arena --boundary transform --row 8",
    ),
    settings=ArenaSettings,
    measure=measure_arena,
    tables=(
        Table(
            title=_title,
            columns=(
                Column("", lambda row: row["boundary"] if row["published"] else pair_name(row["boundary"])),
                Column("windows of a\nmicro-batch", "rows"),
                Column("bits\nforward", "forward", "{:.2f}"),
                Column("bits\nback", "backward", "{:.2f}"),
                Column("a step", "seconds", "{:.2f} s"),
                Column("published", "published", "{:.2f} s"),
                Column("steps", "steps", "{:,}"),
                Column("score", "score", "{:,.0f} s"),
            ),
        ),
    ),
)
