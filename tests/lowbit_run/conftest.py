from pathlib import Path

import pytest

from lowbit_run.job import launch
from tests.forked import FORKING

REAL = ("job", "test_dates.py", "test_launch.py", "test_stop.py", "test_supervise.py")
"""Where ranks are processes as users start them."""


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks be forks, which need not import PyTorch anew."""
    if not set(REAL) & set(Path(request.path).parts):
        monkeypatch.setattr(launch, "subprocess", FORKING)
