"""One thread: products as small as these take longer with more, and much longer while other tests compute."""

from collections.abc import Iterator

import pytest

from tests.tensor_parallel.models import one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
