"""A process that has done its work ends with success, although threads are inside PyTorch when its interpreter ends."""

from pathlib import Path

import pytest

from tests.forked import run_script

PROGRAM = """
import ctypes, datetime, os, sys, time
import torch
import torch.distributed as dist
from lowbit.wire.store import bounded

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)  # while the interpreter ends

def program():
    sys.modules["slow"] = Slow()
    store = dist.HashStore()
    {work}
    ctypes.pythonapi.Py_Exit(0)  # as an interpreter ends that has run a script

children = [os.fork() or program() for _ in range(6)]
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(f"ended with {{codes}}" if any(codes) else 0)
"""
STORE = """
    try:
        bounded(lambda: store.wait(["never"], datetime.timedelta(seconds=0.8)), 0.1)
    except TimeoutError:
        pass
"""
# Gloo's thread takes the interpreter's lock for each tensor that it releases.
GLOO = """
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tensors = [torch.zeros(1) for _ in range(20_000)]
    work = dist.group.WORLD.allreduce_coalesced(tensors)
    work.wait()
    del tensors, work
"""


@pytest.mark.parametrize(
    "work", [STORE, pytest.param(GLOO, marks=pytest.mark.slow)], ids=["a call of the store", "a collective"]
)
def test_threads_rest_before_the_interpreter_ends(tmp_path: Path, work: str):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(work=work.strip()))
    done = run_script(script, folder=tmp_path)
    assert done.code == 0, done.output
