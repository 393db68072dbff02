"""Fixtures that several folders of tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported, by whomever

from tests.forked import share
from tests.processes import Ranks

torch.set_num_threads(1)

TESTS = Path(__file__).parent
LONG = [
    *("lowbit_lab/bench/test_demo.py", "lowbit_lab/bench/test_convergence.py", "lowbit_run/doctor/test_network.py"),
    *("test_examples.py", "test_docs.py", "lowbit/integrations/test_pages.py", "lowbit/pipeline/test_guard.py"),
    *("lowbit_run/train/test_tied.py", "lowbit_run/doctor/test_meeting.py", "lowbit_run/train/test_loop.py"),
    *("lowbit_run/train/test_launch.py", "lowbit_run/plan/test_pipeline.py", "lowbit_run/generate/test_generate.py"),
    *("lowbit_run/train/checkpoints/test_resume.py", "lowbit_run/train/test_auto.py", "lowbit_run/train/test_stop.py"),
    *("fuzz/test_fuzz.py", "lowbit/wire/test_connections.py", "lowbit_run/job/test_peers.py"),
    *("lowbit_lab/bench/test_gradients.py", "lowbit_lab/bench/test_pipeline.py", "lowbit_lab/network/test_distance.py"),
    *("lowbit_run/job/test_process_group.py", "lowbit/pipeline/test_transport.py", "lowbit_lab/bench/test_memory.py"),
]
"""Files that take longest. A file is one worker's: the last one to start keeps the others waiting."""


def pytest_configure(config: pytest.Config) -> None:
    """Start before the workers what they share."""
    if getattr(config.option, "numprocesses", None):
        share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that workers end together. The laboratory's tests are marked `lab`."""
    for item in items:
        if TESTS / "lowbit_lab" in item.path.parents and item.path.name != "test_tour.py":
            item.add_marker(pytest.mark.lab)
    places = {TESTS / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """As ranks have it: bits may depend on threads, and several wait for cores on which other tests compute."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four processes, started at their first use."""
    processes = Ranks(4)
    yield processes
    processes.stop()
