"""`python -m benchmarks plans` and `auto`: what a plan or a run chooses, compared with every fixed choice, measured.

`plans`: two hosts have a core each, and the second gets only a share of its core's time. `lowbit doctor` measures them,
the plan chooses, and then every choice trains in turn, round after round.

`auto`: every run trains from its first step, with everything that `lowbit train` does. The first steps, in which `auto`
chooses, are not timed. Runs of all formats take turns, round after round.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from benchmarks.simulate import Trained
from lowbit.codecs.names import pair_name
from lowbit.config import Positive, section, to_toml
from lowbit.plan.cluster import Cluster
from lowbit.plan.predict import PipelineChoice, Predictor
from lowbit.plan.search import search
from lowbit.plan.sizes import measure_sizes
from lowbit.report import Column, Command, Row, Table, summary
from lowbit.train.boundaries import AUTO_FORMATS
from lowbit.train.config import AUTO, DataConfig, GradientsConfig, PipelineConfig, Schedule, TrainConfig
from lowbit.train.model import vocabulary
from lowbit.train.replicas import all_reduce_codec
from lowbit.train.summary import read_summary
from lowbit.train.tokenizer import load_tokenizer
from lowbit_lab.bench.recipes import PROGRAM, as_mapping, check_recipes, recipe, step
from lowbit_lab.bench.settings import LINK, Links, Names
from lowbit_lab.bench.workers import UNLIMITED, Workers, check_available, set_link, started
from lowbit_lab.network import Link, LinkUnavailable, SlowLink

_CPU = Path("/sys/fs/cgroup/cpu")  # for version 1 of control groups; for version 2:
_CPU_2 = Path("/sys/fs/cgroup")
_LEAST_US = 1_000  # least computing time in a period; periods are so short that no pass fits into one
_UNTIMED = 7  # first steps of a run with `auto`: five before the choice, and two that set up the chosen formats


@section()
class PlansBenchmark(Trained):
    """Two unequal hosts, a model, and the plan's choices."""

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
    """Decoder layers of the first stage, in addition to the plan's number. The second stage gets the others."""
    rounds: Positive = 2
    """Turns of each choice on each link."""
    steps: Positive = 2
    """Timed steps of a turn. Another one comes first and is not timed."""


