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
        return functional.cross_entropy((x * self.scale).to(self.dtype).float(), target, **self.kwargs)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    target[::5] = -100
    return torch.randn(ROWS, VOCAB, generator=generator) * 4, target


def both(model: nn.Module, target: Tensor) -> tuple[dict[Any, int], list[Tensor], list[Tensor]]:
    """Bytes that the compressed model saves by dtype, losses and gradients of the plain and the compressed one."""
    losses, grads, sizes = [], [], []
    for each, compressed in ((model, False), (copy.deepcopy(model), True)):
        if compressed:
            compress_saved_(nn.ModuleList([each, nn.Linear(4, 4)]), report=False)
        x = inputs()[0].requires_grad_()
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
    target = inputs()[1]
    target = target.clamp(min=0) if "ignore_index" in kwargs else target
    saved, losses, grads = both(Loss(dtype, **kwargs), target)
    assert torch.equal(*losses)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-7)
    assert saved[dtype] == 2 * ROWS * VOCAB


@pytest.mark.parametrize("kwargs", [{"label_smoothing": 0.1}, {"reduction": "none"}, {"weight": torch.ones(VOCAB)}])
def test_other_losses_are_pytorchs(kwargs: Any):
    saved, losses, grads = both(Reduced(kwargs), inputs()[1])
    assert torch.equal(*losses)
    assert torch.equal(*grads)
    assert torch.bfloat16 not in saved


class Reduced(nn.Module):
    def __init__(self, kwargs: Any) -> None:
        super().__init__()
        self.loss, self.kwargs = Loss(torch.bfloat16, **kwargs), kwargs

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(x, target).sum()


def test_logits_of_full_precision_are_left_alone():
    saved, losses, grads = both(Loss(torch.float32), inputs()[1])
    assert torch.equal(*losses)
    assert torch.equal(*grads)
    assert torch.bfloat16 not in saved


def test_rows_that_are_all_ignored_have_no_gradient():
    _, losses, grads = both(Loss(torch.bfloat16), torch.full((ROWS,), -100))
    assert losses[1].isnan()
    assert torch.equal(*grads)


def test_not_a_number_stays_visible():
    _, target = inputs()
    model = Loss(torch.bfloat16)
    with torch.no_grad():
        model.scale[3] = float("nan")
    _, losses, grads = both(model, target)
    assert losses[0].isnan()
    assert losses[1].isnan()
    assert grads[1].isnan().any() == grads[0].isnan().any()
