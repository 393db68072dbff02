"""`python -m benchmarks plans`: the first choice of `lowbit plan pipeline` beside every choice of a measured grid.

There are two hosts with a core each, and the second one gets only a share of its core's time. `lowbit doctor` measures
them, the plan chooses, and then every choice trains in turn, round after round.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lowbit.codecs.names import pair_name
from lowbit.config import NonNegative, Positive, section, to_toml
from lowbit.plan.cluster import Cluster
from lowbit.plan.pipeline import PipelinePlanSettings
from lowbit.plan.predict import Choice, Prediction, Predictor
from lowbit.plan.search import search
from lowbit.plan.sizes import measure_sizes
from lowbit.report import Column, Command, Row, Table
from lowbit.train.config import DataConfig, ModelConfig, PipelineConfig, Schedule
from lowbit.train.model import vocabulary
from lowbit.train.replicas import all_reduce_codec
from lowbit.train.tokenizer import load_tokenizer
from lowbit_lab.bench.recipes import PROGRAM, THIN_MODEL, as_mapping, recipe, step
from lowbit_lab.bench.settings import LINK, Device, Links, Names
from lowbit_lab.bench.workers import Workers, check_available, set_link
from lowbit_lab.network import Link, LinkUnavailable, SlowLink

_CPU = Path("/sys/fs/cgroup/cpu")  # of the first version of control groups, and of the second one:
_CPU_2 = Path("/sys/fs/cgroup")
_LEAST_US = 1_000  # of computing in a period; short periods, so that no pass fits into one


@section()
class PlansBenchmark:
    """Two unequal hosts, a model, and what the plan chooses among."""

    links: Links = (Link(25.0), Link(100.0, rtt_ms=20.0), Link(500.0))
    """Links to emulate."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of its core's time that the second host gets."""
    boundaries: Names = ("transform", "bf16")
    """Formats of activations, or of both ways."""
    schedules: tuple[Schedule, ...] = ("1F1B", "GPipe")
    """Schedules, with a stage on each host."""
    microbatch_counts: tuple[Positive, ...] = (8, 16)
    """Numbers of micro-batches."""
    first_layers: tuple[Positive, ...] = (4, 5, 6)
    """Decoder layers of the first stage, beside those of the plan. The second one gets the others."""
    model: ModelConfig = THIN_MODEL
    """Model to train."""
    data: DataConfig = DataConfig(batch=32, sequence=128)
    """Text to train on, and the size of a batch."""
    rounds: Positive = 2
    """Turns of each choice on each link."""
    steps: Positive = 2
    """Timed steps of a turn. Another one comes first and is not timed."""
    device: Device = "cpu"
    """Always the CPU."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of matrix products."""
    backward: str = ""
    """Format of gradients, as for `lowbit bench pipeline`."""
    seed: NonNegative = 0
    """Seed of weights and data order."""


@dataclass
class _Measured:
    """A choice, and the seconds of its steps."""

    number: int
    choice: Choice
    predicted: Prediction
    seconds: list[float] = field(default_factory=list)


