"""Replicas of a small language model, one process each, that torchft joins: shared by `replicas` and `diloco`."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit.codecs import parse
from lowbit.collectives import all_reduce_bytes
from lowbit.integrations.engine import engine
from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import Order, load_data
from lowbit.train.model import build_model, next_token_loss

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["transformers.models.llama.modeling_llama", "lowbit.pipeline", "numba", __name__])
_POLL, _LATE = 0.02, 30.0

TORCHFT: Any = {"package": "torchft-nightly", "extra": "ft", "tested": "2026.10.26"}
FULL = "fp32"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every replica does.

    Args:
        codec: of gradients or pseudo-gradients; FULL: torchft's own manager.
        sync_every: inner steps of DiLoCo between two averages of a parameter; 0: no DiLoCo, gradients in each step.
        fragments: parts of the model that DiLoCo averages in turn.
        steps: optimizer steps; of DiLoCo, inner ones.
        timeout: seconds of a sum. dead_after: without a heartbeat.
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


class Run:
    """A lighthouse in this process, and replicas in processes; a context manager that ends them."""

    def __init__(self, job: Job, folder: Path, at_least: int = 1) -> None:
        coordination: Any = engine("torchft.coordination", **TORCHFT)
        self.job, self.folder = job, folder
        self.lighthouse = coordination.LighthouseServer(
            bind="127.0.0.1:0", min_replicas=at_least, join_timeout_ms=5_000,
            heartbeat_timeout_ms=int(1e3 * job.dead_after),
        )  # fmt: skip
        self.processes: list[Any] = [None] * job.replicas

    def __enter__(self) -> Run:
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
        arguments = (asdict(self.job), replica, self.lighthouse.address(), str(self.file(replica)))
        self.processes[replica] = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
        self.processes[replica].start()

    def kill(self, replica: int) -> None:
        """End a replica at once, as a machine that fails."""
        self.processes[replica].kill()
        self.processes[replica].join()

    def file(self, replica: int) -> Path:
        return self.folder / f"{replica}.jsonl"

    def lines(self, replica: int) -> list[dict[str, Any]]:
        """What a replica has written, in all its lives."""
        text = self.file(replica).read_text() if self.file(replica).exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def check(self) -> None:
        """Check that no replica has failed.

        Raises:
            ChildProcessError: one has.
        """
        for replica, process in enumerate(self.processes):
            if process.exitcode:
                raise ChildProcessError(f"replica {replica} ended with code {process.exitcode}")

    def ended(self) -> list[int]:
        """Replicas that have reached the last step."""
        return [replica for replica, process in enumerate(self.processes) if process.exitcode == 0]

    def results(self) -> list[dict[str, Any]]:
        """Wait for the replicas; the last lines of those that have reached the last step.

        One that was started again too late to do so is not waited for: there is nobody left to take weights from.
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
        """Average gradients in each step, with whoever is there; a line for each try."""
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
        """Average pseudo-gradients now and then, by torchft's DiLoCo, with the outer optimizer of its paper."""
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
        """The held-out loss, and the bytes that this replica has sent for each of its tokens."""
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
        """Of this replica's share of a step's samples; sets the step's learning rate, too."""
        warm_up = min(1.0, (step + 1) / max(1, self.job.steps // 20))
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / self.job.steps))
        ids = self.order.ids(step)[self.replica :: self.job.replicas]
        return self._cross_entropy(net, self.text.train.batch(ids))

    def _cross_entropy(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return next_token_loss(net(batch[0]).logits, batch[1])

    def _weights(self) -> str:
        """Digest of all weights."""
        digest = hashlib.sha256()
        for p in self.net.parameters():
            digest.update(p.detach().numpy().data)
        return digest.hexdigest()[:16]

    def _allreduce(self, tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        """The manager's, with the bytes counted that this replica sends."""
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


def _work(values: Mapping[str, Any], replica: int, lighthouse: str, file: str) -> None:
    """The process of a replica: train, write a line for each step, and the result."""
    torch.set_num_threads(1)
    for name in ("torchft.manager", "torchft.local_sgd", "torchft.process_group"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they write a traceback for each peer that is lost
    kinds = {"model": ModelConfig(**values["model"]), "data": DataConfig(**values["data"])}
    job = Job(**{**values, **kinds})
    trainer = _Trainer(job, replica, lighthouse)
    with open(file, "a", encoding="utf-8") as log:
        if job.sync_every:
            trainer.diloco()
        else:
            trainer.each_step(log)
        log.write(json.dumps(trainer.result()) + "\n")
    trainer.manager.shutdown(wait=False)


def _fragments(net: Any, count: int) -> list[nn.Module]:
    """The model in so many parts of successive layers, with the embedding in the first and the head in the last."""
    if count == 1:
        return [net]
    layers = list(net.model.layers)
    cuts = [len(layers) * place // count for place in range(count + 1)]
    parts = [layers[start:end] for start, end in itertools.pairwise(cuts)]
    parts[0].insert(0, net.model.embed_tokens)
    parts[-1] += [net.model.norm, net.lm_head]
    return [nn.ModuleList(part) for part in parts]
