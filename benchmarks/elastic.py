"""`python -m benchmarks replicas` and `diloco`: replicas of a small model, one process each, that torchft joins.

`replicas`: training continues while replicas are killed and restarted at random. Gradients are summed in few bits with
error feedback. A replica is killed at a random moment and restarted at once; the next is killed after all have trained
together for some steps. Undisturbed runs of several seeds show how much the final loss varies in any case.

`diloco`: held-out loss and bytes of DiLoCo, by format of the pseudo-gradients: torchft's own DiLoCo over real sockets,
with inner AdamW, and outer SGD with Nesterov momentum 0.9 and a learning rate of 0.7. All formats see the same starting
weights, samples and learning rates of a seed. Low-bit formats have error feedback.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit.codecs import parse
from lowbit.collectives import all_reduce_bytes
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.integrations.engine import engine
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import Order, load_data
from lowbit.train.model import build_model, next_token_loss
from lowbit_lab.bench.settings import Names
from lowbit_lab.charts.style import title_of

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["transformers.models.llama.modeling_llama", "lowbit.pipeline", "numba", __name__])
_POLL, _LATE, _HANGS = 0.05, 30.0, 120.0

TORCHFT: Any = {"package": "torchft-nightly", "extra": "ft", "tested": "2026.10.26"}
FULL, DDP = "fp32", "ddp"
SHORT = {"int4": "GroupInt(bits=4, group=64, symmetric=True)", "int2": "GroupInt(bits=2, group=64)"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The task of every replica.

    Args:
        codec: of gradients or pseudo-gradients; FULL: torchft's own manager.
        sync_every: inner steps of DiLoCo between two averages of a parameter; 0: no DiLoCo, gradients in each step.
        fragments: parts of the model that DiLoCo averages in turn.
        steps: optimizer steps; with DiLoCo, inner ones.
        timeout: seconds for a sum. dead_after: seconds without a heartbeat.
    """

    codec: str
    model: ModelConfig
    data: DataConfig
    replicas: int
    steps: int
    seed: int
    lr: float
    sync_every: int = 0
    fragments: int = 1
    held_out_windows: int = 128
    timeout: float = 60.0
    dead_after: float = 5.0


class ReplicaRun:
    """A lighthouse in this process, and replicas in processes; a context manager that ends them."""

    def __init__(self, job: Job, folder: Path, at_least: int = 1) -> None:
        coordination: Any = engine("torchft.coordination", **TORCHFT)
        self.job, self.folder = job, folder
        self.lighthouse = coordination.LighthouseServer(
            bind="127.0.0.1:0", min_replicas=at_least, join_timeout_ms=5_000,
            heartbeat_timeout_ms=int(1e3 * job.dead_after),
        )  # fmt: skip
        self.processes: list[Any] = [None] * job.replicas

    def __enter__(self) -> ReplicaRun:
        for replica in range(self.job.replicas):
            self.start(replica)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.lighthouse.shutdown()

    def start(self, replica: int) -> None:
        """Start a replica; again after `kill`."""
        arguments = (self.job, replica, self.lighthouse.address(), str(self.file(replica)))
        self.processes[replica] = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
        self.processes[replica].start()

    def kill(self, replica: int) -> None:
        """End a replica at once, like a machine failure."""
        self.processes[replica].kill()
        self.processes[replica].join()

    def file(self, replica: int) -> Path:
        return self.folder / f"{replica}.jsonl"

    def lines(self, replica: int) -> list[dict[str, Any]]:
        """Return the lines that a replica has written, including those before it was killed."""
        text = self.file(replica).read_text() if self.file(replica).exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def check(self) -> None:
        """Check that no replica has failed.

        Raises:
            ChildProcessError: a replica has failed.
        """
        for replica, process in enumerate(self.processes):
            if process.exitcode:
                raise ChildProcessError(f"replica {replica} ended with code {process.exitcode}")

    def ended(self) -> list[int]:
        """Return the replicas that have reached the last step."""
        return [replica for replica, process in enumerate(self.processes) if process.exitcode == 0]

    def results(self) -> list[dict[str, Any]]:
        """Wait for the replicas, and return the last lines of those that have reached the last step.

        A replica that was restarted too late to do so is not waited for: no replica is left to take weights from.
        """
        late = None
        while any(process.is_alive() for process in self.processes) and (late is None or time.monotonic() < late):
            self.check()
            if self.ended():
                late = late or time.monotonic() + _LATE
            time.sleep(_POLL)
        return [self.lines(replica)[-1] for replica in self.ended()]


