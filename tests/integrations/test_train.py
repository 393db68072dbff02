"""`lowbit train` with replicas that come and go: whole runs in processes, one of which is killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.config import ConfigError
from lowbit.train import load
from lowbit.train.prepare import prepare

pytest.importorskip("torchft")

SETTINGS = {
    "model.dim": 64, "model.layers": 4, "data.sequence": 64, "data.batch": 8, "data.max_bytes": 400_000,
    "run.steps": 40, "run.eval_batches": 2, "run.timeout_seconds": 20, "run.progress": "false",
    "run.tensorboard": "false", "run.checkpoint_every": 10, "run.rejoin_seconds": 60, "elastic.at_least": 2,
    "elastic.error_feedback": "true",
    "gradients.all_reduce": "GroupInt(bits=4, group=64, symmetric=True)",
}  # fmt: skip


@pytest.fixture
def lighthouse():
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def start(folder: Path, name: str, lighthouse: str, **more: Any) -> subprocess.Popen[str]:
    """A replica, in a session of its own with all of its ranks."""
    chosen = SETTINGS | {"elastic.lighthouse": lighthouse, "elastic.name": name, "run.output": folder / name}
    chosen |= {key.replace("__", "."): value for key, value in more.items()}
    options = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "lowbit", "train", "--resume=auto", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def steps_of(folder: Path, name: str) -> list[int]:
    file = folder / name / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def kill_all(process: subprocess.Popen[str]) -> None:
    """The launcher and its ranks, at once."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [process.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def test_a_replica_of_two_stages_dies_and_returns(tmp_path: Path, lighthouse: str):
    replicas = {name: start(tmp_path, name, lighthouse) for name in "ab"}
    deadline = time.monotonic() + 200
    while max(steps_of(tmp_path, "b"), default=0) < 15 and time.monotonic() < deadline:
        assert replicas["b"].poll() is None, replicas["b"].communicate()[0]
        time.sleep(0.1)
    kill_all(replicas["b"])
    time.sleep(1)
    replicas["b"] = start(tmp_path, "b", lighthouse)
    printed = {name: process.communicate(timeout=200)[0] for name, process in replicas.items()}
    assert {name: process.returncode for name, process in replicas.items()} == {"a": 0, "b": 0}, printed
    assert "is tried again: PeerError" in printed["a"], printed["a"]
    assert "taking over the weights of another replica" in printed["b"], printed["b"]
    assert "Traceback" not in printed["a"] + printed["b"]
    files = [tmp_path / name / "model" / "model.safetensors" for name in "ab"]
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == 1
    steps = steps_of(tmp_path, "a")
    assert steps[-1] == 40
    assert steps == sorted(set(steps))
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert 4 < lines[-1]["bits_gradients"] < 5
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_replica_with_another_learning_rate_ends_and_says_why(tmp_path: Path, lighthouse: str):
    first = start(tmp_path, "a", lighthouse, elastic__at_least=1, run__steps=100_000)
    while len(steps_of(tmp_path, "a")) < 3:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    second = start(tmp_path, "b", lighthouse, elastic__at_least=1, run__steps=100_000, optimizer__lr=0.5)
    printed = second.communicate(timeout=200)[0]
    assert second.returncode == 1
    assert "replicas do not agree, and b must leave: optimizer.lr is 0.5 on b, 0.001 on the others" in printed
    before = len(steps_of(tmp_path, "a"))
    deadline = time.monotonic() + 60
    while len(steps_of(tmp_path, "a")) < before + 3:
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    kill_all(first)


class Harm:
    """What a peer sends that wants to run code here."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_weights_of_a_peer_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lowbit.train.elastic import _transport

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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["elastic.name="], "elastic.name is ''; allowed with elastic.lighthouse: a name that no other replica has"),
        (["pipeline.data_parallel=2"], "pipeline.data_parallel is 2; allowed with elastic.lighthouse: 1"),
        (["pipeline.forward=SubspaceQuant(directions='auto')"], "which a replica that comes later does not have"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, overrides: list[str], message: str):
    config = ["elastic.lighthouse=http://127.0.0.1:1", "elastic.name=a", f"run.output={tmp_path}", *overrides]
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        prepare(load(None, config), ranks=4)


def test_a_lighthouse_that_cannot_be_reached_is_one_line(tmp_path: Path):
    process = start(tmp_path, "a", "http://127.0.0.1:9", run__timeout_seconds=5, run__rejoin_seconds=8)
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 1
    assert "lighthouse" in printed.splitlines()[-1]
    assert "Traceback" not in printed
