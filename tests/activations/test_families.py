"""Floors for the families that people train: bytes that are kept, and the error of gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowbit.activations import compress_saved_, counted
from lowbit.plan.measure import gradients, relative_error
from tests.activations.family_models import FAMILIES, family_model

SIZES = {"dim": 64, "layers": 2, "vocab": 32, "sequence": 128}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_keep_little(family: str):
    plain = family_model(family, **SIZES)  # pyright: ignore
    ours = copy.deepcopy(plain)
    compress_saved_(ours)
    ids = torch.randint(32, (2, 128), generator=torch.Generator().manual_seed(5))

    def loss_of(model: torch.nn.Module) -> Tensor:
        torch.manual_seed(1)  # dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=not family.startswith("lora")):
            logits = model(input_ids=ids, use_cache=False).logits
            return functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())

    kept, losses, grads = [], [], []
    for model in (plain, ours):
        grads.append(gradients(model, lambda model=model: loss_of(model)))
        with counted(model) as saved:
            losses.append(loss_of(model))
        kept.append(saved.total)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-4, atol=0)
    assert kept[1] < 0.3 * kept[0]
    assert relative_error(grads[1], grads[0]) < 0.03
