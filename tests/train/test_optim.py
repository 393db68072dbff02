from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowbit.train.config import OptimizerConfig
from lowbit.train.optim import learning_rate, make_optimizer, scale_, squared_norm


def test_learning_rate_rises_linearly_and_falls_like_a_cosine():
    config = OptimizerConfig(lr=2.0, lr_end=0.1, lr_warmup_steps=4)
    rates = [learning_rate(config, step=step, steps=25) for step in range(25)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[14] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half way down
    assert rates[-1] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(("rise", "steps"), [(0, 1), (5, 1), (5, 5), (0, 2)])
def test_short_runs_have_a_learning_rate_too(rise, steps):
    config = OptimizerConfig(lr=1.0, lr_warmup_steps=rise)
    assert all(0 < learning_rate(config, step=s, steps=steps) <= 1 for s in range(steps))


def test_matrices_decay_and_vectors_do_not():
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, vector], OptimizerConfig(lr=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


def test_clipping_is_that_of_torch():
    shapes = [(40, 30), (7,), (3, 5)]
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    theirs = nn.utils.clip_grad_norm_(parameters, 0.7)
    norm = math.sqrt(squared_norm(gradients[:1]) + squared_norm(gradients[1:]))
    assert norm == pytest.approx(float(theirs), rel=1e-6)
    scale_(gradients, norm=norm, limit=0.7)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 0.7), (5.0, 0.0)])
def test_small_gradients_and_no_limit_leave_them_alone(norm, limit):
    gradient = torch.tensor([3.0, -4.0])
    scale_([gradient], norm=norm, limit=limit)
    assert gradient.tolist() == [3.0, -4.0]
    assert squared_norm([]) == 0.0
