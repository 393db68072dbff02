from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lowbit.train import LaunchError, TrainConfig, run
from lowbit.train.summary import read_summary
from tests.ranks import Ranks
from tests.train.runs import again, curve, losses, tiny


def test_a_killed_run_is_blamed_on_its_rank_and_resumes_bit_for_bit(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    config = tiny(
        tmp_path,
        model={"family": "gpt2", "layers": 2, "dropout": 0.1},  # tied weights, random numbers
        pipeline={"forward": "aq-sgd", "backward": "int6", "warmup_steps": 3},  # state, a counter
        run={"steps": 40, "checkpoint_every": 4, "save_model": True},
    )
    whole = again(config, run={"output": str(tmp_path / "whole"), "checkpoint_every": 0})
    ranks.run(losses, whole, timeout=110)

    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(run, config)
        _wait_for_lines(config.run.output, 6, launched)
        os.kill(_process_of_rank(1), signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(LaunchError, match=r"rank 1 was ended by SIGKILL.*step-0000"):
            launched.result(timeout=60)
    assert time.monotonic() - killed < config.run.timeout_seconds
    assert "rank 0: error: rank 1 " in capfd.readouterr().err
    assert len(curve(config)) < 40

    resumed = run(again(config, run={"resume": True, "overwrite": False}))
    assert curve(config) == curve(whole)
    assert 0 < resumed.steps_here < 40
    assert resumed.held_out_loss == _held_out_loss(whole)


def _held_out_loss(config: TrainConfig) -> float | None:
    return read_summary(Path(config.run.output) / "summary.json").held_out_loss


def _wait_for_lines(output: str, count: int, running: Future[Any]) -> None:
    path = Path(output) / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert not running.done(), running.result()
        time.sleep(0.01)


def _process_of_rank(rank: int) -> int:
    """The process that this one has started for a rank."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return int(pid)
    raise AssertionError(f"no process of rank {rank}")
