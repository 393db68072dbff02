"""Fixtures that several files share."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore

from lowbit.tensor_parallel import calibrate
from tests.tensor_parallel.models import one_thread


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained model whose heads four ranks can share, calibrations of it for 2 and 4 ranks, and one of another."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.integrations.test_transformers import SIZES, prompts, train

    path = tmp_path_factory.mktemp("model")
    with one_thread():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4}))
        train(model)
        model.eval().save_pretrained(path)
        for ranks in (2, 4):
            calibrate(model, prompts()["input_ids"], ranks=ranks).save(path / f"tp{ranks}")
        for weight in model.parameters():
            weight.data.add_(0.01)
        calibrate(model, prompts()["input_ids"], ranks=2).save(path / "other")
    return str(path)
