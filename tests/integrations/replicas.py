"""Replicas for the tests of torchft: processes that train a small model, each with a manager, on data of its own."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tests.forked import CONTEXT

TIMEOUT = 8.0


class Replicas:
    """A lighthouse in this process, and replicas in processes of their own; each writes a line for each step."""

    def __init__(self, folder: Path, at_least: int = 1, **settings: Any) -> None:
        from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

        self.folder, self.settings = folder, settings
        # A replica that does not beat for two seconds is gone.
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=at_least, join_timeout_ms=10_000, heartbeat_timeout_ms=2_000
        )
        self.processes: dict[str, Any] = {}

    def start(self, name: str, work: Callable[..., None] | None = None, **more: Any) -> None:
        arguments = (self.lighthouse.address(), name, str(self.folder / f"{name}.jsonl"), self.settings | more)
        self.processes[name] = CONTEXT.Process(target=work or train, args=arguments, daemon=True)
        self.processes[name].start()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()

    def wait(self, seconds: float) -> dict[str, int]:
        """Exit codes; what runs after so many seconds is killed, and missing."""
        deadline, codes = time.monotonic() + seconds, {}
        for name, process in self.processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            else:
                codes[name] = process.exitcode
        self.lighthouse.shutdown()
        return codes

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The steps that a replica, in all its lives, has committed."""
        file = self.folder / f"{name}.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def reached(self, name: str) -> int:
        return max((line["step"] for line in self.lines(name)), default=0)


def model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def batch(replica: str, step: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """Data of a replica: a fixed teacher, seen at other places."""
    seed = int.from_bytes(hashlib.sha256(f"{replica} {step}".encode()).digest()[:4])
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(seed))
    teacher = torch.randn(width, width, generator=torch.Generator().manual_seed(1)) / width**0.5
    return x, torch.sin(x @ teacher)


def manager(address: str, name: str, settings: dict[str, Any], states: dict[str, Any]) -> Any:
    """A manager of a replica of one process."""
    from torchft.process_group import ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    from lowbit.integrations.torchft import LowBitManager

    limit = timedelta(seconds=settings.get("timeout", TIMEOUT))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = LowBitManager(
        ProcessGroupGloo(timeout=limit), codec=settings["codec"], error_feedback=settings.get("error_feedback", True),
        small=0, load_state_dict=states.get("load"), state_dict=states.get("save"),
        min_replica_size=settings.get("at_least", 1), use_async_quorum=settings.get("asynchronous", True),
        timeout=limit, quorum_timeout=timedelta(seconds=30), connect_timeout=limit, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=address, replica_id=name,
    )  # fmt: skip
    made.own_store = store  # as long as the manager
    return made


def train(address: str, name: str, file: str, settings: dict[str, Any]) -> None:
    """Train until a step is reached, with torchft's DDP and optimizer, whoever else is there."""
    from torchft import DistributedDataParallel, Optimizer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    net = model(settings.get("width", 64))
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)

    def load(states: dict[str, Any]) -> None:
        net.load_state_dict(states["model"])
        inner.load_state_dict(states["optimizer"])

    states = {"load": load, "save": lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()}}
    ours = manager(address, name, settings, states)
    replica = DistributedDataParallel(ours, net, bucket_cap_mb=0.05)
    optimizer = Optimizer(ours, inner)
    with open(file, "a") as log:
        while ours.current_step() < settings["steps"]:
            x, y = batch(name, ours.current_step(), settings.get("width", 64))
            optimizer.zero_grad()
            loss = (replica(x) - y).square().mean()
            loss.backward()
            before = ours.current_step()
            optimizer.step()
            if ours.current_step() > before:
                flat = torch.cat([p.detach().flatten() for p in net.parameters()])
                line = {
                    "step": ours.current_step(), "loss": loss.item(), "replicas": ours.num_participants(),
                    "weights": hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16], "time": time.time(),
                    "process": os.getpid(),
                }  # fmt: skip
                log.write(json.dumps(line) + "\n")
                log.flush()
            time.sleep(settings.get("pause", 0.0))
    ours.shutdown(wait=False)
