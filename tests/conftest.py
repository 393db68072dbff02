"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported, by whomever

from tests.processes import Ranks

SLOW = ("test_docs", "test_launch", "test_examples", "test_demo", "test_convergence", "test_held")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few long tests first, so that the two workers of `make test` end together."""
    items.sort(key=lambda item: item.path.stem not in SLOW)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four processes, started at their first use."""
    processes = Ranks(4)
    yield processes
    processes.stop()
