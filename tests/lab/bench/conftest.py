from collections.abc import Iterator

import pytest

from lowbit_lab.bench import workers
from lowbit_lab.network import SlowLink
from tests.forked import Module


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Workers are forks on this machine: hosts would be processes that import everything anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlowLink, "available", staticmethod(lambda **_: "Not here."))
        patch.setattr(workers.subprocess, "Popen", Module)
        yield
