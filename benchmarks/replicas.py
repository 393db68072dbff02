"""`python -m benchmarks replicas`: training goes on while replicas are killed and restarted at random.

Each replica is a process with torchft's manager and a low-bit sum of gradients with error feedback. One is killed at a
random moment and started again at once; the next follows when all have trained together for some steps. Undisturbed
runs of several seeds tell what the final loss varies by anyway.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from benchmarks.elastic import TORCHFT, Job, Run
from lowbit.codecs import parse
from lowbit.config import NonNegative, Positive, section
from lowbit.integrations.engine import engine
from lowbit.report import Column, Command, Row, Table
from lowbit.train.config import DataConfig, ModelConfig

_POLL, _HANGS = 0.05, 120.0


@section()
class ReplicasBenchmark:
    """Replicas, how often they are killed, and what they train."""

    kills: NonNegative = 50
    """Kills in the disturbed run."""
    seeds: Positive = 3
    """Undisturbed runs, with seeds 0, 1, ...; the disturbed run has seed 0."""
    replicas: Annotated[int, Field(ge=2)] = 4
    """Processes."""
    together: Positive = 4
    """Steps that all replicas commit together before the next kill."""
    format: str = "GroupInt(bits=4, group=64, symmetric=True)"
    """Codec of gradients."""
    steps: Positive = 500
    """Committed steps of each run; kills end when few are left."""
    lr: float = 2e-3
    """Highest learning rate of AdamW."""
    model: ModelConfig = ModelConfig(dim=64, layers=2, heads=2)
    """Model to train, with a token for each byte."""
    data: DataConfig = DataConfig(batch=4, sequence=64, max_bytes=4_000_000)
    """Text, and samples of a replica in a step. If omitted, Python's standard library."""
    held_out_windows: Positive = 256
    """Samples of held-out text that are evaluated at the end."""
    dead_after: float = 2.0
    """Seconds without a heartbeat after which the lighthouse counts a replica as gone."""
    timeout: float = 5.0
    """Seconds of a sum after which a replica that does not answer fails the step."""
    kill_seed: NonNegative = 0
    """Seed of who is killed and when."""

    def __post_init__(self) -> None:
        parse(self.format)


