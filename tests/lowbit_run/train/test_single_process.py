import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lowbit.codecs import GroupInt
from lowbit.gradients import GradientStorage
from lowbit.pipeline import emulate_
from lowbit_run.train.config import OptimizerConfig
from lowbit_run.train.data import load_data
from lowbit_run.train.model import build_model
from lowbit_run.train.optim import learning_rate, make_optimizer, scale_, squared_norm
from lowbit_run.train.single_process import Loss, PlainGradients, train_single_process
from tests.lowbit_run.train.runs import losses, tiny


def test_the_losses_are_those_of_lowbit_train(tmp_path: Path):
    pipeline = {"ranks": 1, "schedule": "GPipe", "microbatches": 1}
    config = tiny(tmp_path, pipeline=pipeline, model={"dropout": 0.0}, run={"steps": 4})
    data = load_data(config.data)
    model = build_model(config.model, vocab=256, sequence=config.data.sequence, seed=config.run.seed)
    given = train_single_process(model, data.train, config.optimizer, steps=4, batch=config.data.batch, seed=0)
    assert given == pytest.approx(losses(config)[:4], rel=1e-6)


def test_hooks_see_every_step_and_gradients_go_where_the_caller_wants(tmp_path: Path):
    config = tiny(tmp_path)
    data = load_data(config.data)
    model = build_model(config.model, vocab=256, sequence=config.data.sequence, seed=0).train()
    emulation = emulate_(model, at=["model.layers.1"], forward=GroupInt(bits=4), backward=GroupInt(bits=6))
    seen: list[object] = []

    class Stored(PlainGradients):
        def __init__(self) -> None:
            self.storage = GradientStorage(model)

        def backward(self, loss: Loss, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            assert inputs.shape == targets.shape == (8, 16)
            return super().backward(loss, inputs, targets)

        def step(self, optimizer: torch.optim.Optimizer, clip: float) -> None:
            assert clip == 0.25
            seen.append("step")
            self.storage.step(optimizer)
            self.storage.zero_()

    def before(step: int, ids: torch.Tensor) -> None:
        assert ids.max() < 16
        emulation.set_samples(ids)
        seen.append((step, len(ids)))

    optimizer = OptimizerConfig(clip=0.25, lr_warmup_steps=0, lr_end=1)
    given = train_single_process(
        model, data.train, optimizer, steps=2, batch=8, seed=0, samples=16, gradients=Stored(),
        before_step=before, after_step=lambda step, loss: seen.append((step, loss)),
    )  # fmt: skip
    assert seen == [(0, 8), "step", (0, given[0]), (1, 8), "step", (1, given[1])]
    assert given[1] < given[0]
    assert emulation.traffic.forward_bytes > 0


def test_learning_rate_rises_linearly_and_falls_like_a_cosine():
    config = OptimizerConfig(lr=2.0, lr_end=0.1, lr_warmup_steps=4)
    rates = [learning_rate(config, step=step, steps=25) for step in range(25)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[14] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half way down
    assert rates[-1] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    for rise, steps in [(0, 1), (5, 1), (5, 5), (0, 2)]:
        config = OptimizerConfig(lr=1.0, lr_warmup_steps=rise)
        assert all(0 < learning_rate(config, step=s, steps=steps) <= 1 for s in range(steps)), "in short runs too"


def test_matrices_decay_and_vectors_do_not():
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([("matrix", matrix), ("vector", vector)], OptimizerConfig(lr=0.1, weight_decay=0.5))
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
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        scale_(gradients, norm=0.5, limit=0.7)  # neither small gradients are scaled
        scale_(gradients, norm=5.0, limit=0.0)  # nor any without a limit
    assert squared_norm([]) == 0.0
