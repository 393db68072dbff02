"""Kernels are compiled once for all processes of a machine."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

fcntl = pytest.importorskip("fcntl")

SCRIPT = """
import torch
from lowbit.codecs import GroupInt
from lowbit.codecs.group_int import cpu as group_int

GroupInt().encode(torch.ones(64))
stats = group_int.encode_groups.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_one_process_compiles_and_the_others_take_what_it_left(tmp_path: Path) -> None:
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    env.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", SCRIPT]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = sorted(process.communicate(timeout=120)[0].split() for process in processes)
    assert found == [["0", "1"], ["1", "0"]], "cache hits and misses"


def test_a_process_that_stopped_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("lowbit.kernels.cpu.jit")
    monkeypatch.setattr(jit, "PATIENCE", 0.2)
    with (tmp_path / "lock").open("w") as held, (tmp_path / "lock").open("w") as other:
        jit._wait_for(held.fileno())
        began = time.monotonic()
        jit._wait_for(other.fileno())
        assert time.monotonic() - began > 0.2
        held.close()
        monkeypatch.setattr(jit, "PATIENCE", math.inf)
        jit._wait_for(other.fileno())  # which is free now
