"""Weights of all ranks on the first one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.collectives import DamagedError
from lowbit.train import TrainConfig, loop, model, train
from lowbit.train.model import gather_weights
from lowbit.wire.messages import Messages
from tests.damage import Flip, on_the_way
from tests.processes import Ranks
from tests.train.runs import tiny


class Module:
    """As much of a stage's module as is asked for."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        shapes = {"matrix": (3 + rank, 50), "vector": (7,), "empty": (0, 4), "number": ()}
        self.aliases = {}
        self.names = {
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)): f"{rank}.{name}"
            for (name, shape), dtype in zip(shapes.items(), (torch.float32, torch.bfloat16) * 2, strict=True)
        }


def gathered(change: Any = None, alien: str = "") -> Any:
    rank = dist.get_rank()
    module: Any = Module(rank)
    if alien and rank == 1:
        module.names = {torch.nn.Parameter(torch.zeros(2)): alien}
    messages = Messages(None, "saving", timeout=10)
    try:
        with mock.patch.object(model, "_PIECE_BYTES", 64), on_the_way(2, change or (lambda count, message: None)):
            return gather_weights({0: module}, messages)
    except DamagedError as error:
        return str(error), error.rank


def test_all_weights_arrive_bit_for_bit(ranks: Ranks):
    first, *others = ranks.run(gathered, ranks=3)
    assert others == [{}, {}]
    expected = {name: w for rank in range(3) for w, name in Module(rank).names.items()}
    assert first.keys() == expected.keys()
    for name, weight in expected.items():
        found: Tensor = first[name]
        assert (found.dtype, found.shape) == (weight.dtype, weight.shape)
        assert torch.equal(found, weight)


def test_a_damaged_piece_names_weight_and_sender(ranks: Ranks):
    outcome = ranks.outcomes(gathered, Flip(5), ranks=3)[0]
    assert outcome[0].startswith("saving, 2.matrix, number 5: the message from rank 2 is damaged: ")
    assert outcome[1] == 2


def test_weights_of_another_rank_are_not_written_over(ranks: Ranks):
    failure = ranks.outcomes(gathered, None, "0.vector", ranks=3)[0]
    assert failure.kind == "ValueError"
    assert failure.text.startswith("rank 1 of the pipeline has 0.vector in float32; allowed: new ")


def _train_with_a_slow_disk(config: TrainConfig, seconds: float) -> int:
    def save(folder: Path, *_: Any) -> None:
        time.sleep(seconds)
        (folder / "config.json").write_text("{}")

    with mock.patch.object(loop, "save_model", save):
        return train(config).steps


def test_a_model_may_take_longer_to_save_than_the_time_limit(ranks: Ranks, tmp_path: Path):
    run = {"steps": 1, "save_model": True, "timeout_seconds": 3, "eval_batches": 1}
    config = tiny(tmp_path, model={"layers": 2}, run=run)
    assert ranks.run(_train_with_a_slow_disk, config, 3.5) == [1, 1]
    assert (tmp_path / "run/model/config.json").exists()
