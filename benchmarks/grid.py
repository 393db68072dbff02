"""`python -m benchmarks grid`: predicted training speed of a model by link and boundary format, on equal machines.

Nothing is measured but sizes: speeds of computing and coding are settings. With the defaults the model has the size of
GPT-2 XL, in 8 stages, on links from 100 Mbit/s to 10 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from lowbit.codecs import parse, parse_pair
from lowbit.codecs.names import pair_name
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.plan.cluster import Cluster, ClusterLink, Machine
from lowbit.plan.predict import Choice, Predictor
from lowbit.plan.sizes import measure_sizes
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit.train.config import ModelConfig, Schedule
from lowbit_lab.bench.settings import LINK, Links, Names, link_name
from lowbit_lab.charts import Bars
from lowbit_lab.network import Link

XL = ModelConfig(family="gpt2", dim=1600, layers=48, heads=25, vocab=50257, tied=False)
"""GPT-2 XL without a tied embedding, whose rows would have to cross the link."""


@section()
class GridSettings:
    """Equal machines, a model, links and formats."""

    links: Links = (Link(100.0), Link(500.0), Link(1000.0), Link(10_000.0))
    """Links between neighbours: a rate, with a round trip if there is a distance, such as 200mbit/50ms."""
    boundaries: Names = ("fp32", "bf16", "tah-quant-published", "tah-quant", "subspace", "transform")
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
    """Floating-point operations that a machine reaches, in 10^12 a second."""
    coding_gb_s: Annotated[float, Field(gt=0)] = 100.0
    """Speed of encoding and of decoding with every format, in 10^9 bytes of float32 a second, beside computing."""
    optimizer_ns: Annotated[float, Field(gt=0)] = 0.05
    """Nanoseconds of the optimizer for one parameter."""
    steps: NonNegative = 0
    """Steps of a run whose seconds are shown as well. 0: none."""

    def __post_init__(self) -> None:
        if self.batch % self.microbatches:
            raise ConfigError(f"batch is {self.batch}; allowed: a multiple of microbatches ({self.microbatches})")


def measure(settings: GridSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Predict every format on every link.

    Yields:
        Rows: `link`, `link_mbit`, `link_rtt_ms`, `boundary`, `seconds_per_step`, `tokens_per_second`, `speedup_fp32`,
        `waiting_share`, `link_share`, `bytes_per_step`, `run_seconds` (None without `steps`).
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
                Choice(
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
                    "run_seconds": settings.steps * found.seconds if settings.steps else None,
                }
            )
            yield rows


COMMAND = Command(
    name="grid",
    summary="Predicted training speed of a model by link and boundary format, on equal machines.",
    examples=(
        "python -m benchmarks grid --json grid.json",
        "python -m benchmarks grid --link 200mbit/50ms --boundary bf16,transform",
    ),
    settings=GridSettings,
    measure=measure,
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
                Column("run", "run_seconds", "{:,.0f} s"),
            ),
        ),
    ),
    charts=(
        Bars(
            title="Predicted training speed by link and boundary format", label="tokens per second",
            group=link_name, series=lambda row: pair_name(row["boundary"]), y="tokens_per_second",
        ),
    ),
)  # fmt: skip
