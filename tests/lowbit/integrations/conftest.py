"""A fixture that several files share."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
