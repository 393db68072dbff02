"""The callback for Hugging Face's `Trainer`; `test_pages.py` and `test_examples.py` train with it."""

from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("transformers")

from lowbit.codecs import BlockFloat8
from lowbit.integrations.transformers_trainer import LowBitGradients


def test_a_single_process_is_told_that_nothing_is_averaged(caplog: pytest.LogCaptureFixture):
    gradients = LowBitGradients(BlockFloat8())
    gradients.on_train_begin(SimpleNamespace(world_size=1), None, None, model=nn.Linear(1, 1))
    assert gradients.hook is None
    assert "LowBitGradients does nothing: Trainer trains on a single process" in caplog.text
