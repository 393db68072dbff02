"""Payloads do not change: every backend makes the frozen bytes."""

from collections.abc import Callable

import pytest

from lowbit import kernels
from tests.lowbit.codecs.examples import every
from tests.lowbit.codecs.golden import FOLDER

GOLDEN: list[tuple[str, Callable[[], bytes]]] = every("GOLDEN")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "content"), GOLDEN, ids=[name for name, _ in GOLDEN])
def test_payloads_are_the_frozen_ones(name: str, content: Callable[[], bytes], backend: str) -> None:
    with kernels.backend(backend):
        assert content() == (FOLDER / name).read_bytes(), f"{backend} changed the payload"


def test_every_frozen_payload_is_compared() -> None:
    assert {file.name for file in FOLDER.glob("*.bin")} == {name for name, _ in GOLDEN}
