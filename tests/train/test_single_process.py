from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowbit.codecs import GroupInt
from lowbit.gradients import GradientStorage
from lowbit.pipeline import emulate_
from lowbit.train.config import OptimizerConfig
from lowbit.train.data import load_data
from lowbit.train.model import build_model
from lowbit.train.single_process import Loss, PlainGradients, train_single_process
from tests.train.runs import losses, tiny


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
