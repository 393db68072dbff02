from collections.abc import Iterator
from pathlib import Path

import pytest

from lowbit import kernels
from lowbit_lab.bench import workers
from lowbit_lab.network import SlowLink
from tests.forked import FORKING


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Workers are forks on this machine: hosts would be processes that import everything anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlowLink, "available", staticmethod(lambda **_: "Not here."))
        patch.setattr(workers, "subprocess", FORKING)
        yield


@pytest.fixture
def uncompiled() -> Iterator[None]:
    with kernels.backend("reference"):
        yield


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file to train on."""
    file = tmp_path / "text.txt"
    file.write_text(" ".join(str(i * i) for i in range(2000)))
    return str(file)