def measure(settings: PlansBenchmark, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Plan, and measure every choice, on every link.

    Yields:
        Rows, one for each link and choice: the fields of `set_link`, `boundary`, `schedule`, `microbatches`, `layers`
        (of each stage), `planned` (whether it is the plan's first choice), `seconds` (of the median step),
        `seconds_low`, `seconds_high`, `predicted` and `best` (seconds of the link's fastest choice).

    Raises:
        LinkUnavailable: this machine does not permit such a link, or no limit of a core's time.
        ChildProcessError: a host failed.
    """
    check_available(settings.links)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, _slow(settings.share) as place, SlowLink(2, 1000.0) as network:
        for link in settings.links:
            about = set_link(network, link)
            predictor = _predictor(settings, _examine(settings, network, Path(folder), place))
            every = _choices(settings, predictor)
            with Workers(PROGRAM, 2, grouped=True, network=network) as ranks:
                for rank in range(2):
                    _confine(ranks.pids[rank], rank, place)
                for one in every:
                    _open(settings, ranks, one, folder)
                for _ in range(settings.rounds):
                    for one in every:
                        step(ranks, str(one.number), 1)
                        one.seconds += [metrics["seconds"] for metrics in step(ranks, str(one.number), settings.steps)]
            rows += [about | row for row in _rows(every)]
            yield rows


def _examine(settings: PlansBenchmark, network: SlowLink, folder: Path, place: Path | None) -> Cluster:
    """`lowbit doctor` on both hosts, at the same time."""
    pipeline = PipelineConfig(ranks=2, microbatches=settings.microbatch_counts[0])
    config = recipe(settings, settings.boundaries[0], pipeline=pipeline, threads=1)
    (folder / "run.toml").write_text(to_toml(config, meanings=False), encoding="utf-8")
    environment = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": network.address(0), "MASTER_PORT": "29400",
        "LOWBIT_SECRET": "0" * 64,
    }  # fmt: skip
    words = [sys.executable, "-m", "lowbit", "doctor", "run.toml", "--format", ",".join(settings.boundaries)]
    words += ["--output", "cluster.toml", "--overwrite", "--name"]
    processes = []
    for host in range(2):
        own = folder / f"host {host}"
        own.mkdir(exist_ok=True)
        (own / "run.toml").write_bytes((folder / "run.toml").read_bytes())
        process = network.popen(
            host, [*words, f"host {host}"], env=environment, cwd=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        _confine(process.pid, host, place)
        processes.append(process)
    for host, process in enumerate(processes):
        said = process.communicate()[0]
        if process.returncode:
            raise ChildProcessError(f"lowbit doctor on host {host} ended with {process.returncode}: {said[-2000:]}")
    return Cluster.read(str(folder / "host 0" / "cluster.toml"))


def _predictor(settings: PlansBenchmark, cluster: Cluster) -> Predictor:
    plan = PipelinePlanSettings(cluster="cluster.toml", model=settings.model, data=settings.data)
    vocab = vocabulary(settings.model, load_tokenizer(settings.data.tokenizer).size)
    sizes = measure_sizes(settings.model, vocab=vocab, sequence=settings.data.sequence, precision=settings.precision)
    return Predictor(
        cluster, sizes, sequence=settings.data.sequence, batch=settings.data.batch,
        all_reduce=all_reduce_codec(plan.gradients),
    )  # fmt: skip


def _choices(settings: PlansBenchmark, predictor: Predictor) -> list[_Measured]:
    """The plan's first choice, and the grid."""
    first = search(
        predictor, formats=settings.boundaries, schedules=settings.schedules, stages_per_rank=(1,),
        microbatches=settings.microbatch_counts, replicas=(1,),
    )[0]  # fmt: skip
    layers = first.choice.layers or predictor.layout(first.choice).layer_counts
    count = predictor.sizes.layers
    splits = dict.fromkeys((tuple(layers), *((first, count - first) for first in settings.first_layers)))
    grid = [
        Choice(replicas=1, schedule=schedule, stages_per_rank=1, microbatches=cut, layers=split, formats=(name,))
        for split, schedule, cut, name in product(
            splits, settings.schedules, settings.microbatch_counts, settings.boundaries
        )
    ]
    planned = replace(first.choice, layers=tuple(layers))
    every = [planned, *(choice for choice in grid if choice != planned)]
    return [_Measured(number, choice, predictor.predict(choice)) for number, choice in enumerate(every)]


def _open(settings: PlansBenchmark, ranks: Workers, one: _Measured, folder: str) -> None:
    choice = one.choice
    pipeline = PipelineConfig(
        ranks=2, schedule=choice.schedule, microbatches=choice.microbatches, layers=choice.layers
    )  # fmt: skip
    config = recipe(settings, choice.formats[0], pipeline=pipeline, output=f"{folder}/{one.number}", threads=1)
    ranks.ask("open", name=str(one.number), config=as_mapping(config), samples=0)


def _rows(every: Sequence[_Measured]) -> Iterator[dict[str, Any]]:
    best = min(statistics.median(one.seconds) for one in every)
    for one in every:
        yield {
            "boundary": one.choice.formats[0],
            "schedule": one.choice.schedule,
            "microbatches": one.choice.microbatches,
            "layers": list(one.choice.layers),
            "planned": not one.number,
            "seconds": statistics.median(one.seconds),
            "seconds_low": min(one.seconds),
            "seconds_high": max(one.seconds),
            "predicted": one.predicted.seconds,
            "best": best,
        }


@contextlib.contextmanager
def _slow(share: float) -> Iterator[Path | None]:
    """A control group whose processes get a share of a core's time; None for all of it."""
    if share == 1:
        yield None
        return
    first = (_CPU / "cpu.shares").exists()
    place = (_CPU if first else _CPU_2) / f"lowbit-{os.getpid()}"
    period = int(_LEAST_US / share)
    try:
        place.mkdir()
        limits = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": _LEAST_US}
        for name, value in limits.items() if first else [("cpu.max", f"{_LEAST_US} {period}")]:
            (place / name).write_text(str(value))
    except OSError as error:
        raise LinkUnavailable(f"this machine permits no limit of a core's time ({error}); allowed: --share 1") from None
    try:
        yield place
    finally:
        with contextlib.suppress(OSError):  # its processes may not have ended yet
            place.rmdir()


def _confine(process: int, host: int, place: Path | None) -> None:
    """Give a process the core of its host, the second host's in the control group."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process, {cores[host % len(cores)]})
    if host and place is not None:
        (place / "cgroup.procs").write_text(str(process))


def _chosen(rows: Sequence[Row]) -> Mapping[str, float]:
    """Seconds of the plan's first choice over those of the fastest, by link."""
    return {row["link"]: row["seconds"] / row["best"] for row in rows if row["planned"]}


def _title(rows: Sequence[Row]) -> str:
    shares = ", ".join(f"{link}: {share - 1:+.1%}" for link, share in _chosen(rows).items())
    errors = [abs(row["predicted"] / row["seconds"] - 1) for row in rows]
    return (
        f"Seconds of the plan's first choice beside the fastest: {shares}; predictions off by "
        f"{statistics.median(errors):.1%} (median), at most {max(errors):.1%}"
    )


COMMAND = Command(
    name="plans",
    summary="The first choice of `lowbit plan pipeline` beside every choice of a measured grid.",
    examples=("python -m benchmarks plans --json plans.json", "python -m benchmarks plans --link 100mbit --rounds 3"),
    settings=PlansBenchmark,
    measure=measure,
    tables=(
        Table(
            title=_title,
            columns=(
                LINK,
                Column("", lambda row: "plan" if row["planned"] else ""),
                Column("format", lambda row: pair_name(row["boundary"])),
                Column("schedule", "schedule"),
                Column("micro-\nbatches", "microbatches"),
                Column("layers", lambda row: " ".join(map(str, row["layers"]))),
                Column("measured", "seconds", "{:.3f} s"),
                Column("predicted", "predicted", "{:.3f} s"),
                Column("beside the\nfastest", lambda row: f"{row['seconds'] / row['best'] - 1:+.1%}"),
            ),
        ),
    ),
    charts=(),
)
