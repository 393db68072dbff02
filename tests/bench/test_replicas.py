from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowbit.bench.convergence import Settings
from lowbit.bench.emulated import codec_pair, gradient_codec
from lowbit.bench.replicas import Replicas
from lowbit.codecs import BlockFloat8, Cast


def mean_square(model: nn.Module):
    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return (model(inputs) - targets).square().mean()

    return loss


def test_without_loss_it_is_one_large_batch() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4), torch.randn(6, 8), torch.randn(6, 4)
    expected = mean_square(model)(x, y)
    whole = torch.autograd.grad(expected, list(model.parameters()))
    replicas = Replicas(model, Cast())
    assert replicas.backward(mean_square(model), x, y).item() == pytest.approx(expected.item())
    for gradient, parameter in zip(whole, model.parameters(), strict=True):
        assert torch.allclose(replicas.storage.gradient(parameter), gradient, rtol=1e-5, atol=1e-7)


def test_everything_that_is_rounded_is_rounded() -> None:
    """Each micro-batch, what a rank sends, and the sum that comes back."""
    torch.manual_seed(0)
    codec = BlockFloat8(block=32)
    model, x, y = nn.Linear(8, 4, bias=False), torch.randn(4, 8), torch.randn(4, 4)
    loss = mean_square(model)
    total = torch.zeros(4, 8)
    for rank in range(2):
        one, other = (
            torch.autograd.grad(loss(x[i : i + 1], y[i : i + 1]), model.weight)[0] for i in (2 * rank, 2 * rank + 1)
        )
        total += codec.round_trip(codec.round_trip(one) + other)
    replicas = Replicas(model, codec)
    replicas.backward(loss, x, y)
    assert torch.equal(replicas.storage.gradient(model.weight), codec.round_trip(total) / 4)
    before = model.weight.detach().clone()
    gradient = codec.round_trip(total) / 4
    replicas.step(torch.optim.SGD(model.parameters(), lr=1.0), clip=0)
    assert torch.equal(model.weight, before - gradient)
    assert replicas.storage.gradient(model.weight) is None
    replicas.backward(loss, x, y)
    before = model.weight.detach().clone()
    replicas.step(torch.optim.SGD(model.parameters(), lr=1.0), clip=1e-3)
    assert (before - model.weight.detach()).norm() == pytest.approx(1e-3, rel=1e-2)


def test_formats_by_name() -> None:
    assert gradient_codec("fp8") is None
    assert gradient_codec("gradients:fp8") == BlockFloat8()
    assert codec_pair("gradients:fp8", "int6") == (Cast(), Cast())
    with pytest.raises(ValueError, match="keeps something between messages"):
        gradient_codec("gradients:aq-sgd")
    with pytest.raises(ValueError, match="codec is 'fp9'"):
        Settings(boundaries=("gradients:fp9",))
    with pytest.raises(ValueError, match="batch is 3; allowed: multiples of 2"):
        Settings(boundaries=("gradients:fp8",), batch=3)
    with pytest.raises(ValueError, match="batch is 3; allowed: multiples of 2"):
        Replicas(nn.Linear(2, 2), Cast()).backward(mean_square(nn.Linear(2, 2)), torch.zeros(3, 2), torch.zeros(3, 2))