class _Trainer:
    """One replica: its model, optimizer, manager and data."""

    def __init__(self, job: Job, replica: int, lighthouse: str) -> None:
        self.job, self.replica = job, replica
        self.text = load_data(job.data)
        self.net = build_model(job.model, vocab=256, sequence=job.data.sequence, seed=job.seed)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1)
        batch = job.replicas * job.data.batch
        self.order = Order(samples=len(self.text.train), batch=batch, seed=job.seed)
        self.manager = self._manager(lighthouse)
        self.sent, self._average = 0, self.manager.allreduce
        self.manager.allreduce = self._allreduce

    def each_step(self, log: TextIO) -> None:
        """Average gradients in each step, with the replicas that are present; write a line for each try."""
        torchft: Any = engine("torchft", **TORCHFT)
        replica = torchft.DistributedDataParallel(self.manager, self.net)
        optimizer = torchft.Optimizer(self.manager, self.optimizer)
        while (step := self.manager.current_step()) < self.job.steps:
            optimizer.zero_grad()
            self._loss(replica, step).backward()
            optimizer.step()
            now = self.manager.current_step()
            line = {"step": now, "committed": now > step, "time": time.time(), "weights": self._weights()}
            log.write(json.dumps(line | {"replicas": self.manager.num_participants()}) + "\n")
            log.flush()

    def diloco(self) -> None:
        """Average pseudo-gradients periodically by torchft's DiLoCo, with the outer optimizer of its paper."""
        local_sgd: Any = engine("torchft.local_sgd", **TORCHFT)
        parts = _fragments(self.net, self.job.fragments)
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        with local_sgd.DiLoCo(
            self.manager, parts, self.optimizer, outer, sync_every=self.job.sync_every, use_bucketization=True
        ):
            for step in range(self.job.steps):
                self.optimizer.zero_grad()
                self._loss(self.net, step).backward()
                self.optimizer.step()

    def result(self) -> dict[str, Any]:
        """Return the held-out loss, and the bytes that this replica has sent for each of its tokens."""
        windows = self.text.held_out
        ids = torch.arange(min(len(windows), self.job.held_out_windows))
        with torch.no_grad():
            losses = [float(self._cross_entropy(self.net, windows.batch(part))) for part in ids.split(16)]
        tokens = self.job.steps * self.job.data.batch * self.job.data.sequence
        return {
            "held_out_loss": sum(losses) / len(losses), "bytes_per_token": self.sent / tokens,
            "weights": self._weights(),
        }  # fmt: skip

    def _loss(self, net: nn.Module, step: int) -> Tensor:
        """Compute the loss of this replica's share of a step's samples; also set the step's learning rate."""
        warm_up = min(1.0, (step + 1) / max(1, self.job.steps // 20))
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / self.job.steps))
        ids = self.order.ids(step)[self.replica :: self.job.replicas]
        return self._cross_entropy(net, self.text.train.batch(ids))

    def _cross_entropy(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return next_token_loss(net(batch[0]).logits, batch[1])

    def _weights(self) -> str:
        """Return a digest of all weights."""
        digest = hashlib.sha256()
        for p in self.net.parameters():
            digest.update(p.detach().numpy().data)
        return digest.hexdigest()[:16]

    def _allreduce(self, tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        """Call the manager's all-reduce, and count the bytes that this replica sends."""
        ranks, numel = self.job.replicas, tensor.numel()
        if self.job.codec == FULL:
            self.sent += 2 * (ranks - 1) * 4 * numel // ranks
        else:
            self.sent += all_reduce_bytes(numel, parse(self.job.codec), rank=self.replica, ranks=ranks)
        return self._average(tensor, *arguments, **more)

    def _manager(self, lighthouse: str) -> Any:
        job = self.job
        groups: Any = engine("torchft.process_group", **TORCHFT)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=job.timeout)
        options = {
            "load_state_dict": None if job.sync_every else self._load,  # DiLoCo registers what it needs
            "state_dict": None if job.sync_every else self._save, "min_replica_size": 1,
            "use_async_quorum": not job.sync_every, "timeout": limit, "quorum_timeout": timedelta(seconds=120),
            "connect_timeout": limit, "rank": 0, "world_size": 1, "store_addr": "127.0.0.1",
            "store_port": self._store.port, "lighthouse_addr": lighthouse, "replica_id": f"replica{self.replica}",
            "init_sync": False,
        }  # fmt: skip
        group = groups.ProcessGroupGloo(timeout=limit)
        if job.codec == FULL:
            manager: Any = engine("torchft.manager", **TORCHFT)
            return manager.Manager(group, **options)
        from lowbit.integrations.torchft import LowBitManager

        return LowBitManager(group, codec=parse(job.codec), error_feedback=True, **options)

    def _save(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, states: dict[str, Any]) -> None:
        self.net.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])


