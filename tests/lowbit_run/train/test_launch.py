import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit_lab.network import SlowLink
from lowbit_run.config import to_toml
from lowbit_run.train import train
from lowbit_run.train.checkpoints.manifest import newest_step
from lowbit_run.train.metrics import read_metrics, read_summary
from tests.lowbit_run.train.runs import LIMIT, RESUME, again, curve, losses, tiny
from tests.processes import Ranks


@pytest.mark.timeout(300)
def test_a_killed_run_is_blamed_on_its_rank_and_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path):
    config = tiny(
        tmp_path, model={"family": "gpt2", "layers": 2, "dropout": 0.1},  # tied weights, random numbers
        pipeline={"forward": "aq-sgd", "backward": "TransformQuant(bits='auto')", "warmup_steps": 3},  # state
        run={"steps": 11, "checkpoint_every": 4, "save_model": True},
    )  # fmt: skip
    whole = again(config, run={"output": str(tmp_path / "whole"), "checkpoint_every": 0})
    expected = ranks.run(train, whole, timeout=LIMIT)[0]

    (tmp_path / "run.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "lowbit", "train", str(tmp_path / "run.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launched:
        _wait_for_lines(config.run.output, 5, lambda: launched.poll() is not None)
        os.kill(_process_of_rank(1, launched.pid), signal.SIGKILL)
        killed = time.monotonic()
        _, told = launched.communicate(timeout=60)
    assert time.monotonic() - killed < config.run.timeout_seconds
    assert launched.returncode == 1
    assert re.search(r"error: rank 1 was ended by SIGKILL.*--resume continues from step \d+", told), told
    assert "rank 0: error: rank 1 " in told
    assert len(curve(config)) < 11

    resumed = ranks.run(train, again(config, run=RESUME), timeout=LIMIT)[0]
    assert curve(config) == curve(whole)
    assert 0 < resumed.steps_here < 11
    assert resumed.held_out_loss == expected.held_out_loss
    assert list(resumed.chosen) == ["boundary 0 backward"]
    assert (resumed.chosen, resumed.bits_backward) == (expected.chosen, expected.bits_backward)


def _wait_for_lines(output: str, count: int, ended: Callable[[], bool]) -> None:
    path = Path(output) / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert not ended()
        time.sleep(0.01)


def _process_of_rank(rank: int, launcher: int | str = "self") -> int:
    """The process that a launcher, this process if omitted, has started for a rank."""
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in children.read_text().split():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return int(pid)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_on_two_machines_without_a_disk_in_common(ranks: Ranks, tmp_path: Path):
    if reason := SlowLink.available():
        pytest.skip(reason)
    pipeline = {"forward": "int4", "backward": "int6", "warmup_steps": 1}
    config = tiny(tmp_path, pipeline=pipeline, run={"checkpoint_every": 3, "save_model": True})
    (tmp_path / "config.toml").write_text(to_toml(config))
    expected = ranks.run(losses, config, timeout=LIMIT)[0]
    outputs = [tmp_path / "node-0", tmp_path / "node-1"]
    with SlowLink(hosts=2, rate_mbit=100) as link:
        nodes = [link.popen(host, _torchrun(host, link.address(0), output)) for host, output in enumerate(outputs)]
        assert [node.wait(timeout=200) for node in nodes] == [0, 0]
    found = [line["loss"] for line in read_metrics(outputs[0] / "metrics.jsonl")]
    assert [*found, read_summary(outputs[0] / "summary.json").held_out_loss] == expected
    assert (outputs[0] / "model" / "model.safetensors").exists()
    for rank, output in enumerate(outputs):
        assert [path.name for path in output.glob("checkpoints/step-00000003/*")] == [f"rank-{rank}"]
        assert newest_step(output / "checkpoints") == 3


def _torchrun(node: int, address: str, output: Path) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}",
        f"--master-addr={address}", "--master-port=29400",
        "-m", "lowbit", "train", str(output.parent / "config.toml"),
        "--run.output", str(output),
    ]  # fmt: skip


PASS_ON = """
import os, signal, subprocess, sys
import lowbit_run.job.process_group  # PyTorch starts programs when it is imported
from lowbit_run.job import launch
from lowbit_run.train import LaunchError, from_mapping
from lowbit_run.train.launch import start_ranks

start = subprocess.Popen
subprocess.Popen = lambda argv, **pipes: start([sys.executable, "-c", "import time; time.sleep(60)"], **pipes)
wait = launch._wait
launch._wait = lambda *ranks: (os.kill(os.getpid(), signal.SIGTERM), wait(*ranks))[1]
try:
    start_ranks(from_mapping({"run": {"output": sys.argv[1]}}))
except LaunchError as error:
    print(error)
"""


def test_an_interrupted_run_says_so_and_leaves_no_rank(tmp_path: Path):
    command = [sys.executable, "-c", PASS_ON, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "interrupted by SIGTERM; all ranks were ended\n"