def measure_plans(settings: PlansBenchmark, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Plan, and measure every choice, on every link.

    Yields:
        Rows, one for each link and choice: the fields of `set_link`, `boundary`, `schedule`, `microbatches`, `layers`
        (of each stage), `planned` (whether it is the plan's first choice), `seconds` (of a step, with the
        fields of `summary`), `predicted` and `best` (seconds of the link's fastest choice).

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
            choices = _choices(settings, predictor)
            taken: list[list[float]] = [[] for _ in choices]
            with Workers(PROGRAM, 2, grouped=True, network=network) as ranks:
                for rank in range(2):
                    _confine(ranks.pids[rank], rank, place)
                for number, choice in enumerate(choices):
                    pipeline = PipelineConfig(
                        ranks=2, schedule=choice.schedule, microbatches=choice.microbatches, layers=choice.layers
                    )  # fmt: skip
                    run = {"pipeline": pipeline, "output": f"{folder}/{number}", "threads": 1}
                    config = as_mapping(recipe(settings, choice.formats[0], **run))
                    ranks.ask("open", name=str(number), config=config, samples=0)
                for _ in range(settings.rounds):
                    for number, seconds in enumerate(taken):
                        step(ranks, str(number), 1)
                        seconds += [metrics["seconds"] for metrics in step(ranks, str(number), settings.steps)]
            best = min(map(statistics.median, taken))
            rows += [
                {
                    **about, "boundary": choice.formats[0], "schedule": choice.schedule,
                    "microbatches": choice.microbatches, "layers": list(choice.layers),
                    "planned": choice is choices[0], **summary(seconds, "seconds"),
                    "predicted": predictor.predict(choice).seconds, "best": best,
                }
                for choice, seconds in zip(choices, taken, strict=True)
            ]  # fmt: skip
            yield rows


def _examine(settings: PlansBenchmark, network: SlowLink, folder: Path, place: Path | None) -> Cluster:
    """Run `lowbit doctor` on both hosts at the same time."""
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
    vocab = vocabulary(settings.model, load_tokenizer(settings.data.tokenizer).size)
    precision = "bf16" if settings.precision == "bf16" else "fp32"
    sizes = measure_sizes(settings.model, vocab=vocab, sequence=settings.data.sequence, precision=precision)
    return Predictor(
        cluster, sizes, sequence=settings.data.sequence, batch=settings.data.batch,
        all_reduce=all_reduce_codec(GradientsConfig()),
    )  # fmt: skip


def _choices(settings: PlansBenchmark, predictor: Predictor) -> list[PipelineChoice]:
    """Return the plan's first choice, and the grid."""
    first = search(
        predictor, formats=settings.boundaries, schedules=settings.schedules, stages_per_rank=(1,),
        microbatches=settings.microbatch_counts, replicas=(1,),
    )[0]  # fmt: skip
    layers = first.choice.layers or predictor.layout(first.choice).layer_counts
    count = predictor.sizes.layers
    splits = dict.fromkeys((tuple(layers), *((first, count - first) for first in settings.first_layers)))
    grid = [
        PipelineChoice(
            replicas=1, schedule=schedule, stages_per_rank=1, microbatches=cut, layers=split, formats=(name,)
        )
        for split, schedule, cut, name in product(
            splits, settings.schedules, settings.microbatch_counts, settings.boundaries
        )
    ]
    planned = replace(first.choice, layers=tuple(layers))
    return [planned, *(choice for choice in grid if choice != planned)]


@contextlib.contextmanager
def _slow(share: float) -> Iterator[Path | None]:
    """Make a control group whose processes get a share of a core's time; None for all of it."""
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
        raise LinkUnavailable(f"this machine cannot limit a core's time ({error}); allowed: --share 1") from None
    try:
        yield place
    finally:
        with contextlib.suppress(OSError):  # its processes may not have ended yet
            place.rmdir()


def _confine(process: int, host: int, place: Path | None) -> None:
    """Bind a process to the core of its host, for the second host within the control group."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process, {cores[host % len(cores)]})
    if host and place is not None:
        (place / "cgroup.procs").write_text(str(process))


def _over_best(row: Row) -> str:
    return f"{row['seconds'] / row['best'] - 1:+.1%}"


def _plans_title(rows: Sequence[Row]) -> str:
    shares = ", ".join(f"{row['link']}: {_over_best(row)}" for row in rows if row["planned"])
    errors = [abs(row["predicted"] / row["seconds"] - 1) for row in rows]
    return (
        f"Seconds of the plan's first choice compared with the fastest: {shares}; predictions off by "
        f"{statistics.median(errors):.1%} (median), at most {max(errors):.1%}"
    )


PLANS = Command(
    name="plans",
    summary="The first choice of `lowbit plan pipeline` compared with every choice of a measured grid.",
    examples=("python -m benchmarks plans --json plans.json", "python -m benchmarks plans --link 100mbit --rounds 3"),
    settings=PlansBenchmark,
    measure=measure_plans,
    tables=(
        Table(
            title=_plans_title,
            columns=(
                LINK,
                Column("", lambda row: "plan" if row["planned"] else ""),
                Column("format", lambda row: pair_name(row["boundary"])),
                Column("schedule", "schedule"),
                Column("micro-\nbatches", "microbatches"),
                Column("layers", lambda row: " ".join(map(str, row["layers"]))),
                Column("measured", "seconds", "{:.3f} s"),
                Column("predicted", "predicted", "{:.3f} s"),
                Column("over the\nfastest", _over_best),
            ),
        ),
    ),
)


@section()
class AutoBenchmark(Trained):
    """Links, fixed formats to compare with, and a model."""

    links: Links = tuple(
        replace(link, rtt_ms=rtt) for link in (Link(25.0), Link(100.0), Link(500.0), UNLIMITED) for rtt in (0.0, 40.0)
    )
    """Links to emulate."""
    boundaries: Names = AUTO_FORMATS
    """Fixed formats, of activations or of both ways."""
    data: DataConfig = DataConfig(batch=32, sequence=128, held_out_share=0.0)
    """Text to train on, and the size of a batch."""
    pipeline: PipelineConfig = PipelineConfig(ranks=2, microbatches=8)
    """Ranks, each on its own host, stages and schedule. The formats are those of `boundaries`."""
    rounds: Positive = 2
    """Runs of each format on each link."""
    steps: Positive = 8
    """Timed steps of a run. Seven others come first."""

    def __post_init__(self) -> None:
        check_recipes(self, self.pipeline)


def measure_auto(settings: AutoBenchmark, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Train with `auto` and with every fixed format on every link.

    Yields:
        Rows, one for each link and format: `boundary` ("auto" or the format), the fields of `set_link`,
        `seconds` (of a step, with the fields of `summary`), `formats` (the choices of each run with `auto`, by
        boundary; empty for a fixed format), `predicted` (seconds of the last choice, or None) and `choice` (all numbers
        of the last choice, `lowbit.train.auto.FormatChoice`, or None).
    """
    ranks_of = settings.pipeline.ranks
    rows: list[dict[str, Any]] = []
    for link in settings.links:
        # Each link gets new ranks, because a process group can only serve a few dozen runs.
        with tempfile.TemporaryDirectory() as folder, started(PROGRAM, ranks_of, [link]) as (network, ranks):
            about = set_link(network, link)
            taken: dict[str, list[dict[str, Any]]] = {name: [] for name in (AUTO, *settings.boundaries)}
            for number in range(settings.rounds):
                for index, (name, turns) in enumerate(taken.items()):
                    turns.append(_turn(ranks, config_of(settings, name, f"{folder}/{number}-{index}")))
        rows += [{"boundary": name, **about, **_row(turns)} for name, turns in taken.items()]
        yield rows


def config_of(settings: AutoBenchmark, boundary: str, output: str) -> TrainConfig:
    """Return the training run of a format, or of `auto`."""
    steps = {"steps": _UNTIMED + settings.steps, "save_model": False, "report": False, "overwrite": True}
    if boundary != AUTO:
        return recipe(settings, boundary, output=output, **steps)
    config = recipe(settings, AUTO_FORMATS[0], output=output, **steps)
    return replace(config, pipeline=replace(config.pipeline, forward=(AUTO,), backward=()))


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return the speed of `auto` over that of the best fixed format, by link."""
    found = {}
    for link in dict.fromkeys(row["link"] for row in rows):
        seconds = {row["boundary"]: row["seconds"] for row in rows if row["link"] == link}
        found[link] = min(seconds[name] for name in seconds if name != AUTO) / seconds[AUTO]
    return found


def _turn(ranks: Workers, config: TrainConfig) -> dict[str, Any]:
    """Train; return seconds of the timed steps, and the last choice."""
    steps: list[float] = []
    ranks.ask("train", config=as_mapping(config), on_progress=lambda metrics: steps.append(metrics["seconds"]))
    chosen = read_summary(Path(config.run.output) / "summary.json").formats
    return {"seconds": steps[_UNTIMED:], "chosen": chosen[-1] if chosen else None}


def _row(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [each for turn in turns for each in turn["seconds"]]
    chosen = [turn["chosen"] for turn in turns if turn["chosen"]]
    return {
        **summary(seconds, "seconds"),
        "formats": [choice["formats"] for choice in chosen],
        "predicted": chosen[-1]["predicted"] if chosen else None,
        "choice": chosen[-1] if chosen else None,
    }


def _auto_title(rows: Sequence[Row]) -> str:
    share = shares(rows)
    worst = min(share, key=lambda link: share[link])
    return f"auto has at least {share[worst]:.0%} of the speed of the best fixed format ({Link.parse(worst).title})"


def _compared(rows: Sequence[Row]) -> list[Row]:
    share = shares(rows)
    autos = {row["link"]: row for row in rows if row["boundary"] == AUTO}
    found: list[Row] = []
    for row in rows:
        chosen = " | ".join(dict.fromkeys(" + ".join(dict.fromkeys(map(pair_name, each))) for each in row["formats"]))
        auto = autos[row["link"]]
        of = auto["predicted"].get("these" if row["boundary"] == AUTO else row["boundary"])
        best = share[row["link"]] * auto["seconds"]
        found.append({**row, "chosen": chosen, "share": best / row["seconds"], "expected": of})
    return found


AUTO_COMMAND = Command(
    name="auto",
    summary="Formats that choose themselves, compared with each fixed format, on really limited links.",
    examples=(
        "python -m benchmarks auto --json auto.json",
        "python -m benchmarks auto --link 100mbit/40ms --rounds 1",
    ),
    settings=AutoBenchmark,
    measure=measure_auto,
    tables=(
        Table(
            title=_auto_title,
            rows=_compared,
            gap="link",
            columns=(
                LINK,
                Column("format", lambda row: pair_name(row["boundary"])),
                Column("a step", "seconds", "{:.3f} s"),
                Column("fastest", "seconds_low", "{:.3f}"),
                Column("slowest", "seconds_high", "{:.3f}"),
                Column("pre-\ndicted", "expected", "{:.3f}"),
                Column("of the\nbest fixed", "share", "{:.0%}"),
                Column("chosen", "chosen"),
            ),
        ),
    ),
)
