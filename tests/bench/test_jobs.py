import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowbit.bench.emulated import Recipe
from lowbit.bench.jobs import Job, Task, finish
from lowbit.train.config import DataConfig, ModelConfig, OptimizerConfig

ENDLESS = """
from tests.bench.test_jobs import task
from lowbit.bench.jobs import finish

if __name__ == "__main__":
    list(finish([task(__file__, steps=10**9)], jobs=1, threads=1))
"""


def task(text: str, *, steps: int = 2) -> Task:
    recipe = Recipe(
        model=ModelConfig(dim=32, layers=2, heads=2), data=DataConfig(text=(text,), sequence=8, batch=2),
        optimizer=OptimizerConfig(), steps=steps, warmup_steps=0, stages=2, eval_windows=1,
    )  # fmt: skip
    return Task(Job("scratch", "fp32", 0, "fp32"), recipe)


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_error_in_a_run_is_raised_here():
    with pytest.raises(ValueError, match="missing.txt"):
        list(finish([task("missing.txt")], jobs=1, threads=1))


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, tmp_path / "endless.py"], env=environment)
    try:
        wait_until(lambda: len(children(parent.pid)) >= 2)  # a worker, and multiprocessing's own
        started = children(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(running(pid) for pid in started))
