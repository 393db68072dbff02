from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.gradients import GradientStorage
from lowbit_run.train import rounding, train
from lowbit_run.train.config import OptimizerConfig
from lowbit_run.train.optim import make_optimizer
from lowbit_run.train.rounding import RoundingAdamW, round_
from tests.lowbit_run.train.runs import curve, losses, stopped, tiny
from tests.lowbit_run.train.test_gradients import assert_replicas_equal, weights
from tests.processes import Ranks

BF16 = {"weights": "bf16"}
CONFIG = OptimizerConfig(lr=1e-4, weight_decay=0.0, beta2=0.9)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_PIECE", 256)


def stepped(name: str = "w", steps: int = 20, *, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """A weight of ones after so many steps of 1e-4 down."""
    weight = nn.Parameter(torch.ones(40, 50, dtype=dtype))
    optimizer = make_optimizer([(name, weight)], CONFIG)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight


def test_steps_that_rounding_to_nearest_loses_are_right_on_average(small_pieces: None):
    weight = stepped()
    assert weight.dtype == torch.bfloat16
    # Of 2,000 weights, each a sum of coins with a standard deviation below 2^-8 * sqrt(20 * 0.026).
    assert float(weight.detach().double().mean()) == pytest.approx(
        1 - 20e-4, abs=5 * 2**-8 * (20 * 0.026 / 2000) ** 0.5
    )
    assert torch.equal(weight, stepped()), "copies round alike"
    assert not torch.equal(weight, stepped("another"))


def test_rounding_keeps_what_bfloat16_has_and_lies_between_its_neighbours():
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, float("inf"), float("-inf"), 3.3895e38]).bfloat16().float()
    kept = exact.clone()
    round_(kept, 2**32 - 1)
    assert torch.equal(kept, exact)
    x = torch.full((100_000,), -1 - 2**-9)  # a quarter of the way
    round_(x, 7)
    assert set(x.tolist()) == {-1.0, -1 - 2**-7}
    assert float((x != -1).double().mean()) == pytest.approx(0.25, abs=0.01)
    nan = torch.full((100,), float("nan"))
    round_(nan, 3)
    assert bool(nan.isnan().all())


def test_without_rounding_it_is_adamw_in_pieces_with_gradients_stored_or_not(small_pieces: None):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.Linear(50, 3))

    trained: list[list[Any]] = []
    for make, stores in ((torch.optim.AdamW, False), (RoundingAdamW, False), (RoundingAdamW, True)):
        each = model()
        settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
        groups = [{"params": list(each.named_parameters()), "weight_decay": 0.1}]
        optimizer, storage = make(groups, **settings), GradientStorage(each) if stores else None
        for step in range(3):
            x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad() if storage is None else storage.zero_()
        trained.append([p.detach() for p in each.parameters()])
    for usual, in_pieces, stored in zip(*trained, strict=True):
        torch.testing.assert_close(in_pieces, usual)
        torch.testing.assert_close(stored, usual, atol=3e-2, rtol=0)


def test_a_run_in_bfloat16_resumes_with_the_same_losses_and_has_equal_copies(tmp_path: Path):
    whole, parts = (
        tiny(
            tmp_path / name, model=BF16 | {"tied": True}, run={"steps": 4, "checkpoint_every": 2},
            pipeline={"ranks": 1, "schedule": "ZBVZeroBubble", "stages_per_rank": 2},
        )
        for name in ("whole", "parts")
    )  # fmt: skip
    train(whole)
    held = weights(whole, 0)
    assert {x.dtype for x in held.values()} == {torch.bfloat16}
    assert torch.equal(held["model/model.embed_tokens.weight"], held["model/lm_head.weight"])
    train(stopped(parts, 3))
    assert curve(parts) == curve(whole)


def test_replicas_and_a_tied_pipeline_in_bfloat16_round_alike(ranks: Ranks, tmp_path: Path):
    config = tiny(
        tmp_path, model=BF16 | {"tied": True}, run={"steps": 2, "checkpoint_every": 2},
        pipeline={"data_parallel": 2, "microbatches": 2, "tied_rows": "bf16"}, gradients={"storage": "fp8"},
    )  # fmt: skip
    outcomes = ranks.run(losses, config, ranks=4, timeout=240)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert_replicas_equal(config)
