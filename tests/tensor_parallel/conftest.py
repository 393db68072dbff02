"""One thread for all tests, as ranks have it."""

from collections.abc import Iterator

import pytest

from tests.tensor_parallel.models import one_thread


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
