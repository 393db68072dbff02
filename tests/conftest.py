"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported, by whomever

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to four processes, started at their first use."""
    processes = Ranks(4)
    yield processes
    processes.stop()
