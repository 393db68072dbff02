"""Cross-entropy inside a compressed model: the same loss, the same gradients, half the bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import compress_saved_
from tests.activations.models import saved_bytes

ROWS, VOCAB = 24, 96


class Loss(nn.Module):
    """Logits in a dtype, cast to float32 as Hugging Face's models do."""

    def __init__(self, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__()
        self.scale, self.dtype, self.kwargs = nn.Parameter(torch.ones(VOCAB)), dtype, kwargs

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy((x * self.scale).to(self.dtype).float(), target, **self.kwargs).sum()


def both(model: nn.Module, *, ignored: slice = slice(None, None, 5)) -> tuple[dict[Any, int], Any, Any]:
    """Bytes that the compressed model saves by dtype; losses and gradients of the plain and the compressed one."""
    generator = torch.Generator().manual_seed(3)
    data, target = torch.randn(ROWS, VOCAB, generator=generator) * 4, torch.arange(ROWS)
    data[0] = data[0].bfloat16()  # the first row alone does not tell
    target[ignored] = model.kwargs.get("ignore_index", -100)
    losses, grads, sizes = [], [], []
    for each in (model, copy.deepcopy(model)):
        if each is not model:
            compress_saved_(nn.ModuleList([each, nn.Linear(4, 4)]))
        x = data.clone().requires_grad_()
        with saved_bytes(each) as saved:
            loss = each(x, target)
        (loss * 3).backward()
        losses.append(loss.detach())
        sizes.append(saved)
        grads.append(x.grad)
    return sizes[1], losses, grads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kwargs", [{}, {"reduction": "sum"}, {"ignore_index": 7}], ids=str)
@pytest.mark.parametrize("chunk", [1 << 22, 200])
def test_logits_are_saved_in_16_bits(dtype: torch.dtype, kwargs: Any, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowbit.activations.handlers._CHUNK", chunk)
    saved, losses, grads = both(Loss(dtype, **kwargs))
    assert torch.equal(*losses)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-7)
    assert saved[dtype] == 2 * ROWS * VOCAB


@pytest.mark.parametrize("kwargs", [{"label_smoothing": 0.1}, {"reduction": "none"}, {"weight": torch.ones(VOCAB)}, {}])
def test_other_losses_and_logits_are_pytorchs(kwargs: Any):
    saved, losses, grads = both(Loss(torch.bfloat16 if kwargs else torch.float32, **kwargs))
    assert torch.equal(*losses)
    assert torch.equal(*grads)
    assert torch.bfloat16 not in saved


def test_not_a_number_stays_visible():
    _, losses, grads = both(Loss(torch.bfloat16), ignored=slice(None))
    assert losses[1].isnan()
    assert torch.equal(*grads)  # none for rows that are all ignored
    model = Loss(torch.bfloat16)
    model.scale.data[3] = float("nan")
    _, losses, grads = both(model)
    assert losses[1].isnan()
    assert torch.equal(grads[1].isnan(), grads[0].isnan())