def _work(job: Job, replica: int, lighthouse: str, file: str) -> None:
    """Run the process of a replica: train, and write a line for each step and the result."""
    torch.set_num_threads(1)
    for name in ("torchft.manager", "torchft.local_sgd", "torchft.process_group"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they log a traceback for each lost peer
    trainer = _Trainer(job, replica, lighthouse)
    with open(file, "a", encoding="utf-8") as log:
        if job.sync_every:
            trainer.diloco()
        else:
            trainer.each_step(log)
        log.write(json.dumps(trainer.result()) + "\n")
    trainer.manager.shutdown(wait=False)


def _fragments(net: Any, count: int) -> list[nn.Module]:
    """Split the model into `count` parts of successive layers; the first has the embedding, the last the head."""
    if count == 1:
        return [net]
    layers = list(net.model.layers)
    cuts = [len(layers) * place // count for place in range(count + 1)]
    parts = [layers[start:end] for start, end in itertools.pairwise(cuts)]
    parts[0].insert(0, net.model.embed_tokens)
    parts[-1] += [net.model.norm, net.lm_head]
    return [nn.ModuleList(part) for part in parts]


def _rows(
    earlier: Sequence[Row], cases: Iterable[dict[str, Any]], train: Callable[..., dict[str, Any]]
) -> Iterator[Sequence[Row]]:
    """Train every case without an earlier row; rows are cases with the fields that `train` returns."""
    engine("torchft.manager", **TORCHFT)
    os.environ.setdefault("RUST_LOG", "error")  # torchft's servers write a line for each heartbeat
    rows = [dict(row) for row in earlier]
    for case in cases:
        if not any(case.items() <= row.items() for row in rows):
            rows.append(case | train(**case))
            yield rows


@section()
class ReplicasBenchmark:
    """Replicas, the number of kills, and the training."""

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
    """Seed of which replica is killed and when."""

    def __post_init__(self) -> None:
        parse(self.format)


def measure_replicas(settings: ReplicasBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Train undisturbed with every seed, and with kills.

    Yields:
        Rows, one for each run: `run` ("undisturbed" or "killed"), `seed`, `held_out_loss`, `identical` (steps after
        which all replicas that committed had the same weights), `differing` (others), `kills`. The disturbed run adds
        `gap` (the longest pause of a survivor between two commits, from the kill until the killed replica commits
        again, in seconds, median over the kills), `gap_longest`, `back` (seconds until the killed replica commits
        again, median), `back_longest`, `lost` (steps that survivors discarded, for each kill).

    Raises:
        EngineError: torchft is not installed.
        ChildProcessError: a replica failed without being killed.
        TimeoutError: a run made no progress.
    """
    cases = [("undisturbed", seed) for seed in range(settings.seeds)]
    if settings.kills:
        cases.insert(0, ("killed", 0))
    return _rows(earlier, ({"run": run, "seed": seed} for run, seed in cases), partial(_replicas, settings))


def _replicas(settings: ReplicasBenchmark, run: str, seed: int) -> dict[str, Any]:
    job = Job(
        codec=settings.format, model=settings.model, data=settings.data, replicas=settings.replicas,
        steps=settings.steps, seed=seed, lr=settings.lr, held_out_windows=settings.held_out_windows,
        timeout=settings.timeout, dead_after=settings.dead_after,
    )  # fmt: skip
    at_least = settings.replicas - 1
    with tempfile.TemporaryDirectory() as folder, ReplicaRun(job, Path(folder), at_least=at_least) as running:
        costs = _disturb(running, settings, settings.kills if run == "killed" else 0)
        losses = [result["held_out_loss"] for result in running.results()]
        steps = [[line for line in running.lines(replica) if line.get("committed")] for replica in range(job.replicas)]
    weights: dict[int, set[str]] = {}
    for line in itertools.chain(*steps):
        weights.setdefault(line["step"], set()).add(line["weights"])
    same = sum(len(each) == 1 for each in weights.values())
    row = {"held_out_loss": losses[0], "identical": same, "differing": len(weights) - same, "kills": len(costs)}
    for field in ("gap", "back", "lost"):
        values = [cost[field] for cost in costs]
        row[field] = statistics.median(values) if values else None
        row[f"{field}_longest"] = max(values, default=None)
    return row


def _disturb(run: ReplicaRun, settings: ReplicasBenchmark, kills: int) -> list[dict[str, float]]:
    """Kill and restart replicas, one after the other, while steps are left; return the cost of each kill."""
    chance, costs = random.Random(settings.kill_seed), []
    while len(costs) < kills:
        if not _await(run, partial(_have_committed, run, time.time(), settings.together)):
            break
        time.sleep(0.5 * chance.random())
        victim, killed = chance.randrange(settings.replicas), time.time()
        run.kill(victim)
        run.start(victim)
        if not _await(run, partial(_commits_after, run, victim, killed)):
            break
        costs.append(_cost(run, victim, killed))
    return costs


def _cost(run: ReplicaRun, victim: int, killed: float) -> dict[str, float]:
    """Return for a kill: a survivor's longest pause, seconds until the victim was back, and discarded steps."""
    back = min(_commits_after(run, victim, killed))
    pauses, lost = [0.0], 0
    for survivor in set(range(run.job.replicas)) - {victim}:
        tries = [line for line in _tries(run, survivor) if line["time"] <= back]
        times = [*(line["time"] for line in tries if line["committed"]), back]
        pauses += [later - sooner for sooner, later in itertools.pairwise(times) if later > killed]
        lost = max(lost, sum(not line["committed"] and line["time"] > killed for line in tries))
    return {"gap": max(pauses), "back": back - killed, "lost": lost}


def _have_committed(run: ReplicaRun, since: float, steps: int) -> bool:
    """Whether all replicas have committed `steps` steps together."""
    for replica in range(run.job.replicas):
        lines = (line for line in _tries(run, replica) if line["committed"] and line["time"] > since)
        if sum(line["replicas"] == run.job.replicas for line in lines) < steps:
            return False
    return True


def _commits_after(run: ReplicaRun, replica: int, moment: float) -> list[float]:
    return [line["time"] for line in _tries(run, replica) if line["time"] > moment and line["committed"]]


def _tries(run: ReplicaRun, replica: int) -> list[dict[str, Any]]:
    return [line for line in run.lines(replica) if "committed" in line]


def _await(run: ReplicaRun, ready: Callable[[], object]) -> bool:
    """Wait until `ready` holds; return False if a replica reaches the last step first.

    Raises:
        TimeoutError: it takes too long.
    """
    deadline = time.monotonic() + _HANGS
    while not ready():
        run.check()
        if run.ended():
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"the replicas made no progress for {_HANGS:g} s")
        time.sleep(_POLL)
    return True


REPLICAS = Command(
    name="benchmarks replicas",
    summary="Training continues while replicas are killed and restarted at random.",
    examples=(
        "python -m benchmarks replicas --json replicas.json",
        "python -m benchmarks replicas --kills 3 --seeds 1 --steps 100",
    ),
    settings=ReplicasBenchmark,
    measure=measure_replicas,
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
)  # fmt: skip


@section()
class DiLoCoBenchmark:
    """Formats, seeds, and the settings that all runs share."""

    formats: Names = (DDP, FULL, "int4", "int2")
    """ddp: no DiLoCo, gradients are averaged in FP32 in each step. All others are formats of pseudo-gradients. fp32:
    torchft's own all-reduce. int4 and int2: in groups of 64, 4 bits symmetric. Or codecs, by name or in full."""
    streaming: tuple[str, ...] = (FULL, "int4")
    """Formats to measure in Streaming DiLoCo as well, with two fragments and the first seed."""
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


def measure_diloco(settings: DiLoCoBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
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
    cases = [(seed, name, 1) for seed in range(settings.seeds) for name in settings.formats]
    cases += [(0, name, 2) for name in settings.streaming]
    keys = ("seed", "format", "fragments")
    return _rows(earlier, (dict(zip(keys, case, strict=True)) for case in cases), partial(_diloco, settings))


def _diloco(settings: DiLoCoBenchmark, seed: int, format: str, fragments: int) -> dict[str, Any]:
    job = Job(
        codec=FULL if format == DDP else SHORT.get(format, format), model=settings.model, data=settings.data,
        replicas=settings.replicas, steps=settings.steps, seed=seed, lr=settings.lr,
        sync_every=0 if format == DDP else settings.sync_every, fragments=fragments,
        held_out_windows=settings.held_out_windows, timeout=120.0, dead_after=60.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ReplicaRun(job, Path(folder), at_least=settings.replicas) as run:
        results = run.results()
    return {
        "held_out_loss": statistics.fmean(result["held_out_loss"] for result in results),
        "identical": len({result["weights"] for result in results}) == 1,
        "bytes_per_token": statistics.fmean(result["bytes_per_token"] for result in results),
    }


def means(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each format: means over the seeds, and the standard deviation of the differences."""
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


DILOCO = Command(
    name="benchmarks diloco",
    summary="Held-out loss and bytes of DiLoCo, by format of the pseudo-gradients.",
    examples=("python -m benchmarks diloco --json diloco.json", "python -m benchmarks diloco --seeds 1 --steps 64"),
    settings=DiLoCoBenchmark,
    measure=measure_diloco,
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
)  # fmt: skip
