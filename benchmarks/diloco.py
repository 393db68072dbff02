"""`python -m benchmarks diloco`: held-out loss and bytes of DiLoCo, by format of the pseudo-gradients.

Replicas are processes with torchft's own DiLoCo over real sockets: inner AdamW, outer SGD with Nesterov momentum 0.9
and a learning rate of 0.7. All formats see the same starting weights, samples and learning rates of a seed. Low-bit
formats have error feedback.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from benchmarks.elastic import FULL, TORCHFT, Job, Run
from lowbit.codecs import parse
from lowbit.config import ConfigError, Positive, section
from lowbit.integrations.engine import engine
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit.train.config import DataConfig, ModelConfig
from lowbit_lab.bench.settings import Names
from lowbit_lab.charts.style import title_of

DDP = "ddp"
SHORT = {"int4": "GroupInt(bits=4, group=64, symmetric=True)", "int2": "GroupInt(bits=2, group=64)"}


@section()
class DiLoCoBenchmark:
    """Formats, seeds, and the run that they share."""

    formats: Names = (DDP, FULL, "int4", "int2")
    """ddp: no DiLoCo, gradients are averaged in FP32 in each step. Others: of pseudo-gradients. fp32: torchft's own
    all-reduce. int4 and int2: in groups of 64, 4 bits symmetric. Others: codecs, by name or in full."""
    streaming: tuple[str, ...] = (FULL, "int4")
    """Formats to measure in Streaming DiLoCo, too, with two fragments and the first seed."""
    seeds: Positive = 3
    """Seeds 0, 1, ...: of weights and order of samples."""
    replicas: Annotated[int, Field(ge=2)] = 4
    """Processes."""
    steps: Positive = 320
    """Inner steps, a multiple of `sync_every`."""
    sync_every: Annotated[int, Field(ge=2)] = 16
    """Inner steps between two averages, an even number."""
    lr: float = 2e-3
    """Highest learning rate of AdamW."""
    model: ModelConfig = ModelConfig(dim=128, layers=4, heads=4)
    """Model to train, with a token for each byte."""
    data: DataConfig = DataConfig(batch=2, sequence=128, max_bytes=4_000_000)
    """Text, and samples of a replica in a step. If omitted, Python's standard library."""
    held_out_windows: Positive = 128
    """Samples of held-out text that are evaluated at the end."""

    def __post_init__(self) -> None:
        if self.steps % self.sync_every or self.sync_every % 2:
            raise ConfigError(
                f"steps is {self.steps} and sync_every is {self.sync_every}; allowed: an even number and a multiple "
                "of it"
            )
        for name in {*self.formats, *self.streaming} - {DDP, FULL}:
            parse(SHORT.get(name, name))


def measure(settings: DiLoCoBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Train with every format and seed.

    Yields:
        Rows, one for each seed, format and number of fragments: `seed`, `format`, `fragments`, `held_out_loss` (mean
        over the replicas, which differ only where a fragment's last inner steps are not averaged yet), `identical`
        (whether all replicas have the same weights), `bytes_per_token` (that a replica sends for each token that it
        trains on, by the formulas of `all_reduce_bytes` and of a ring); `over_diloco` (held-out loss minus that of
        full-precision DiLoCo with the same seed), `over_ddp`, and `bytes_under_ddp` (times fewer).

    Raises:
        EngineError: torchft is not installed.
        ChildProcessError: a replica failed.
    """
    engine("torchft.manager", **TORCHFT)
    os.environ.setdefault("RUST_LOG", "error")  # torchft's servers write a line for each heartbeat
    rows = [dict(row) for row in earlier]
    done = {(row["seed"], row["format"], row["fragments"]) for row in rows}
    for seed in range(settings.seeds):
        streaming = [(name, 2) for name in settings.streaming] if seed == 0 else []
        for name, fragments in [*((name, 1) for name in settings.formats), *streaming]:
            if (seed, name, fragments) not in done:
                about = {"seed": seed, "format": name, "fragments": fragments}
                rows.append(about | _train(settings, **about))
                yield rows


def _train(settings: DiLoCoBenchmark, seed: int, format: str, fragments: int) -> dict[str, Any]:
    """One run: its part of a row."""
    job = Job(
        codec=FULL if format == DDP else SHORT.get(format, format), model=settings.model, data=settings.data,
        replicas=settings.replicas, steps=settings.steps, seed=seed, lr=settings.lr,
        sync_every=0 if format == DDP else settings.sync_every, fragments=fragments,
        held_out_windows=settings.held_out_windows, timeout=120.0, dead_after=60.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Run(job, Path(folder), at_least=settings.replicas) as run:
        results = run.results()
    return {
        "held_out_loss": statistics.fmean(result["held_out_loss"] for result in results),
        "identical": len({result["weights"] for result in results}) == 1,
        "bytes_per_token": statistics.fmean(result["bytes_per_token"] for result in results),
    }


def means(rows: Sequence[Row]) -> list[Row]:
    """A row for each format: means over the seeds, and the standard deviation of the differences."""
    summarized: list[Row] = []
    for key in dict.fromkeys((row["format"], row["fragments"]) for row in rows):
        alike = [row for row in rows if (row["format"], row["fragments"]) == key]
        row: dict[str, Any] = {"format": key[0], "fragments": key[1], "seeds": len(alike)}
        for field in ("held_out_loss", "bytes_per_token", "over_diloco", "over_ddp", "bytes_under_ddp"):
            values = [each[field] for each in alike if each.get(field) is not None]
            row[field] = statistics.fmean(values) if values else None
            row[f"{field}_spread"] = statistics.stdev(values) if len(values) > 1 else None
        summarized.append(row)
    return summarized


def _title(row: Row) -> str:
    if row["format"] == DDP:
        return "FP32, each step"
    name = title_of(row["format"])
    return f"DiLoCo, {name}" + (f", {row['fragments']} fragments" if row["fragments"] > 1 else "")


COMMAND = Command(
    name="benchmarks diloco",
    summary="Held-out loss and bytes of DiLoCo, by format of the pseudo-gradients.",
    examples=("python -m benchmarks diloco --json diloco.json", "python -m benchmarks diloco --seeds 1 --steps 64"),
    settings=DiLoCoBenchmark,
    measure=measure,
    key=("seed", "format", "fragments"),
    free=("seeds", "formats", "streaming"),
    baselines=[
        Baseline(
            field="over_diloco", value="held_out_loss", to={"format": FULL, "fragments": 1}, alike=("seed",),
            way="minus",
        ),
        Baseline(field="over_ddp", value="held_out_loss", to={"format": DDP}, alike=("seed",), way="minus"),
        Baseline(field="bytes_under_ddp", value="bytes_per_token", to={"format": DDP}, alike=("seed",), way="under"),
    ],
    tables=[
        Table(
            title="Averages among replicas, mean over the seeds",
            rows=means,
            columns=[
                Column("averages", _title),
                Column("seeds", "seeds"),
                Column("held-out\nloss", "held_out_loss", "{:.4f}"),
                Column("over FP32\nDiLoCo", "over_diloco", "{:+.4f}"),
                Column("±", "over_diloco_spread", "{:.4f}"),
                Column("over\nDDP", "over_ddp", "{:+.4f}"),
                Column("bytes\na token", "bytes_per_token", "{:,.1f}"),
                Column("times fewer\nthan DDP", "bytes_under_ddp", "{:.0f}"),
            ],
        )
    ],
    charts=[],
)  # fmt: skip
