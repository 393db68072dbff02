import os
import signal
import time

import pytest

from lowbit.bench.launch import Ranks


def test_failures_name_the_rank_and_nobody_stays():
    with Ranks(None, 2) as ranks:
        pids = [process.pid for process in ranks._processes]
        os.kill(pids[1], signal.SIGKILL)  # the other one waits for it, and would do so for long
        with pytest.raises(ChildProcessError, match="rank 1 failed: exit status -9"):
            ranks.ask("state_bytes", name="nobody")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def until_ended(program: str) -> None:
    deadline = time.monotonic() + 60
    with Ranks(None, 1, program) as ranks:
        while not ranks.ended():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_program_that_fails_is_reported_with_its_last_words():
    said = "rank 0 failed: exit status 1, .*No module named lowbit.no_such_module"
    with pytest.raises(ChildProcessError, match=said):
        until_ended("lowbit.no_such_module")


def test_a_program_that_ends_well_has_ended():
    until_ended("this")