def measure(settings: ReplicasBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Train undisturbed with every seed, and with kills.

    Yields:
        Rows, one for each run: `run` ("undisturbed" or "killed"), `seed`, `held_out_loss`, `identical` (steps after
        which all replicas that committed had the same weights), `differing` (others), `kills`; of the disturbed run
        `gap` (median over the kills of the longest pause of a survivor between two commits, from the kill until the
        killed replica commits again, in seconds), `gap_longest`, `back` (median seconds until the killed replica
        commits again), `back_longest`, `lost` (steps that survivors discarded, for each kill).

    Raises:
        EngineError: torchft is not installed.
        ChildProcessError: a replica failed by itself.
        TimeoutError: a run did not go on.
    """
    engine("torchft.manager", **TORCHFT)
    os.environ.setdefault("RUST_LOG", "error")  # torchft's servers write a line for each heartbeat
    rows = [dict(row) for row in earlier]
    done = {(row["run"], row["seed"]) for row in rows}
    runs = [("killed", 0)] if settings.kills else []
    for name, seed in [*runs, *(("undisturbed", seed) for seed in range(settings.seeds))]:
        if (name, seed) not in done:
            result = _train(settings, seed, settings.kills if name == "killed" else 0)
            rows.append({"run": name, "seed": seed, **result})
            yield rows


def _train(settings: ReplicasBenchmark, seed: int, kills: int) -> dict[str, Any]:
    job = Job(
        codec=settings.format, model=settings.model, data=settings.data, replicas=settings.replicas,
        steps=settings.steps, seed=seed, lr=settings.lr, held_out_windows=settings.held_out_windows,
        timeout=settings.timeout, dead_after=settings.dead_after,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Run(job, Path(folder), at_least=settings.replicas - 1) as run:
        blows = _disturb(run, settings, kills)
        losses = [result["held_out_loss"] for result in run.results()]
        steps = [[line for line in run.lines(replica) if line.get("committed")] for replica in range(job.replicas)]
    weights: dict[int, set[str]] = {}
    for line in itertools.chain(*steps):
        weights.setdefault(line["step"], set()).add(line["weights"])
    same = sum(len(each) == 1 for each in weights.values())
    row = {"held_out_loss": losses[0], "identical": same, "differing": len(weights) - same, "kills": len(blows)}
    for field in ("gap", "back", "lost"):
        values = [blow[field] for blow in blows]
        row[field] = statistics.median(values) if values else None
        row[f"{field}_longest"] = max(values, default=None)
    return row


def _disturb(run: Run, settings: ReplicasBenchmark, kills: int) -> list[dict[str, float]]:
    """Kill and restart replicas, one after the other, for as long as there are steps; what each kill cost."""
    chance, blows = random.Random(settings.kill_seed), []
    while len(blows) < kills:
        if not _await(run, partial(_have_committed, run, time.time(), settings.together)):
            break
        time.sleep(0.5 * chance.random())
        victim, killed = chance.randrange(settings.replicas), time.time()
        run.kill(victim)
        run.start(victim)
        if not _await(run, partial(_commits_after, run, victim, killed)):
            break
        blows.append(_cost(run, victim, killed))
    return blows


def _cost(run: Run, victim: int, killed: float) -> dict[str, float]:
    """Of a kill: the longest pause of a survivor, seconds until the victim was back, and steps that were discarded."""
    back = min(_commits_after(run, victim, killed))
    pauses, lost = [0.0], 0
    for survivor in set(range(run.job.replicas)) - {victim}:
        tries = [line for line in _tries(run, survivor) if line["time"] <= back]
        times = [*(line["time"] for line in tries if line["committed"]), back]
        pauses += [later - sooner for sooner, later in itertools.pairwise(times) if later > killed]
        lost = max(lost, sum(not line["committed"] and line["time"] > killed for line in tries))
    return {"gap": max(pauses), "back": back - killed, "lost": lost}


def _have_committed(run: Run, since: float, steps: int) -> bool:
    """Whether all replicas have committed so many steps together."""
    for replica in range(run.job.replicas):
        lines = (line for line in _tries(run, replica) if line["committed"] and line["time"] > since)
        if sum(line["replicas"] == run.job.replicas for line in lines) < steps:
            return False
    return True


def _commits_after(run: Run, replica: int, moment: float) -> list[float]:
    return [line["time"] for line in _tries(run, replica) if line["time"] > moment and line["committed"]]


def _tries(run: Run, replica: int) -> list[dict[str, Any]]:
    return [line for line in run.lines(replica) if "committed" in line]


def _await(run: Run, ready: Callable[[], object]) -> bool:
    """Wait until the run has gone on; False if it has reached its last step before.

    Raises:
        TimeoutError: it has not gone on.
    """
    deadline = time.monotonic() + _HANGS
    while not ready():
        run.check()
        if run.ended():
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"the replicas did not go on for {_HANGS:g} s")
        time.sleep(_POLL)
    return True


COMMAND = Command(
    name="benchmarks replicas",
    summary="Training goes on while replicas are killed and restarted at random.",
    examples=(
        "python -m benchmarks replicas --json replicas.json",
        "python -m benchmarks replicas --kills 3 --seeds 1 --steps 100",
    ),
    settings=ReplicasBenchmark,
    measure=measure,
    key=("run", "seed"),
    free=("seeds",),
    tables=[
        Table(
            title=lambda rows: "Replicas that are killed and restarted",
            columns=[
                Column("run", "run"),
                Column("seed", "seed"),
                Column("kills", "kills"),
                Column("held-out\nloss", "held_out_loss", "{:.4f}"),
                Column("steps\nidentical", "identical"),
                Column("not", "differing"),
                Column("gap s", "gap", "{:.1f}"),
                Column("longest", "gap_longest", "{:.1f}"),
                Column("back\nafter s", "back", "{:.1f}"),
                Column("most\nlost", "lost_longest"),
            ],
        )
    ],
    charts=[],
)  # fmt: skip
