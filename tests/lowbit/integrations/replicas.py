"""Replicas for the tests of torchft: processes that train a small model, each with a manager, on data of its own."""

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
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

    def start(self, names: str, work: Callable[..., None] | None = None, *, until: int = 0, **more: Any) -> None:
        """Start a replica for each letter, and wait until each has reached a step."""
        for name in names:
            arguments = (self.lighthouse.address(), name, str(self.folder / f"{name}.jsonl"), self.settings | more)
            self.processes[name] = CONTEXT.Process(target=work or train, args=arguments, daemon=True)
            self.processes[name].start()
        self.await_(lambda: min(map(self.reached, names)) >= until)

    def await_(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        """Until something is so."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, "nothing happens"
            time.sleep(0.02)

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
        return [line for line in self.written(name) if "step" in line]

    def written(self, name: str) -> list[dict[str, Any]]:
        """All that a replica has written."""
        file = self.folder / f"{name}.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def reached(self, name: str) -> int:
        return max((line["step"] for line in self.lines(name)), default=0)


def model(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def batch(replica: str, step: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """Data of a replica: a fixed teacher, seen at other places."""
    seed = int.from_bytes(hashlib.sha256(f"{replica} {step}".encode()).digest()[:4])
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(seed))
    teacher = torch.randn(width, width, generator=torch.Generator().manual_seed(1)) / width**0.5
    return x, torch.sin(x @ teacher)


def manager(address: str, name: str, settings: dict[str, Any], **more: Any) -> Any:
    """A manager of a replica of one process."""
    from torchft.process_group import ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    from lowbit.integrations.torchft import LowBitManager

    limit = timedelta(seconds=settings.get("timeout", TIMEOUT))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    more = {"load_state_dict": None, "state_dict": None, "min_replica_size": settings.get("needed", 1)} | more
    made = LowBitManager(
        ProcessGroupGloo(timeout=limit), codec=settings["codec"], error_feedback=settings.get("error_feedback", True),
        small=settings.get("small", 0), use_async_quorum=settings.get("asynchronous", True), timeout=limit,
        quorum_timeout=timedelta(seconds=30), connect_timeout=limit, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=address, replica_id=name, **more,
    )  # fmt: skip
    made.own_store = store  # as long as the manager
    return made


def digest(net: nn.Module) -> str:
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


@contextlib.contextmanager
def logged(file: str) -> Iterator[Callable[..., None]]:
    """A function that writes a line of values; an error is written, too, and ends the process."""
    torch.set_num_threads(1)
    with open(file, "a") as log:

        def write(**values: Any) -> None:
            log.write(json.dumps(values) + "\n")
            log.flush()

        try:
            yield write
        except Exception as error:
            write(error=f"{type(error).__name__}: {error}")
            raise


def train(address: str, name: str, file: str, settings: dict[str, Any]) -> None:
    """Train until a step is reached, with torchft's DDP and optimizer, whoever else is there."""
    from torchft import DistributedDataParallel, Optimizer  # pyright: ignore[reportMissingImports]

    width = settings.get("width", 64)
    net = model(width)
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)

    def load(states: dict[str, Any]) -> None:
        net.load_state_dict(states["model"])
        inner.load_state_dict(states["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": inner.state_dict()}

    with logged(file) as write:
        ours = manager(address, name, settings, load_state_dict=load, state_dict=save)
        if settings.get("stops"):  # a machine that is gone just when the others connect to it
            ours._pg.reconfigure = lambda _: os.kill(os.getpid(), signal.SIGSTOP)
        replica = DistributedDataParallel(ours, net, bucket_cap_mb=0.05)
        optimizer = Optimizer(ours, inner)
        while (before := ours.current_step()) < settings["steps"]:
            x, y = batch(name, before, width)
            optimizer.zero_grad()
            loss = (replica(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            if (step := ours.current_step()) > before:
                write(
                    step=step, loss=loss.item(), replicas=ours.num_participants(), weights=digest(net),
                    time=time.time(), process=os.getpid(),
                )  # fmt: skip
            time.sleep(settings.get("pause", 0.0))
    ours.shutdown(wait=False)


def diloco(address: str, name: str, file: str, settings: dict[str, Any]) -> None:
    """Train with torchft's DiLoCo; writes what was to be averaged, what came of it, and the errors that are left."""
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False))
    for p in net.parameters():  # the same everywhere, and of equal sizes
        p.data = torch.randn(64, 64, generator=torch.Generator().manual_seed(p.numel())) / 8
    inner, parts = torch.optim.AdamW(net.parameters(), lr=3e-3), [net[0], net[2]]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    with logged(file) as write:
        ours = manager(address, name, settings | {"asynchronous": False}, init_sync=False)
        records = recorded(ours)
        with DiLoCo(ours, parts, inner, outer, sync_every=8, use_bucketization=True):
            for step in range(settings["steps"]):
                x, y = batch(name, step)
                inner.zero_grad()
                loss = (net(x) - y).square().mean()
                loss.backward()
                inner.step()
                write(step=step, loss=loss.item())
        for fragment in (0, 1):
            (left,) = [kept for key, kept in ours._feedback._kept.items() if key[0] == fragment]
            write_sums(write, records[fragment::2], left, fragment=fragment)
    ours.shutdown(wait=False)


def sums(address: str, name: str, file: str, settings: dict[str, Any]) -> None:
    """Averages of tensors with a spare replica, step after step; writes as `diloco`."""
    from torchft.manager import WorldSizeMode  # pyright: ignore[reportMissingImports]

    with logged(file) as write:
        mode = WorldSizeMode.FIXED_WITH_SPARES
        ours = manager(address, name, settings, init_sync=False, world_size_mode=mode)
        records = recorded(ours)
        for step in range(settings["steps"]):
            ours.start_quorum()
            x, _ = batch(name, step)
            ours.allreduce(x.flatten()).wait()
            assert ours.should_commit()
        (left,) = ours._feedback._kept.values()
        write_sums(write, records, left, participates=ours.is_participating())
    ours.shutdown(wait=False)


def recorded(ours: Any) -> list[tuple[Tensor, Tensor]]:
    """What a replica adds to each average from now on, as its share of the mean, and the tensor that gets the mean."""
    records: list[tuple[Tensor, Tensor]] = []
    allreduce = ours.allreduce

    def record(x: Tensor, **more: Any) -> Any:
        share = x.double() / ours.num_participants()  # waits for the quorum
        share *= ours.is_participating()
        records.append((share, x))
        return allreduce(x, **more)

    ours.allreduce = record
    return records


def write_sums(write: Callable[..., None], records: list[tuple[Tensor, Tensor]], left: Tensor, **more: Any) -> None:
    exact = torch.stack([share for share, _ in records]).sum(0)
    means = torch.stack([mean.double() for _, mean in records]).sum(0)
    write(exact=exact.flatten().tolist(), means=means.flatten().tolist(), left=left.flatten().tolist(), **more)


def dtypes(address: str, name: str, file: str, settings: dict[str, Any]) -> None:
    """Averages and sums of several dtypes and operations."""
    from torch.distributed import ReduceOp

    mine = float(ord(name))
    floats = torch.linspace(-mine, mine, 512)
    averaged = [floats.clone(), floats.bfloat16(), floats.half(), torch.full((512,), mine, dtype=torch.float64)]
    calls = [(x, ReduceOp.AVG) for x in averaged]
    calls += [(torch.arange(512) * int(mine), ReduceOp.SUM), (floats, ReduceOp.MAX)]
    with logged(file) as write:
        ours = manager(address, name, settings, init_sync=False)
        ours.start_quorum()
        for x, operation in calls:
            ours.allreduce(x, reduce_op=operation).wait()
        write(values=[x.tolist() for x, _ in calls], committed=ours.should_commit())
    ours.shutdown(wait=False)
