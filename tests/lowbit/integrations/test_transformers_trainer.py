"""The callback for Hugging Face's `Trainer`; `test_pages.py` and `test_examples.py` train with it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

from lowbit.codecs import BlockFloat8
from lowbit.integrations.transformers_trainer import LowBitGradients
from tests.processes import on_ranks


def test_a_single_process_is_told_that_nothing_is_averaged(caplog: pytest.LogCaptureFixture):
    gradients = LowBitGradients(BlockFloat8())
    gradients.on_train_begin(SimpleNamespace(world_size=1), None, None, model=nn.Linear(1, 1))
    assert gradients.hook is None
    assert "LowBitGradients does nothing: Trainer trains on a single process" in caplog.text


@on_ranks
def test_wrappers_that_an_earlier_trainer_left_are_no_others() -> None:
    model = nn.Linear(64, 64)
    wrappers = [DistributedDataParallel(model) for _ in range(3)]
    gradients = LowBitGradients(BlockFloat8())
    gradients.on_train_begin(SimpleNamespace(world_size=2), None, None, model=model)
    assert all([hook for hook, _ in wrapper._comm_hooks] == [gradients.hook] for wrapper in wrappers)
    again = LowBitGradients(BlockFloat8())
    again.on_train_begin(SimpleNamespace(world_size=2), None, None, model=model)
    assert again.hook is gradients.hook, "which DDP calls"
    wrappers[-1](torch.randn(8, 64)).sum().backward()
    other = DistributedDataParallel(nn.Linear(64, 64))
    other.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="DDP's wrapper of Linear has another communication hook"):
        gradients.on_train_begin(SimpleNamespace(world_size=2), None, None, model=other.module)
