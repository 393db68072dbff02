import os
import signal
from collections.abc import Iterator

import pytest

from lowbit_lab.network import SlowLink


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Processes inherit from a shell's background job that they ignore Ctrl-C; not here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["as we are", "in a user namespace"])
def privilege(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as root does where we are root, and the way everybody else must."""
    if request.param == "in a user namespace":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        if reason := SlowLink.available.__wrapped__(distance=False):
            pytest.skip(reason)
