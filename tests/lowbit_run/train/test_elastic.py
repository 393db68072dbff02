"""`lowbit train` with replicas that come and go: whole runs in processes, one of which is killed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_run.config import ConfigError
from lowbit_run.train import load
from lowbit_run.train.prepare import prepare
from tests.refused import refused

pytest.importorskip("torchft")

SETTINGS = {
    "model.dim": 64, "model.layers": 4, "data.sequence": 64, "data.batch": 8, "data.max_bytes": 400_000,
    "run.steps": 40, "run.eval_batches": 2, "run.timeout_seconds": 20, "run.progress": "false",
    "run.tensorboard": "false", "run.checkpoint_every": 10, "run.rejoin_seconds": 60, "elastic.at_least": 2,
    "elastic.error_feedback": "true", "pipeline.forward": "transform",
    "gradients.all_reduce": "GroupInt(bits=4, group=64, symmetric=True)",
}  # fmt: skip


@pytest.fixture
def lighthouse():
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


class Replica(subprocess.Popen[bytes]):
    """A launcher with its ranks. What they print is in a file: a pipe must be read all the time."""

    def __init__(self, command: list[str], printed: Path) -> None:
        self._printed = printed
        with printed.open("ab") as log:
            super().__init__(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def kill_all(self) -> None:
        """The launcher and its ranks, at once."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for pid in [self.pid, *map(int, children)]:
            os.kill(pid, signal.SIGKILL)
        self.wait()


@pytest.fixture
def start(tmp_path: Path, lighthouse: str) -> Iterator[Callable[..., Replica]]:
    """Start a replica; none outlives the test."""
    started: list[Replica] = []

    def replica(name: str, more: dict[str, Any]) -> Replica:
        own = {"elastic.lighthouse": lighthouse, "elastic.name": name, "run.output": tmp_path / name}
        words = [f"--{key}={value}" for key, value in (SETTINGS | own | more).items()]
        command = [sys.executable, "-m", "lowbit", "train", "--resume=auto", *words]
        started.append(Replica(command, tmp_path / f"{name}.log"))
        return started[-1]

    yield replica
    for each in started:
        if each.poll() is None:
            each.kill_all()


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / name / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def await_steps(folder: Path, name: str, steps: int, *replicas: Replica) -> None:
    """Until a replica has done so many steps; none of these ends before."""
    deadline = time.monotonic() + 200
    while max((line["step"] for line in lines_of(folder, name)), default=0) < steps:
        for replica in replicas:
            assert replica.poll() is None, replica.printed
        assert time.monotonic() < deadline, replicas[0].printed
        time.sleep(0.1)


def test_a_replica_of_two_stages_dies_and_returns(tmp_path: Path, start: Callable[..., Replica]):
    replicas = {name: start(name, {}) for name in "ab"}
    await_steps(tmp_path, "b", 15, *replicas.values())
    replicas["b"].kill_all()
    time.sleep(1)
    replicas["b"] = start("b", {})
    codes = {name: replica.wait(200) for name, replica in replicas.items()}
    printed = {name: replica.printed for name, replica in replicas.items()}
    assert codes == {"a": 0, "b": 0}, printed
    assert "is tried again: PeerError" in printed["a"], printed["a"]
    assert "taking over the weights of another replica" in printed["b"], printed["b"]
    for text in printed.values():
        assert "Traceback" not in text
        assert "[INFO]" not in text, "torchft's own log, which nobody asked for"
        assert text.count("torchft's own log: RUST_LOG=info") >= 1
    files = [tmp_path / name / "model" / "model.safetensors" for name in "ab"]
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == 1
    lines = lines_of(tmp_path, "a")
    steps = [line["step"] for line in lines]
    assert steps[-1] == 40
    assert steps == sorted(set(steps))
    assert 4 < lines[-1]["bits_gradients"] < 5
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_replica_that_returns_alone_goes_on_after_its_checkpoint(tmp_path: Path, start: Callable[..., Replica]):
    alone = {"elastic.at_least": 1}
    replica = start("a", alone)
    await_steps(tmp_path, "a", 15, replica)
    replica.kill_all()
    replica = start("a", alone)
    assert replica.wait(200) == 0, replica.printed
    assert [line["step"] for line in lines_of(tmp_path, "a")] == list(range(1, 41))


def test_a_replica_with_another_learning_rate_ends_and_says_why(tmp_path: Path, start: Callable[..., Replica]):
    more = {"elastic.at_least": 1, "run.steps": 100_000}
    first = start("a", more)
    await_steps(tmp_path, "a", 3, first)
    second = start("b", more | {"optimizer.lr": 0.5})
    assert second.wait(200) == 1
    assert "replicas do not agree, and b must leave: optimizer.lr is 0.5 on b, 0.001 on the others" in second.printed
    await_steps(tmp_path, "a", lines_of(tmp_path, "a")[-1]["step"] + 3, first)


class Harm:
    """What a peer sends that wants to run code here."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_weights_of_a_peer_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lowbit_run.train.elastic import _transport

    monkeypatch.chdir(tmp_path)
    limit = timedelta(seconds=5)
    sender, receiver = _transport(limit), _transport(limit)
    sent = {"user": {"default": {"model": {"w": torch.randn(3)}}}, "torchft": {"step": 3, "batches_committed": 5}}
    sender.send_checkpoint([1], 3, sent, limit)
    received = receiver.recv_checkpoint(0, sender.metadata(), 3, limit)
    assert torch.equal(received["user"]["default"]["model"]["w"], sent["user"]["default"]["model"]["w"])
    assert received["torchft"] == sent["torchft"]
    sender.disallow_checkpoint()
    sender.send_checkpoint([1], 4, {"user": Harm()}, limit)
    with pytest.raises(Exception, match="blocked|not allowed|unsupported|Unsupported"):
        receiver.recv_checkpoint(0, sender.metadata(), 4, limit)
    assert not (tmp_path / "harm").exists()


def test_settings_that_do_not_go_together(tmp_path: Path):
    def given(wrong: str) -> Any:
        config = ["elastic.lighthouse=http://127.0.0.1:1", "elastic.name=a", "pipeline.forward=transform", wrong]
        return lambda: prepare(load(None, [f"run.output={tmp_path}", *config]), ranks=4)

    later = "which a replica that comes later does not have"
    refused(
        (given("elastic.name="), ConfigError, "name is ''; allowed with elastic.lighthouse: a name that no other"),
        (given("pipeline.data_parallel=2"), ConfigError, "data_parallel is 2; allowed with elastic.lighthouse: 1"),
        (given("pipeline.forward=TransformQuant(bits='auto')"), ConfigError, later),
    )


def test_a_lighthouse_that_cannot_be_reached_is_one_line(start: Callable[..., Replica]):
    limits = {"run.timeout_seconds": 5, "run.rejoin_seconds": 8}
    replica = start("a", {"elastic.lighthouse": "http://127.0.0.1:9", **limits})
    assert replica.wait(200) == 1
    assert "lighthouse" in replica.printed.splitlines()[-1]
    assert "Traceback" not in replica.printed
